"""Make the choices of a run on a GPU part of the package, so that no later start has to measure.

``python scripts/collect_tunings.py CACHE -o leadline/kernels/tunings/NVIDIA_H200.json`` reads what
kernels were measured with from Triton's cache (``TRITON_CACHE_DIR`` of the run) and merges it into
the file. Choices that no kernel has any more are left out.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import triton

sys.path.insert(0, str(Path(__file__).parents[1]))

import leadline.kernels.triton  # noqa: F401 (makes all tuners)
from leadline.kernels import tunings
from leadline.kernels.triton.launch import TUNERS


def measured(directories: Iterable[Path]) -> tunings.Choices:
    """The fastest configs by caches of Triton, newer files over older ones."""
    paths = [path for directory in directories for path in directory.rglob("*.autotune.json")]
    choices: tunings.Choices = {}
    for path in sorted(paths, key=lambda path: path.stat().st_mtime):
        found = json.loads(path.read_text("utf-8"))
        name, *key = found["key"]
        if name in TUNERS:
            fastest, _ = min(found["configs_timings"], key=lambda timing: timing[1])
            choices[name, tuple(key)] = triton.Config(**fastest).all_kwargs()
    return choices


def is_current(name: str, key: tuple[Any, ...], config: dict[str, Any]) -> bool:
    """Whether there is such a kernel, asked for by so many values, and such a config of it."""
    if name not in TUNERS:
        return False
    tuner = TUNERS[name]
    # Behind the values, Triton's keys have the dtypes of all tensors.
    num_values = sum(not str(part).startswith("torch.") for part in key)
    known = [each.all_kwargs() for each in tuner.configs]
    return num_values == len(tuner.keys) and config in known


def main() -> int:
    """Returns 1 if there was nothing to read."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cache", type=Path, nargs="+", help="directories, with all that they hold")
    parser.add_argument("-o", "--output", type=Path, required=True, help="file to merge into")
    args = parser.parse_args()
    new = measured(args.cache)
    if not new:
        print(f"{', '.join(map(str, args.cache))}: no kernel of Leadline was measured there")
        return 1
    old = tunings.read(args.output) if args.output.exists() else {}
    choices = {
        choice: config for choice, config in (old | new).items() if is_current(*choice, config)
    }
    tunings.write(args.output, choices)
    changed = sum(config != old.get(choice) for choice, config in choices.items())
    print(f"{args.output}: {len(choices)} choices, {changed} of them new or changed")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
