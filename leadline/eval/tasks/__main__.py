"""``python -m leadline.eval.tasks [FAMILY] [--size N] [--seed N]``: look at exercises."""

from __future__ import annotations

import argparse
import random
from dataclasses import replace
from importlib.resources import files

from leadline.eval.exercise import Exercise, Passage
from leadline.eval.tasks import FAMILIES
from leadline.text.encoding import ChatEncoder
from leadline.text.tokenizer import Tokenizer


def render(exercise: Exercise, encoder: ChatEncoder) -> str:
    """An exercise as the model sees it, markers spelled out."""
    if isinstance(exercise, Passage):
        return exercise.text
    # As if the last turn went on: otherwise its reasoning would be past, and left out.
    whole = replace(exercise.whole(), continue_final_message=True)
    return encoder.tokenizer.decode(encoder.encode(whole).token_ids)


def main() -> None:
    """Print one exercise of a family, or of each."""
    parser = argparse.ArgumentParser(prog="python -m leadline.eval.tasks", description=__doc__)
    parser.add_argument("family", nargs="?", choices=FAMILIES)
    parser.add_argument("--size", type=int, help="tokens of the prompt (default: the shortest)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    encoder = ChatEncoder(Tokenizer(str(files("leadline") / "data" / "tiny" / "tokenizer.json")))
    for family in [FAMILIES[args.family]] if args.family else FAMILIES.values():
        exercise = family.make(random.Random(args.seed), args.size or family.sizes[0])
        print(f"--- {family.name}\n{render(exercise, encoder)}")


if __name__ == "__main__":
    main()
