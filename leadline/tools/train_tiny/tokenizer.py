"""Train small byte-level BPEs that carry every marker of DeepSeek-V4.1.

Markers are the vocabulary of the chat format (serving-api 1.1), so a tiny model is served, parsed
and streamed exactly like the released one; only the ids differ. The same texts give the same file,
byte for byte. ``python -m leadline.tools.train_tiny.tokenizer OUT TEXT...`` makes the tokenizer of
a model with random weights, which needs no particular splits or ids.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, PreTokenizer, Sequence, Split
from tokenizers.trainers import BpeTrainer

PAD = "<｜▁pad▁｜>"
# Ids 0, 1 and 2, as in the released file: begin of sentence, end of sentence, padding.
CONTROL_MARKERS = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", PAD)

# Not flagged special, as in the released file: skipping special
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
IMAGE = "<｜deepseek_image｜>"

# Ids below belong to control tokens, in ``train_tokenizer``'s layout.
NUM_RESERVED = 64
IMAGE_ID = 60
# What the draft head is fed in place of tokens not known yet: a placeholder, as in the release.
NOISE_ID = 62

# The released splits, with one difference: there up to three digits stay together, here each
# stands alone, so that a small model can learn to calculate. In turn: digits; runs of Chinese and
# Japanese; a punctuation mark with the Latin word behind it, a word with the blank before it,
# punctuation with the line ends behind it, line ends, blanks.
_SPLITS = (
    r"\p{N}",
    "[一-龥\u3040-ゟ゠-ヿ]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""
    r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
)


def train_tokenizer(texts: Iterable[str], *, vocab_size: int) -> Tokenizer:
    """Train the tokenizer of a trained model: single digits, control tokens below ``NUM_RESERVED``.

    Every byte has an id of its own, so any text survives a round trip. Nothing is added around
    an encoded text: the chat format writes its own begin of sentence.

    Args:
        texts: the training text, in pieces.
        vocab_size: ids in all, control tokens and the 256 bytes included; fewer come out when the
            text has no more pairs that occur twice.
    """
    splits = [Split(Regex(pattern), "isolated") for pattern in _SPLITS]
    before = Sequence([*splits, ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer = _train(texts, before, vocab_size, first=_reserved_tokens())
    # The library flags as special whatever comes before the text's own ids.
    definition = json.loads(tokenizer.to_str())
    for token in definition["added_tokens"]:
        token["special"] = token["content"] not in CHAT_MARKERS
    return Tokenizer.from_str(json.dumps(definition))


def train_random_model_tokenizer(texts: Iterable[str], *, vocab_size: int) -> Tokenizer:
    """The same for a model with random weights: the library's splits, chat markers last."""
    before = ByteLevel(add_prefix_space=False)
    num_ids = vocab_size - len(CHAT_MARKERS)
    tokenizer = _train(texts, before, num_ids, first=CONTROL_MARKERS)
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in CHAT_MARKERS])
    return tokenizer


def _reserved_tokens() -> list[str]:
    """Control tokens by id: placeholders, named as the released ones, where there is no marker."""
    tokens = [f"<｜place▁holder▁no▁{i}｜>" for i in range(NUM_RESERVED)]
    markers = (*CONTROL_MARKERS, *(marker for marker in CHAT_MARKERS if marker != IMAGE))
    tokens[: len(markers)] = markers
    tokens[IMAGE_ID] = IMAGE
    return tokens


def _train(
    texts: Iterable[str], before: PreTokenizer, vocab_size: int, *, first: Iterable[str]
) -> Tokenizer:
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = before
    tokenizer.decoder = ByteLevelDecoder()
    trainer = BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=[AddedToken(text, special=True) for text in first],
        initial_alphabet=ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def main() -> None:
    """Command line of this module."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="the tokenizer.json to write")
    parser.add_argument("texts", type=Path, nargs="+", help="text files to train on")
    parser.add_argument("--vocab-size", type=int, default=1024)
    args = parser.parse_args()
    texts = (path.read_text(encoding="utf-8") for path in args.texts)
    train_random_model_tokenizer(texts, vocab_size=args.vocab_size).save(str(args.out))


if __name__ == "__main__":
    main()
