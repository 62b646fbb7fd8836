"""Who looks on sees each op that a model calls, and who called it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from leadline.kernels import ops
from leadline.kernels.observe import observed
from leadline.kernels.packed import LinearWeight, WeightFormat


class Layer:
    def forward(self, x: Tensor) -> Tensor:
        return ops.rms_norm(x, torch.ones(4), eps=0.0)


@pytest.fixture
def seen() -> list[tuple[str, ...]]:
    return []


@pytest.fixture
def watching(seen: list[tuple[str, ...]]) -> Iterator[None]:
    @contextmanager
    def around(op: str, caller: str) -> Iterator[None]:
        seen.append((op, caller))
        try:
            yield
        finally:
            seen.append((op, "is over"))

    with observed(around):
        yield


def test_a_call_is_seen_with_its_caller(watching: None, seen: list[tuple[str, ...]]) -> None:
    assert torch.equal(Layer().forward(torch.ones(1, 4)), torch.ones(1, 4))
    assert seen == [("rms_norm", "Layer.forward"), ("rms_norm", "is over")]


def test_ops_of_an_op_are_part_of_it(watching: None, seen: list[tuple[str, ...]]) -> None:
    wo_a = LinearWeight(torch.ones(8, 4), WeightFormat.PLAIN).split(4)
    ops.output_projection(torch.ones(1, 2, 4), wo_a, LinearWeight(torch.eye(8), WeightFormat.PLAIN))
    assert [op for op, _ in seen] == ["output_projection"] * 2


def test_an_op_that_fails_is_over(watching: None, seen: list[tuple[str, ...]]) -> None:
    for _ in range(2):
        with pytest.raises(RuntimeError):
            ops.rms_norm(torch.ones(1, 4), torch.ones(5), eps=0.0)
    assert [what for _, what in seen].count("is over") == 2


def test_afterwards_nobody_looks_on(seen: list[tuple[str, ...]]) -> None:
    @contextmanager
    def around(op: str, caller: str) -> Iterator[None]:
        seen.append((op, caller))
        yield

    with observed(around):
        pass
    Layer().forward(torch.ones(1, 4))
    assert seen == []
