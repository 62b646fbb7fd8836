from __future__ import annotations

from array import array
from dataclasses import fields

import pytest
import torch

from leadline.core.request import Request, SamplingParams
from leadline.engine.batch_builder import BatchBuilder, BatchLayout, BatchShape, StaticBatch
from leadline.engine.plan import RowGroup, RowKind


def make(num_tokens: int, *, slot: int, pages: list[int], first_id: int = 10) -> Request:
    """A request whose token ids count up from ``first_id``."""
    request = Request(
        "a", array("i", range(first_id, first_id + num_tokens)), 1, SamplingParams(), arrival=0.0
    )
    request.slot, request.pages = slot, array("i", pages)
    return request


def group(
    request: Request, start: int, num_rows: int, num_upper: int, num_sampled: int
) -> RowGroup:
    return RowGroup(request, RowKind.PREFILL, start, num_rows, num_upper, num_sampled)


BUILDER = BatchBuilder(num_history=3, device=torch.device("cpu"))


def test_a_mixed_step_has_the_fields_of_the_contract() -> None:
    decode = make(300, slot=4, pages=[7, 9], first_id=1000)
    start, middle = make(5, slot=2, pages=[3]), make(9, slot=1, pages=[5], first_id=50)
    middle.floor_lo, middle.floor_up, middle.cached = 1, 2, 3
    batch = BUILDER.build(
        [group(decode, 299, 1, 1, 1), group(start, 0, 4, 4, 0), group(middle, 2, 7, 5, 2)]
    )
    assert batch.ids.tolist() == [1299, 10, 11, 12, 13, 52, 53, 54, 55, 56, 57, 58]
    assert batch.pos.tolist() == [299, 0, 1, 2, 3, 2, 3, 4, 5, 6, 7, 8]
    assert batch.req_of_row.tolist() == [0, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2, 2]
    assert batch.q_off.tolist() == [0, 1, 5, 12]
    assert batch.seq_len.tolist() == [300, 4, 9]
    assert batch.slot.tolist() == [4, 2, 1]
    assert batch.floor_lo.tolist() == [0, 0, 1]
    assert batch.floor_up.tolist() == [0, 0, 2]
    assert batch.write_from.tolist() == [0, 0, 3]
    assert batch.page_table.tolist() == [[7, 9], [3, 0], [5, 0]]
    assert batch.hist.tolist() == [[1296, 1297, 1298], [-1, -1, -1], [-1, 50, 51]]
    assert batch.rows_upper.tolist() == [0, 1, 2, 3, 4, 7, 8, 9, 10, 11]
    assert batch.req_of_upper.tolist() == [0, 1, 1, 1, 1, 2, 2, 2, 2, 2]
    assert batch.upper_off.tolist() == [0, 1, 5, 10]
    assert batch.sample_rows.tolist() == [0, 8, 9]
    assert (batch.max_len, batch.max_rows) == (300, 7)


def test_dtypes_are_those_of_the_contract() -> None:
    batch = BUILDER.build([group(make(5, slot=1, pages=[1]), 0, 5, 5, 1)])
    narrow, host = {"ids", "page_table", "hist"}, {"max_len", "max_rows"}
    for name in {field.name for field in fields(batch)} - host:
        expected = torch.int32 if name in narrow else torch.int64
        assert getattr(batch, name).dtype == expected, name


@pytest.mark.parametrize("start", range(5))
def test_history_at_a_split_is_the_requests_own_tokens(start: int) -> None:
    """user-reports E4: n-gram look-back at every offset around the longest n-gram."""
    request = make(8, slot=1, pages=[1])
    other = make(8, slot=2, pages=[2], first_id=70)
    batch = BUILDER.build([group(other, 3, 2, 2, 0), group(request, start, 2, 2, 0)])
    padded = [-1, -1, -1, *request.tokens]
    assert batch.hist[1].tolist() == padded[start : start + 3]


def test_a_request_can_grow_while_its_last_batch_lives() -> None:
    request = make(5, slot=1, pages=[1])
    batch = BUILDER.build([group(request, 0, 5, 5, 1)])
    request.tokens.append(99)  # raises BufferError if the batch were a view of it
    request.pages.append(2)
    assert batch.ids.tolist() == list(range(10, 15))


def test_a_model_without_ngrams_gets_an_empty_history() -> None:
    builder = BatchBuilder(num_history=0, device=torch.device("cpu"))
    batch = builder.build([group(make(5, slot=1, pages=[1]), 2, 3, 3, 1)])
    assert batch.hist.shape == (1, 0)
    assert batch.ids.tolist() == [12, 13, 14]


def test_a_step_in_static_memory_is_padded_to_the_wanted_shape() -> None:
    """Rows of no group, groups without rows, the null page and the padding slot."""
    layout = BatchLayout(BatchShape(16, 6, 12, 9, pages=4), num_history=3)
    buffer = torch.randint(0, 100, (layout.num_bytes,), dtype=torch.uint8)
    static = StaticBatch(layout, buffer, max_len=1000)
    shape = BatchShape(rows=8, groups=4, upper=6, sampled=3, pages=4)
    groups = [
        group(make(300, slot=4, pages=[7, 9], first_id=1000), 299, 1, 1, 1),
        group(make(9, slot=2, pages=[3]), 4, 5, 2, 0),
    ]
    BUILDER.load(static, shape, groups)
    batch = static.batch(shape, max_rows=5)
    assert batch.ids.tolist() == [1299, 14, 15, 16, 17, 18, 0, 0]
    assert batch.pos.tolist() == [299, 4, 5, 6, 7, 8, 0, 0]
    assert batch.req_of_row.tolist() == [0, 1, 1, 1, 1, 1, -1, -1]
    assert batch.q_off.tolist() == [0, 1, 6, 6, 6]
    assert batch.seq_len.tolist() == [300, 9, 1, 1]
    assert batch.slot.tolist() == [4, 2, 0, 0]
    assert batch.page_table.tolist() == [[7, 9, 0, 0], [3, 0, 0, 0], [0] * 4, [0] * 4]
    assert batch.hist[2:].tolist() == [[-1] * 3] * 2
    assert batch.rows_upper.tolist() == [0, 4, 5, 0, 0, 0]
    assert batch.req_of_upper.tolist() == [0, 1, 1, -1, -1, -1]
    assert batch.upper_off.tolist() == [0, 1, 3, 3, 3]
    assert batch.sample_rows.tolist() == [0, 0, 0]
    assert (batch.max_len, batch.max_rows) == (1000, 5)


def test_batches_of_static_memory_have_its_addresses() -> None:
    layout = BatchLayout(BatchShape(16, 6, 12, 9, pages=4), num_history=3)
    static = StaticBatch(layout, torch.zeros(layout.num_bytes, dtype=torch.uint8), max_len=9)
    small, large = (static.batch(BatchShape(n, n, n, n, pages=4), max_rows=1) for n in (2, 6))
    names = {field.name for field in fields(small)} - {"max_len", "max_rows"}
    for name in names:
        assert getattr(small, name).data_ptr() == getattr(large, name).data_ptr(), name
        assert getattr(small, name).data_ptr() % 16 == 0, name
