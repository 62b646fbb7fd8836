"""No step of a model waits for its device, and no shape of it depends on what tensors hold."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from leadline.engine.launch import AnyModel
from leadline.kernels.reference import attention
from leadline.kernels.registry import Kernels, unfuse
from leadline.models.batch import ForwardBatch, forward_sampled
from leadline.weights.engram_tables import TableMemory
from tests.interpreter import interpreter
from tests.models.test_triton_backend import DEVICE, MODEL
from tests.replay.harness import V4_CONFIG
from tests.steps import AnyStepper, Stepper, V4Stepper, make_stepper, make_v4_stepper, trimmed
from tests.synchronisation import SynchronisationError, refused


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[Kernels]:
    """Triton's. Without a GPU nothing is launched: what counts is done between two launches."""
    with interpreter():
        from leadline.kernels.triton import IMPLEMENTATIONS

        if DEVICE == "cpu":
            module = pytest.importorskip("triton.runtime.interpreter")
            monkeypatch.setattr(module.GridExecutor, "__call__", lambda *_, **__: None)
        yield Kernels(dict.fromkeys(IMPLEMENTATIONS, "triton"))


def stepper() -> Stepper:
    return make_stepper(
        MODEL,
        dtype=torch.bfloat16,
        block_size=16,
        packed=True,
        device=DEVICE,
        num_slots=4,
        table_memory=TableMemory(torch.device(DEVICE)),
    )


def run(model: AnyModel, batch: ForwardBatch) -> Tensor:
    return model.logits(forward_sampled(model, batch))


def v4_stepper() -> V4Stepper:
    """Rows of 64 rotated channels behind 64 others, as kernels have it."""
    config = dataclasses.replace(V4_CONFIG, head_dim=128, qk_rope_head_dim=64, index_head_dim=64)
    return make_v4_stepper(
        config, dtype=torch.bfloat16, block_size=16, packed=True, device=DEVICE, num_slots=4
    )


@pytest.mark.parametrize("make", [stepper, v4_stepper])
@pytest.mark.parametrize("fusions", ["all", "none"])
def test_no_step_synchronises(
    kernels: Kernels,
    fusions: str,
    make: Callable[[], AnyStepper[Any, Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A chunk that is staged and trimmed beside a short one, one that ends early, and decodes."""
    kernels = Kernels(unfuse(kernels.backend_of, fusions))
    monkeypatch.setattr(attention, "host_may_wait", lambda _: False)
    made = make()
    long, short = (made.start(list(range(3, 3 + n))) for n in (60, 9))
    batches = [
        trimmed(made.batch([(long, 30), (short, 5)]), torch.tensor([34], device=DEVICE)),
        trimmed(made.batch([(long, 29)]), torch.empty(0, dtype=torch.int64, device=DEVICE)),
        made.batch([(long, 1), (short, 1)]),
    ]
    for batch in batches:
        batch = dataclasses.replace(
            batch, sample_rows=torch.arange(len(batch.rows_upper), device=DEVICE)
        )
        with torch.inference_mode(), kernels.active():
            run(made.model, batch)  # compiles and tunes, and makes tables of formats
            with refused():
                run(made.model, batch)


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.max().item(),
        lambda x: bool((x > 0).all()),
        lambda x: x[x > 0],
        lambda x: x.nonzero(),
        lambda x: x.repeat_interleave(x),
        lambda x: x + torch.tensor([1, 2, 3]),
        lambda x: x.tolist(),
        lambda x: x.cpu(),
    ],
)
def test_whatever_waits_would_be_found(read: Callable[[Tensor], Any]) -> None:
    with refused(), pytest.raises(SynchronisationError):
        read(torch.arange(3))
