"""What Leadline promises of a model, measured section by section (``sections/``).

``python -m benchmarks.slice --preset slice-96 --json slice.json`` on a machine with a GPU. Weights
are random and made on the device. Sections share what is loaded, and what was measured is written
after every case, so that a run which is cut loses little.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
import traceback
from collections.abc import Callable, Sequence

import torch

from benchmarks.common import (
    PRESET,
    argument_parser,
    environment,
    gpu_environment,
    print_table,
    write_json,
)
from benchmarks.sections import SECTIONS
from benchmarks.sections.section import Bench, Case, Section


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argument_parser(__doc__)
    parser.add_argument("--preset", default=PRESET)
    parser.add_argument(
        "--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS), metavar="NAME"
    )
    parser.add_argument(
        "--seconds", type=float, default=3600.0, help="no case begins after that long"
    )
    return parser.parse_args(argv)


class Clock:
    """Seconds since the run began, and progress told with them."""

    def __init__(self, seconds: float) -> None:
        self._start = time.perf_counter()
        self._seconds = seconds

    @property
    def now(self) -> float:
        return time.perf_counter() - self._start

    def left(self) -> float:
        """Of the run's time."""
        return self._seconds - self.now

    def log(self, text: str) -> None:
        print(f"[{self.now:7.1f} s] {text}", flush=True)


def measure(
    section: Section, bench: Bench, save: Callable[[Sequence[Case]], None]
) -> tuple[list[Case], str | None]:
    """Its cases until time is over, saving what there is after each.

    Returns:
        The cases, and why there are fewer than there should be, if there are.
    """
    found: list[Case] = []
    cases = section.cases(bench)
    try:
        while bench.seconds() > 0:
            case = next(cases, None)
            if case is None:
                return found, None
            found.append(case)
            save(found)
            bench.log(f"case {len(found)}")
    except Exception:  # the sections behind it are worth having
        bench.engines.drop()
        return found, traceback.format_exc()
    return found, "time was over"


def main(argv: Sequence[str] | None = None) -> None:
    args = arguments(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    torch.set_num_threads(args.threads)
    clock = Clock(args.seconds)
    bench = Bench(args.preset, args.quick, clock.left, clock.log)
    sections: dict[str, Sequence[Case]] = {}
    failures: dict[str, str] = {}
    result = environment(args.preset) | gpu_environment()
    result |= {"sections": sections, "failures": failures}
    for name in args.sections:
        clock.log(f"section {name}")

        def save(cases: Sequence[Case], name: str = name) -> None:
            sections[name] = cases
            write_json(args.json, result)

        section = SECTIONS[name]
        found, failure = measure(section, bench, save)
        if failure is not None:
            failures[name] = failure
            clock.log(f"section {name} is not whole: {failure}")
        if found:
            print(f"\n{section.title}\n")
            print_table(*section.table(found))
    write_json(args.json, result)
    if failures:
        sys.exit(1)


if __name__ == "__main__":
    main()
