"""A program that compiles grammars to see whether that is safe; ``grammar.py`` runs it.

Some grammars make the compiler overflow its stack or take all memory. Here that ends a process
that nobody misses, instead of the engine. It imports nothing of Leadline, so it starts quickly.

Arguments: the tokenizer's file, the vocabulary's size, the end token's id, seconds for one grammar.
Each line of the input is a grammar as a JSON string, each line of the output its error, ``""``
where there is none. A grammar that takes too long ends the program by SIGALRM.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
import threading

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

# Objects with a thousand optional properties have wider rows than the library's default allows; a
# step stays bounded by its other limits, to some 20 ms. Errors never quote a prompt.
LIMITS = LLParserLimits(max_items_in_row=20_000, verbose_errors=False)
MEMORY_BYTES = 8 * 2**30
# A fraction of what threads of the engine have: what fits here fits there with room to spare.
STACK_BYTES = 2**20


def read_tokenizer(path: str, vocab_size: int, eos_token_id: int) -> LLTokenizer:
    """The compiler's view of a ``tokenizer.json``: its added tokens are never text.

    The files call few of them special, and a marker of tool calls that counted as the characters
    of its name could stand in any string.
    """
    with open(path, encoding="utf-8") as file:
        definition = json.load(file)
    for token in definition["added_tokens"]:
        token["special"] = True
    return LLTokenizer(json.dumps(definition), n_vocab=vocab_size, eos_token=eos_token_id)


def main() -> None:
    """Answer until the input ends."""
    path, vocab_size, eos_token_id, seconds = sys.argv[1:]
    tokenizer = read_tokenizer(path, int(vocab_size), int(eos_token_id))
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_REAL, float(seconds))
        matcher = LLMatcher(tokenizer, json.loads(line), log_level=0, limits=LIMITS)
        if not matcher.is_error():
            matcher.compute_bitmask()
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(json.dumps(matcher.get_error()), flush=True)


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    threading.stack_size(STACK_BYTES)
    threading.Thread(target=main).start()
