"""A whole model in batch-invariant mode: what a request is answered does not depend on others."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

pytest.importorskip("triton")

from leadline.kernels.registry import Kernels
from leadline.weights.engram_tables import TableMemory
from tests.interpreter import interpreter
from tests.models.test_triton_backend import DEVICE, MODEL
from tests.steps import make_stepper


@pytest.fixture(scope="module", autouse=True)
def _interpreter() -> Iterator[None]:
    with interpreter(checks_overflow=False):
        yield


def test_logits_of_a_request_alone_are_those_in_a_batch() -> None:
    """Bit for bit: in two steps beside a longer request, and in one by itself."""
    from leadline.kernels.triton import IMPLEMENTATIONS

    torch.manual_seed(0)
    stepper = make_stepper(
        MODEL,
        dtype=torch.bfloat16,
        block_size=16,
        packed=True,
        device=DEVICE,
        num_slots=4,
        table_memory=TableMemory(torch.device(DEVICE)),
    )
    tokens = torch.randint(3, 500, (2, 12)).tolist()
    short, long, alone = (stepper.start(ids) for ids in (tokens[0], tokens[1], tokens[0]))
    kernels = Kernels(dict.fromkeys(IMPLEMENTATIONS, "triton"), batch_invariant=True)
    with kernels.active():
        first, second = (
            stepper.step([(long, 11), (short, 4)]),
            stepper.step([(long, 1), (short, 1)]),
        )
        (whole,) = stepper.step([(alone, 5)])
    assert torch.equal(torch.cat((first[1], second[1])), whole)
