"""Train a small byte-level BPE that carries every marker of DeepSeek-V4.1.

``python -m leadline.tools.tiny_tokenizer OUT TEXT...``: the same texts give the same file, byte
for byte. Markers are the vocabulary of the chat format (serving-api 1.1), so a tiny model is
served, parsed and streamed exactly like the released one; only the ids differ.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer

# Ids 0, 1 and 2, as in the released file: begin of sentence, end of sentence, padding.
CONTROL_MARKERS = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>")

# The last ids, in this order. Not flagged special, as in the released file: skipping special
# tokens must not be what hides them.
CHAT_MARKERS = (
    "<｜fim▁hole｜>",
    "<｜fim▁begin｜>",
    "<｜fim▁end｜>",
    "<｜System｜>",
    "<｜User｜>",
    "<｜Assistant｜>",
    "<think>",
    "</think>",
    "｜DSML｜",
    "<｜latest_reminder｜>",
    "<｜action｜>",
    "<｜query｜>",
    "<｜authority｜>",
    "<｜domain｜>",
    "<｜title｜>",
    "<｜read_url｜>",
    "<｜deepseek_image｜>",
    # Spellings that deepseek-recipe knows beyond those, for grounded image answers.
    "<｜image｜>",
    "<｜ref｜>",
    "<｜/ref｜>",
    "<｜box｜>",
    "<｜/box｜>",
    "<｜point｜>",
    "<｜/point｜>",
    "<｜polygon｜>",
    "<｜/polygon｜>",
)


def train_tokenizer(texts: Iterable[str], *, vocab_size: int) -> Tokenizer:
    """Train on ``texts`` and add the markers.

    Every byte has an id of its own, so any text survives a round trip. Nothing is added around
    an encoded text: the chat format writes its own begin of sentence.

    Args:
        texts: the training text, in pieces.
        vocab_size: ids in all, markers and the 256 bytes included; fewer come out when the
            text has no more pairs that occur twice.
    """
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    trainer = BpeTrainer(
        vocab_size=vocab_size - len(CHAT_MARKERS),
        min_frequency=2,
        special_tokens=[AddedToken(text, special=True) for text in CONTROL_MARKERS],
        initial_alphabet=ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in CHAT_MARKERS])
    return tokenizer


def main() -> None:
    """Command line of this module."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="the tokenizer.json to write")
    parser.add_argument("texts", type=Path, nargs="+", help="text files to train on")
    parser.add_argument("--vocab-size", type=int, default=1024)
    args = parser.parse_args()
    texts = (path.read_text(encoding="utf-8") for path in args.texts)
    train_tokenizer(texts, vocab_size=args.vocab_size).save(str(args.out))


if __name__ == "__main__":
    main()
