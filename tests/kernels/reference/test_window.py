"""What the fused insert of a window row means: its parts, one after the other."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from leadline.kernels import ops
from leadline.kernels.packed import RecordField
from leadline.kernels.records import Record
from leadline.kernels.reference import kv_store, norm, rope

EPS = 1e-20
ADDRESSES = torch.tensor([1, -1, 0, 1]), torch.tensor([2, 0, 0, 0])


def make_field(width: int) -> RecordField:
    record = Record.FP8_32
    sizes = [record.value_bytes(width), record.scale_bytes(width)]
    return RecordField(record, *torch.zeros(2, 3, sum(sizes), dtype=torch.uint8).split(sizes, -1))


@pytest.fixture
def given() -> dict[str, Tensor]:
    """Four rows of 96 query channels and 64 others."""
    cos, sin = rope.rope_angles(torch.randint(0, 10**6, (4,)), rope.rope_frequencies(16, 1e4))
    down, weights = torch.randn(4, 160).bfloat16(), torch.rand(160)
    return {"down": down, "query": weights[:96], "weight": weights[96:], "cos": cos, "sin": sin}


def test_rows_with_an_address_are_stored_and_no_others(given: dict[str, Tensor]) -> None:
    x, angles, field = given["down"][:, 96:], (given["cos"], given["sin"]), make_field(64)
    ops.norm_rotate_store(x, given["weight"], *angles, field, *ADDRESSES, eps=EPS)
    rows = rope.rotate(norm.rms_norm(x, given["weight"], eps=EPS), *angles)
    values, scales = kv_store.pack_rows(rows, field.record)
    assert field.scales is not None
    assert scales is not None
    for row, (outer, inner) in enumerate(zip(*ADDRESSES, strict=True)):
        if outer >= 0:
            assert torch.equal(field.values[outer, inner], values[row])
            assert torch.equal(field.scales[outer, inner], scales[row])
    assert (field.scales != 0).any(-1).sum() == 3


def test_a_down_projection_is_a_query_and_a_row_to_store(given: dict[str, Tensor]) -> None:
    down, rest = given["down"], (given["weight"], given["cos"], given["sin"])
    field, wanted = make_field(64), make_field(64)
    query = ops.norm_query_store_window(down, given["query"], *rest, field, *ADDRESSES, eps=EPS)
    ops.norm_rotate_store(down[:, 96:], *rest, wanted, *ADDRESSES, eps=EPS)
    assert torch.equal(query, norm.rms_norm(down[:, :96], given["query"], eps=EPS))
    assert torch.equal(field.values, wanted.values)
