"""The indexer module against the golden units, and groups that have no row above the cut."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from leadline.kernels import ops
from leadline.models.batch import forward
from leadline.models.common.attention import StepRows
from leadline.models.common.rows import Rows
from leadline.models.deepseek_v41.attention import Selection
from tests.steps import make_stepper, trimmed


@pytest.mark.parametrize(("layer", "source", "ratio"), [(2, 2, 2), (4, 4, 1), (6, 4, 1)])
def test_indexer_reproduces_the_golden_unit(
    golden: Path, monkeypatch: pytest.MonkeyPatch, layer: int, source: int, ratio: int
) -> None:
    """From ``x`` and ``qr`` to rounded queries, head weights, scores and the selection."""
    cases = load_file(golden / "v41-reference/cases.safetensors")
    unit = {k.removeprefix(f"unit.indexer.{layer}."): v for k, v in cases.items()}
    stepper = make_stepper(golden / "v41-reference", dtype=torch.bfloat16)
    keys, entry = stepper.pool.index[source], torch.arange(300 // ratio)
    page, row = 1 + entry // (256 // ratio), entry % (256 // ratio)
    packed = ops.pack_rows(cases[f"unit.indexer.keys.{source}"], keys.record)
    ops.store_rows(keys, page, row, *packed)
    pos = torch.arange(284, 300)
    group = torch.zeros(1, dtype=torch.int64)
    step = StepRows(
        rows=Rows(
            pos=pos,
            req_of_row=torch.zeros_like(pos),
            q_off=torch.tensor([0, 16]),
            slot=group,
            seq_len=group + 300,
            write_from=group,
            page_table=torch.tensor([[1, 2]]),
            max_len=300,
        ),
        window=None,  # type: ignore[arg-type]  # the indexer has no window
        plain=stepper.model.rotary.plain(pos),
        yarn=stepper.model.rotary.yarn(pos),
        visible={ratio: (pos + 1) // ratio},
    )
    seen: list[Tensor] = []
    index_logits = ops.index_logits

    def watch(q: Tensor, weights: Tensor, *rest: Any, **options: Any) -> Tensor:
        seen.extend((q, weights, index_logits(q, weights, *rest, **options)))
        return seen[-1]

    monkeypatch.setattr(ops, "index_logits", watch)
    chosen = Selection()
    indexer = stepper.model.blocks[layer].attn.indexer
    assert indexer is not None
    indexer.select(unit["x"], unit["qr"], step, keys, ratio, chosen)
    q, weights, scores = seen
    assert torch.equal(q, unit["index_q"])
    assert torch.equal(weights, unit["index_w"])
    assert torch.equal(scores, unit["scores"])
    topk = cases[f"p300.bf16.indexer_topk.{layer}"][-16:].long()
    assert chosen.entries is not None
    # At a tie any set of equal scores is right (README); candidates restrict layer 6 there.
    if layer != 6:
        assert torch.equal(
            scores.gather(1, chosen.entries).sort().values, scores.gather(1, topk).sort().values
        )


def test_groups_may_have_no_row_above_the_cut(golden: Path) -> None:
    """A prefill chunk that only fills caches, beside decode rows that want a logit."""
    tokens = torch.randint(3, 500, (150,)).tolist()
    stepper = make_stepper(golden / "v41-reference", dtype=torch.float64)

    def decode(*, beside_prefill: bool) -> Tensor:
        sequence, other = stepper.start(tokens), stepper.start(tokens[::-1])
        stepper.step([(sequence, 149)])
        parts = [(other, 100), (sequence, 1)] if beside_prefill else [(sequence, 1)]
        batch = stepper.batch(parts)
        batch = trimmed(batch, torch.tensor([len(batch.ids) - 1]))
        with torch.inference_mode():
            return stepper.model.logits(forward(stepper.model, batch))

    torch.testing.assert_close(
        decode(beside_prefill=True), decode(beside_prefill=False), rtol=0, atol=1e-12
    )


def test_scores_may_be_made_in_parts(golden: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two requests long enough to select, and to have candidates; parts of three rows or fewer."""
    prompts = [torch.randint(3, 500, (150,)).tolist() for _ in range(2)]

    def prefill() -> Tensor:
        stepper = make_stepper(golden / "v41-reference", dtype=torch.float64)
        return torch.cat(stepper.step([(stepper.start(ids), len(ids)) for ids in prompts]))

    whole = prefill()
    monkeypatch.setattr("leadline.kernels.reference.blocks._SCORES", 500)
    torch.testing.assert_close(prefill(), whole, rtol=0, atol=1e-12)
