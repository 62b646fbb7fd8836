"""In float64 neither chunking nor neighbours change a result; trimmed rows equal clipped ones."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from leadline.models.batch import forward
from tests.steps import Sequence, Stepper, make_stepper, trimmed

GOLDEN = Path(__file__).parents[1] / "golden"
TOLERANCE: dict[str, Any] = {"rtol": 0.0, "atol": 1e-12}


def tokens_of(length: int, seed: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(3, 500) for _ in range(length)]


def make(kv_cache_dtype: str = "auto") -> Stepper:
    return make_stepper(
        GOLDEN / "v41-reference", dtype=torch.float64, kv_cache_dtype=kv_cache_dtype
    )


@pytest.mark.parametrize(
    ("chunk", "kv_cache_dtype"),
    [
        *((chunk, "auto") for chunk in (1, 3, 64, 256)),
        *((7, kv_cache_dtype) for kv_cache_dtype in ("fp8", "bfloat16", "float32")),
    ],
)
def test_any_chunk_size_gives_the_logits_of_one_step(chunk: int, kv_cache_dtype: str) -> None:
    length = 270 if chunk >= 64 else 140
    stepper = make(kv_cache_dtype)
    tokens = tokens_of(length, seed=chunk)
    whole = stepper.feed(stepper.start(tokens))
    torch.testing.assert_close(stepper.feed(stepper.start(tokens), chunk), whole, **TOLERANCE)


@pytest.mark.parametrize("seed", range(4))
def test_random_chunks_beside_random_neighbours(seed: int) -> None:
    draw = random.Random(seed)
    stepper = make()
    prompts = [tokens_of(draw.randrange(2, 290), seed=100 * seed + i) for i in range(4)]
    alone = [stepper.feed(stepper.start(prompt)) for prompt in prompts]
    sequences = [stepper.start(prompt) for prompt in prompts]
    rows: list[list[Tensor]] = [[] for _ in prompts]
    while live := [i for i, s in enumerate(sequences) if s.fed < len(s.tokens)]:
        chosen = draw.sample(live, draw.randrange(1, len(live) + 1))
        parts: list[tuple[Sequence, int]] = []
        for i in chosen:
            left = len(sequences[i].tokens) - sequences[i].fed
            parts.append((sequences[i], min(left, draw.choice((1, 1, 2, 5, 31, 130)))))
        for i, logits in zip(chosen, stepper.step(parts), strict=True):
            rows[i].append(logits)
    for got, want in zip(rows, alone, strict=True):
        torch.testing.assert_close(torch.cat(got), want, **TOLERANCE)


@pytest.mark.parametrize("chunks", [[200], [150, 50], [90, 60, 50], [199, 1]], ids=str)
def test_trimmed_upper_rows_equal_clipped_ones(chunks: list[int]) -> None:
    """Rows below U skip the upper half; the rest must not notice (invariants 27 and 28)."""
    tokens, floor = tokens_of(200, seed=7), 72

    def run(*, trim: bool) -> Tensor:
        stepper = make()
        sequence = stepper.start(tokens)
        sequence.floor_up = floor
        kept = []
        for n in chunks:
            batch = stepper.batch([(sequence, n)])
            inside = (batch.pos >= floor).nonzero().squeeze(1)
            if trim:
                batch = trimmed(batch, inside)
            with torch.inference_mode():
                hidden = forward(stepper.model, batch)
                kept.append(stepper.model.logits(hidden if trim else hidden[inside]))
        kept.append(stepper.step([(extend(sequence), 1)])[0])  # a decode row reads what was left
        return torch.cat(kept)

    torch.testing.assert_close(run(trim=True), run(trim=False), **TOLERANCE)


def extend(sequence: Sequence) -> Sequence:
    sequence.tokens.append(5)
    return sequence


def test_window_reads_stop_at_the_floor() -> None:
    """Ring rows below s may hold anything, even NaN (invariant 18)."""
    tokens = tokens_of(180, seed=3)

    def run(poison: float) -> Tensor:
        stepper = make()
        for field in stepper.pool.window:
            field.values.fill_(0x7F if poison != poison else 0)
        for ring in stepper.pool.open_groups.values():
            ring.fill_(poison)
        sequence = stepper.start(tokens)
        sequence.fed = sequence.floor_lo = sequence.floor_up = 41
        sequence.write_from = 42  # the pair (40, 41) would need a row below the floor
        return stepper.feed(sequence, 50)

    clean = run(0.0)
    assert clean.isfinite().all()
    torch.testing.assert_close(run(float("nan")), clean, **TOLERANCE)


def test_entries_below_write_from_keep_their_bytes() -> None:
    """A replay reads cached entries and never writes them (invariant 17)."""
    tokens = tokens_of(256, seed=4)
    stepper = make()
    sequence = stepper.start(tokens)
    whole = stepper.feed(sequence)
    before = {k: f.values.clone() for k, f in stepper.pool.kv.items()}
    again = stepper.start(tokens)
    again.pages, again.write_from = sequence.pages, 256
    again.fed = again.floor_lo = again.floor_up = 128
    replayed = stepper.feed(again, 60)
    assert not torch.equal(replayed, whole[128:]), "the clipped window is an approximation"
    for layer, values in before.items():
        assert torch.equal(stepper.pool.kv[layer].values, values)
