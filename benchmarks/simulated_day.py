"""A simulated day of agents: what prefix caching saves on a page budget for a quarter of them.

The fake model takes texts of official lengths; the tiny one computes, on texts, pages and a window
that are a sixteenth of it.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import torch
from common import argument_parser, environment, print_table, write_json
from day import MODES, SHORT, Shape, fake_day, make_sessions, policy_of, run_day, size_for

from leadline.cache.layout import cache_layout
from leadline.cache.pool import CachePool
from leadline.config.engine import SchedulerConfig
from leadline.config.presets import preset
from leadline.models.common.parameters import Parameters
from leadline.models.deepseek_v41.model import DeepseekV41
from leadline.parallel.placement import Placement
from leadline.weights.load import DummySource

TINY = "tiny-window128"
TINY_DIVISOR = 16
ROWS = (
    ("hit rate", "hit_rate"),
    ("prefill rows", "prefill_rows"),
    ("of them replayed", "replayed_share"),
    ("rows of the upper half", "upper_rows"),
    ("rows beside no caching", "rows_ratio"),
    ("upper rows beside no caching", "upper_rows_ratio"),
    ("preemptions", "num_preemptions"),
    ("evicted pages", "evicted_pages"),
    ("steps", "steps"),
    ("most requests waiting", "most_waiting"),
    ("idle moments", "idle_moments"),
)


def tiny_day(mode: str, shape: Shape, *, sessions: int, seed: int, divisor: int) -> dict[str, Any]:
    """One day on a random model of the tiny shape, in float64 with float32 records."""
    page_size = 256 // divisor
    config = replace(preset(TINY), sliding_window=128 // divisor)
    people = make_sessions(
        sessions, shape.scaled(divisor), vocab_size=config.image_token_id, seed=seed
    )
    size = size_for(mode, people, page_size)
    source, cpu = DummySource(config), torch.device("cpu")
    params = Parameters(source, torch.float64, cpu, Placement(), quantize_activations=False)
    model = DeepseekV41(config, params, token_map=None, exact_rounding=False)
    source.finish()
    layout = cache_layout(config, kv_cache_dtype="float32", block_size=page_size)
    pool = CachePool(
        layout,
        num_pages=size.num_pages,
        num_slots=size.num_slot_rows,
        step_rows=SchedulerConfig().max_num_batched_tokens,
        wide=params.wide,
    )
    model.bind_cache(pool)
    policy = policy_of(mode, window=config.sliding_window, page_size=page_size)
    return run_day(mode, people, model, size, pool.copy_slots, policy, vocab_size=config.vocab_size)


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--model", choices=("fake", "tiny"), default="fake")
    parser.add_argument("--sessions", type=int, metavar="N", help="200, or 20 of the tiny model")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    live = fake_day if args.model == "fake" else tiny_day
    is_small = args.quick or live is tiny_day
    sessions = args.sessions or (20 if is_small else 200)
    shape, divisor = SHORT if args.quick else Shape(), TINY_DIVISOR if is_small else 1
    model = {"preset": TINY, "dtype": "float64"} if live is tiny_day else {"preset": "fake"}
    record = {**environment(), **model, "seed": args.seed, "divisor": divisor}
    days: dict[str, dict[str, Any]] = {}
    for mode in args.modes:
        start = time.perf_counter()
        days[mode] = live(mode, shape, sessions=sessions, seed=args.seed, divisor=divisor)
        days[mode]["seconds"] = time.perf_counter() - start
    if off := days.get("off"):
        for day in days.values():
            day["rows_ratio"] = day["prefill_rows"] / off["prefill_rows"]
            day["upper_rows_ratio"] = day["upper_rows"] / off["upper_rows"]
            day["same_text_as_off"] = day["text_digest"] == off["text_digest"]
    print(f"{sessions} sessions on the {args.model} model\n")
    print_table(("", *days), [_row(title, key, days) for title, key in ROWS])
    write_json(args.json, {**record, "days": days})


def _row(title: str, key: str, days: dict[str, dict[str, Any]]) -> tuple[str, ...]:
    values = [day.get(key, "") for day in days.values()]
    return title, *(f"{v:.1%}" if isinstance(v, float) else f"{v}" for v in values)


if __name__ == "__main__":
    main()
