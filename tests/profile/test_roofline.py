"""The tables of kernels.md 16 come out of the formulas.

One GPU of four holds 96 of 384 experts and sees the rows of all four, so its routed experts are
those of the slice with its own rows; of the head it holds a quarter.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from leadline.config.model import ModelConfig
from leadline.config.presets import SLICE_96, V41_FLASH, V41_PRESETS
from leadline.profile.roofline import (
    COMPONENTS,
    H200,
    H200_MEASURED,
    MachineRates,
    decode_bound,
    prefill_bound,
)

QUARTER_HEAD = dataclasses.replace(V41_FLASH, vocab_size=V41_FLASH.vocab_size // 4)

# Table A: microseconds at batches 1, 8, 32, 128 of a GPU, by context.
DECODE = [
    ("mHC seams", 8192, (38.7, 52.0, 97.8, 281)),
    ("router", 8192, (36.7, 37.3, 39.6, 48.9)),
    ("attention projections", 8192, (1180, 1192, 1235, 1641)),
    ("compressor and index projections", 8192, (19.1, 19.4, 20.3, 24.5)),
    ("dense index logits", 100_000, (4.1, 32.6, 130, 521)),
    ("dense index logits", 1_000_000, (40.7, 326, 1302, 5209)),
    ("candidate logits", 100_000, (1.1, 8.5, 34.1, 137)),
    ("candidate logits", 1_000_000, (1.1, 8.5, 34.1, 137)),
    ("selection", 1_000_000, (1.7, 13.3, 53.1, 212)),
    ("attention", 8192, (4.1, 33.0, 132, 528)),
    ("routed experts", 8192, (1027, 6659, 14606, 16996)),
    ("shared expert", 8192, (329, 331, 337, 459)),
    ("Engram", 8192, (73.2, 73.7, 75.2, 102)),
    ("head and sampling", 8192, (77.0, 77.5, 79.0, 85.0)),
]

# Table C: milliseconds by (prompt, replay), at the rate of bf16; what follows is at that of FP8.
PREFILL = [
    ("mHC seams", (1.99, 1.16, 15.7, 8.17, 191, 98.0)),
    ("attention projections", (13.1, 7.41, 105, 53.5, 1282, 644)),
    ("compressor and index projections", (0.16, 0.10, 1.25, 0.72, 15.3, 8.64)),
    ("dense index logits", (None, None, 0.46, 0.28, 68.3, 41.0)),
    ("candidate logits", (0.03, None, 2.19, None, 97.9, 0.14)),
    ("attention", (2.93, 1.46, 32.3, 15.6, 408, 197)),
    ("routed experts", (22.0, 19.5, 176, 96.6, 2150, 1084)),
    ("shared expert", (3.67, 2.06, 29.4, 14.9, 358, 179)),
    ("Engram", (0.82, 0.82, 6.52, 6.52, 79.6, 79.6)),
]
PREFILL_FP8 = [
    ("attention projections", (6.91, 4.17, 55.3, 28.5, 675, 340)),
    ("routed experts", (18.5, 17.7, 92.8, 54.9, 1132, 575)),
    ("shared expert", (1.93, 1.15, 15.5, 7.91, 189, 94.6)),
]
CASES = [(prompt, replay) for prompt in (1024, 8192, 100_000) for replay in (False, True)]
SUMS = {1024: (50.6, 35.9), 8192: (415, 220), 100_000: (5226, 2618)}
NVLINK = {1024: (5.59, 3.15), 8192: (44.7, 22.7), 100_000: (546, 273)}


def _part(component: str) -> ModelConfig:
    return SLICE_96 if component == "routed experts" else QUARTER_HEAD


def _close(wanted: float) -> Any:
    """Within 3 %, or what printing with two decimals leaves open."""
    return pytest.approx(wanted, rel=0.03, abs=0.06 if wanted < 5 else 0)


@pytest.mark.parametrize(("component", "context", "wanted"), DECODE)
def test_decode_table_comes_out(component: str, context: int, wanted: tuple[float, ...]) -> None:
    for batch, us in zip((1, 8, 32, 128), wanted, strict=True):
        bound = decode_bound(_part(component), H200, batch=batch, context=context)
        assert bound[component] == _close(us)


@pytest.mark.parametrize(
    ("component", "fp8", "wanted"),
    [(name, False, row) for name, row in PREFILL]
    + [(name, True, row) for name, row in PREFILL_FP8],
)
def test_prefill_table_comes_out(
    component: str, fp8: bool, wanted: tuple[float | None, ...]
) -> None:
    for (prompt, replay), ms in zip(CASES, wanted, strict=True):
        if ms is None:  # printed with one digit
            continue
        config = _part(component)
        rows = config.sliding_window if replay else None
        bound = prefill_bound(config, H200, prompt=prompt, upper_rows=rows, fp8=fp8)
        assert bound[component] / 1e3 == pytest.approx(ms, rel=0.03, abs=0.005)


@pytest.mark.parametrize(("prompt", "replay"), CASES)
def test_slice_takes_what_the_table_does_without_its_links(prompt: int, replay: bool) -> None:
    """35.9 against 50.6 ms at 1K and 220 against 415 at 8K, of which NVLink has its share."""
    config = dataclasses.replace(SLICE_96, vocab_size=QUARTER_HEAD.vocab_size)
    rows = config.sliding_window if replay else None
    bound = prefill_bound(config, H200, prompt=prompt, upper_rows=rows)
    wanted = SUMS[prompt][replay] - NVLINK[prompt][replay]
    assert sum(bound.values()) / 1e3 == pytest.approx(wanted, rel=0.01)


def test_decode_sum_comes_out() -> None:
    """20.98 ms at batch 128 and 8K, of which 0.699 are NVLink."""
    bound = decode_bound(QUARTER_HEAD, H200, batch=128, context=8192)
    bound |= {
        "routed experts": decode_bound(SLICE_96, H200, batch=128, context=8192)["routed experts"]
    }
    assert sum(bound.values()) == pytest.approx(20980 - 699, rel=0.01)


@pytest.mark.parametrize("config", V41_PRESETS.values(), ids=V41_PRESETS.keys())
def test_every_model_has_a_bound_of_every_component(config: ModelConfig) -> None:
    for bound in (
        decode_bound(config, H200_MEASURED, batch=2, context=300),
        prefill_bound(config, H200_MEASURED, prompt=300, upper_rows=config.sliding_window),
    ):
        assert tuple(bound) == COMPONENTS
        assert all(us > 0 for us in bound.values())


def test_a_machine_twice_as_fast_needs_half_the_time() -> None:
    fast = MachineRates(2 * H200.read, 2 * H200.bf16, 2 * H200.fp8)
    slow = decode_bound(SLICE_96, H200, batch=8, context=8192)
    quick = decode_bound(SLICE_96, fast, batch=8, context=8192)
    assert {name: us / 2 for name, us in slow.items()} == pytest.approx(quick)


def test_wider_records_cost_more_where_they_are_read() -> None:
    """bf16 entries make decode attention wait for bytes; index keys are what scores wait for."""
    plain = decode_bound(SLICE_96, H200, batch=8, context=100_000)
    wide = decode_bound(
        SLICE_96, H200, batch=8, context=100_000, kv_record_bytes=1024, index_record_bytes=256
    )
    grown = {name for name in plain if wide[name] > plain[name]}
    assert {"attention", "dense index logits", "candidate logits"} <= grown
    assert {"routed experts", "mHC seams", "selection"}.isdisjoint(grown)
