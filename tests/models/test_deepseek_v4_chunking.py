"""In float64 neither chunking nor neighbours change a result of V4; what a page border needs."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence as Rows
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.models.golden import WAYS
from tests.replay.harness import PAGE, V4_CONFIG, WINDOW, tokens_of
from tests.steps import Sequence, V4Stepper, make_v4_stepper

TOLERANCE: dict[str, Any] = {"rtol": 0.0, "atol": 1e-12}
FIRST_SPARSE = 1  # of the layers whose entries overlap: 1, 3 and 5


def make(kv_cache_dtype: str = "auto") -> V4Stepper:
    return make_v4_stepper(
        V4_CONFIG,
        dtype=torch.float64,
        kv_cache_dtype=kv_cache_dtype,
        block_size=PAGE,
        num_pages=256,
    )


@pytest.mark.parametrize("kv_cache_dtype", ["fp8_ds_mla", "bfloat16", "float32"])
@pytest.mark.parametrize("way", sorted(set(WAYS) - {"one_shot"}))
def test_any_chunks_give_the_logits_of_one_step(way: str, kv_cache_dtype: str) -> None:
    stepper = make(kv_cache_dtype)
    tokens = tokens_of(100, seed=1)
    whole = stepper.feed(stepper.start(tokens))
    torch.testing.assert_close(WAYS[way](stepper, tokens, 90), whole, **TOLERANCE)


@pytest.mark.parametrize("seed", range(4))
def test_random_chunks_beside_random_neighbours(seed: int) -> None:
    draw = random.Random(seed)
    stepper = make()
    prompts = [tokens_of(draw.randrange(2, 120), seed=100 * seed + i) for i in range(4)]
    alone = [stepper.feed(stepper.start(prompt)) for prompt in prompts]
    sequences = [stepper.start(prompt) for prompt in prompts]
    rows: list[list[Tensor]] = [[] for _ in prompts]
    while live := [i for i, s in enumerate(sequences) if s.fed < len(s.tokens)]:
        chosen = draw.sample(live, draw.randrange(1, len(live) + 1))
        parts: list[tuple[Sequence, int]] = []
        for i in chosen:
            left = len(sequences[i].tokens) - sequences[i].fed
            parts.append((sequences[i], min(left, draw.choice((1, 1, 2, 5, 31, 60)))))
        for i, logits in zip(chosen, stepper.step(parts), strict=True):
            rows[i].append(logits)
    for got, want in zip(rows, alone, strict=True):
        torch.testing.assert_close(torch.cat(got), want, **TOLERANCE)


def test_rows_that_are_drafted_and_refused_leave_nothing_behind() -> None:
    """A step of several rows, whose sequence is set back behind its first."""
    stepper = make()
    tokens = tokens_of(60, seed=2)
    want = stepper.feed(stepper.start(tokens))
    sequence, got = stepper.start(tokens), []
    stepper.step([(sequence, 20)])
    while sequence.fed < len(tokens) - 5:
        start = sequence.fed
        sequence.tokens[start + 1 : start + 5] = tokens_of(4, seed=start)
        got.append(stepper.step([(sequence, 5)])[0][:1])
        sequence.tokens[start + 1 : start + 5] = tokens[start + 1 : start + 5]
        sequence.fed = start + 1
    torch.testing.assert_close(torch.cat(got), want[20 : 20 + len(got)], **TOLERANCE)


def restored(stepper: V4Stepper, fed: Sequence, border: int, *, open_rows: float = 1.0) -> Sequence:
    """A sequence that goes on at a page border with what must be kept, in a slot of NaN.

    Kept are pages below the border, a window less one row of every layer, and of layers whose
    entries overlap the first halves of the last group's rows, times ``open_rows``.
    """
    pool = stepper.pool
    sequence = stepper.start(fed.tokens)
    sequence.fed = border
    sequence.pages[: border // PAGE] = fed.pages[: border // PAGE]
    kept = torch.arange(border - WINDOW + 1, border) % pool.ring
    for window in pool.window:
        window.values[sequence.slot] = math.nan
        window.values[sequence.slot, kept] = window.values[fed.slot, kept]
    for groups in (pool.open_groups, pool.open_index_groups):
        for layer, rings in groups.items():
            rings[sequence.slot] = math.nan
            if stepper.config.compress_ratios[layer] == 4:
                last = torch.arange(border - 4, border) % rings.shape[1]
                first, second = (
                    part.unflatten(-1, (2, 2, -1))[..., 0, :]
                    for part in (rings[fed.slot, last], rings[sequence.slot, last])
                )
                second.copy_(first * open_rows)
                whole = rings[sequence.slot, last].unflatten(-1, (2, 2, -1))
                whole[..., 0, :] = second
                rings[sequence.slot, last] = whole.flatten(-3)
    return sequence


@pytest.mark.parametrize("chunk", [1, 7, 64])
@pytest.mark.parametrize("border", [PAGE, 3 * PAGE])
def test_a_page_border_needs_windows_and_half_of_four_rows(border: int, chunk: int) -> None:
    stepper = make("float32")
    cold = stepper.start(tokens_of(80, seed=4))
    want = stepper.feed(cold)
    # The cold sequence has gone on since: what it fed up to the border is done once more.
    fed = stepper.start(cold.tokens[:border])
    stepper.feed(fed)
    fed.tokens = cold.tokens
    got = stepper.feed(restored(stepper, fed, border), chunk)
    torch.testing.assert_close(got, want[border:], **TOLERANCE)


def entries(stepper: V4Stepper, sequence: Sequence, layer: int) -> Tensor:
    field = stepper.pool.kv[layer]
    return torch.cat([field.values[page] for page in sequence.pages])


def test_without_these_rows_one_entry_is_wrong_and_then_all_that_follows() -> None:
    stepper, border = make("float32"), 2 * PAGE
    tokens = tokens_of(border + 24, seed=5)
    fed = stepper.start(tokens[:border])
    stepper.feed(fed)
    fed.tokens = tokens
    right = restored(stepper, fed, border)
    want = stepper.feed(right)
    wrong = restored(stepper, fed, border, open_rows=0.0)
    got = stepper.feed(wrong)
    first = border // 4

    def differs(layer: int) -> list[int]:
        one, other = (entries(stepper, sequence, layer) for sequence in (right, wrong))
        same = torch.isclose(one, other, rtol=0, atol=1e-6).all(1)
        return (~same[: len(tokens) // 4]).nonzero().flatten().tolist()

    assert differs(FIRST_SPARSE) == [first]
    assert differs(3)[0] == first
    assert len(differs(3)) > 1
    close = torch.isclose(got, want, **TOLERANCE).all(1).tolist()
    assert close[:3] == [True] * 3  # nobody sees the entry before the group closes
    assert not all(close[3:])


def seen_keys(stepper: V4Stepper, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, Rows[int]]]:
    """Of every layer that attends: its number, and how many entries each row sees."""
    seen: list[tuple[int, Rows[int]]] = []
    for block in stepper.model.blocks:

        def attend(*args: Any, layer: int = block.layer, call: Any = block.attn.attend) -> Tensor:
            q, _, _, kv, selected, visible = (*args, None)[:6]
            counts = torch.zeros(len(q), dtype=torch.int64)
            if kv is not None:
                counts = visible if selected is None else (selected >= 0).sum(1)
            seen.append((layer, counts.tolist()))
            return call(*args)  # type: ignore[no-any-return]

        monkeypatch.setattr(block.attn, "attend", attend)
    return seen


def test_rows_see_entries_of_whole_groups_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    stepper = make()
    seen = seen_keys(stepper, monkeypatch)
    stepper.feed(stepper.start(tokens_of(50, seed=6)))
    assert [layer for layer, _ in seen] == list(range(6))
    for layer, counts in seen:
        ratio = stepper.config.compress_ratios[layer]
        most = stepper.config.index_topk if ratio == 4 else 50
        wanted = [min((p + 1) // ratio, most) if ratio else 0 for p in range(50)]
        assert counts == wanted, layer


def test_gate_rows_of_experts_that_a_token_has_not_change_nothing_where_tokens_choose() -> None:
    stepper = make()
    ffn = stepper.model.blocks[0].ffn
    assert ffn.experts_of_tokens is not None
    x, token = torch.randn(1, 128).double(), torch.tensor([9])
    rows = torch.zeros(1, dtype=torch.int64)
    before = ffn.forward(x, rows, token)
    others = torch.ones(8, dtype=torch.bool)
    others[ffn.experts_of_tokens[token].long()] = False
    ffn.gate[others] = ffn.gate[others].flip(0)
    assert torch.equal(ffn.forward(x, rows, token), before)
