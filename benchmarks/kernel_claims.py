"""What fusing brings on this machine, beside what was published for others.

Reads what ``kernels.py --json`` wrote and measures nothing itself: each line sets one launch (or
pair) beside the separate launches that it replaces. These are our own kernels where the parts exist
on their own, public kernels timed on an H200 (kernels.md 18) elsewhere, and always the chain that
eager torch runs, in a graph too.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common import print_table

RESULTS = Path(__file__).parent / "results/kernels-h200.json"


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A fusion and what was published of it.

    Attributes:
        name: of the fusion.
        published: the gain that is claimed, on the authors' GPU.
        fused: op that is one launch (or pair).
        separate: ops that do the same in steps, at the same shape.
        public: a peer's name in the fused op's results that is such a chain.
        shapes: of all of them.
    """

    name: str
    published: str
    fused: str
    separate: Sequence[str] = ()
    public: str = ""
    shapes: Sequence[str]


def _rows(*counts: int) -> tuple[str, ...]:
    return tuple(f"T={count}" for count in counts)


CLAIMS = (
    Claim(
        name="mHC seam",
        published="1.14-1.51x (GB200)",
        fused="mhc_seam",
        separate=("mhc_expand", "mhc_enter"),
        public="SGLang expand, collapse + norm",
        shapes=_rows(1, 8, 64, 512, 8192),
    ),
    Claim(
        name="gate",
        published="1.18-1.31x (medium batch, Blackwell)",
        fused="route",
        public="cuBLAS + topk_softplus_sqrt",
        shapes=_rows(1, 8, 64, 512, 8192),
    ),
    Claim(
        name="compressor, norm, RoPE, insert",
        published="1.4-3x",
        fused="store_entries",
        public="compressor chain",
        shapes=tuple(f"ratio=2,{rows}" for rows in _rows(1, 8, 64, 512, 8192)),
    ),
    Claim(
        name="Q norm, RoPE, window insert",
        published="10-20x (over eager)",
        fused="norm_query_store_window",
        public="norms, then insert and query rotation",
        shapes=_rows(1, 8, 64, 512, 8192),
    ),
    Claim(
        name="compressor of V4, norm, RoPE, insert",
        published="1.4-3x",
        fused="store_entries",
        shapes=tuple(
            f"V4,{kind},{rows}"
            for kind in ("c4a", "c4a index", "c128a")
            for rows in _rows(1, 8, 64, 512, 8192)
        ),
    ),
    Claim(
        name="Q norm, RoPE, window insert of V4",
        published="10-20x (over eager)",
        fused="norm_query_store_window",
        shapes=tuple(f"V4,{rows}" for rows in _rows(1, 8, 64, 512, 8192)),
    ),
    Claim(
        name="attention of V4, inverse RoPE, FP8",
        published="2-3x (without attention)",
        fused="sparse_attention",
        shapes=tuple(f"V4,c4a to FP8,{rows}" for rows in _rows(1, 8, 64)),
    ),
    Claim(
        name="WO-A with inverse RoPE",
        published="up to 2.1x",
        fused="output_projection",
        shapes=_rows(1, 32, 8192),
    ),
    Claim(
        name="attention with its ends",
        published="1.45x (64 heads, from 128 tokens)",
        fused="sparse_attention",
        public="chain",
        shapes=tuple(f"{rows},H=64,fp4_16" for rows in _rows(1, 8, 32, 128, 512)),
    ),
    Claim(
        name="candidate logits",
        published="1.2x (8K) to 14-23x (512K)",
        fused="candidate_logits",
        separate=("index_logits",),
        public="SGLang, masked FP4",
        shapes=tuple(f"S={size},{rows}" for size in ("512K", "1024K") for rows in _rows(1, 8, 32)),
    ),
)


def lines(results: Sequence[dict[str, Any]]) -> list[list[str]]:
    """One row for each claim and shape that was measured."""
    by_case = {(result["op"], result["shape"]): result for result in results}
    found = []
    for claim in CLAIMS:
        for shape in claim.shapes:
            fused = by_case.get((claim.fused, shape))
            if fused is None:
                continue
            parts = [by_case.get((op, shape)) for op in claim.separate]
            own = sum(part["us"] for part in parts if part) if all(parts) else 0.0
            times = (own, fused["peers"].get(claim.public, 0.0), fused["unfused_us"] or 0.0)
            ratios = [f"{us / fused['us']:.2f}" if us else "" for us in times]
            found.append([claim.name, shape, f"{fused['us']:.1f}", *ratios, claim.published])
    return found


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path, nargs="?", default=RESULTS)
    results = json.loads(parser.parse_args().results.read_text())["results"]
    header = ["fusion", "shape", "us", "own steps/ours", "public steps/ours", "eager/ours"]
    print_table([*header, "published"], lines(results))


if __name__ == "__main__":
    main()
