"""Against float64, numba's float32 errs no more than the reference's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from leadline.kernels import ops
from leadline.kernels.packed import LinearWeight, RecordField, WeightFormat
from leadline.kernels.records import Record
from leadline.kernels.reference.rope import rope_angles, rope_frequencies
from tests.kernels.cpu.conftest import Both

M = 64
Arguments = tuple[list[Any], dict[str, Any]]


def plain(*shape: int) -> LinearWeight:
    return LinearWeight(torch.randn(shape) * shape[-1] ** -0.5, WeightFormat.PLAIN)


def packed(record: Record, channels: int) -> RecordField:
    """Four pages of 128 entries."""
    return RecordField(record, *ops.pack_rows(torch.randn(4, 128, channels), record))


def mixing() -> Arguments:
    coefficients = [torch.randn(24, 1024) / 32, torch.randn(24), torch.full((3,), 0.5)]
    return [3 * torch.randn(M, 4, 256), *coefficients], {
        "sinkhorn_iters": 20,
        "hc_eps": 1e-6,
        "eps": 1e-20,
    }


def expanding() -> Arguments:
    streams, comb = torch.randn(M, 4, 256), torch.rand(M, 4, 4).softmax(-1)
    return [torch.randn(M, 256), streams, torch.rand(M, 4), comb], {}


def expert_rows() -> Arguments:
    ids = torch.rand(M, 16).topk(2).indices.sort(-1).values
    weights = [plain(16, 128, 256), plain(16, 256, 64)]
    return [torch.randn(M, 256), ids, torch.rand(M, 2), *weights], {"limit": 10.0}


def attending() -> Arguments:
    angles = rope_angles(7 * torch.arange(M), rope_frequencies(16, 10000.0))
    window = [packed(Record.FP8_32, 64), torch.randint(100, (M, 32)), torch.full((M,), 32)]
    chosen = torch.stack([torch.randperm(512)[:64].sort().values for _ in range(M)])
    pages, group = torch.tensor([[2, 0, 3, 1]]), torch.zeros(M, dtype=torch.int64)
    entries = [packed(Record.FP4_16, 64), pages, group, chosen]
    q = 3 * torch.randn(M, 8, 64)
    return [q, *angles, *window, *entries, torch.randn(8)], {"exact_rounding": False}


def scoring() -> Arguments:
    rows = [torch.tensor([[2, 0, 3, 1]]), torch.zeros(M, dtype=torch.int64), torch.full((M,), 512)]
    q, weights = torch.randn(M, 4, 32), torch.randn(M, 4)
    return [q, weights, packed(Record.FP4_32, 32), *rows, 512], {"exact_rounding": False}


CASES: dict[str, Callable[[], Arguments]] = {
    "rms_norm": lambda: ([torch.randn(M, 256), torch.randn(256)], {"eps": 1e-20}),
    "mhc_coefficients": mixing,
    "mhc_collapse": lambda: ([torch.randn(M, 4, 256), torch.rand(M, 4)], {}),
    "mhc_expand": expanding,
    "routed_experts": expert_rows,
    "shared_expert": lambda: (
        [torch.randn(M, 256), plain(128, 256), plain(256, 64)],
        {"limit": 10.0},
    ),
    "sparse_attention": attending,
    "index_logits": scoring,
}


def widened(argument: Any) -> Any:
    if isinstance(argument, LinearWeight):
        return LinearWeight(argument.dense.double(), argument.format)
    if isinstance(argument, Tensor) and argument.dtype is torch.float32:
        return argument.double()
    return argument


@pytest.mark.parametrize("name", CASES)
def test_errors_are_those_of_float32(both: Both, name: str) -> None:
    args, kwargs = CASES[name]()
    exact = getattr(ops, name)(*map(widened, args), **kwargs)
    results = [*both(name, *args, **kwargs), exact]
    fast, wanted, true = (r if isinstance(r, tuple) else (r,) for r in results)
    for got, reference, truth in zip(fast, wanted, true, strict=True):
        mine, torchs = ((x - truth).abs().mean() for x in (got, reference))
        assert 0 < mine < 1.5 * torchs
