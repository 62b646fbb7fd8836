"""Side streams: nothing is read before it is written, and results are the same to the bit."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from leadline.core.errors import ConfigError
from leadline.engine.forwards import CudaCapture
from leadline.kernels.registry import choose
from leadline.models.batch import ForwardBatch, forward
from leadline.models.common.side_stream import (
    FEW_ROWS,
    FEWER_ROWS,
    Fork,
    SideStream,
    make_side_streams,
)
from leadline.weights.engram_tables import TableMemory
from tests.models.streams import FakeDevice, Race, Watched
from tests.models.test_triton_backend import MODEL
from tests.replay.harness import V4_CONFIG
from tests.steps import AnyStepper, Stepper, make_stepper, make_v4_stepper

CPU = torch.device("cpu")


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    fake = FakeDevice()
    monkeypatch.setattr(torch, "get_device_module", lambda _: fake)
    return fake


class TestFork:
    def test_work_is_launched_at_once_and_its_result_is_there_after_the_join(
        self, device: FakeDevice
    ) -> None:
        x = torch.ones(3)
        with Watched(device):
            fork = SideStream(CPU).fork(partial(torch.add, x, 1))
            assert device.ops_of("side 1") == 1
            assert torch.equal(fork.join() * 2, torch.full((3,), 4.0))

    def test_a_result_that_is_used_before_the_join_is_a_race(self, device: FakeDevice) -> None:
        with Watched(device), pytest.raises(Race, match="on main does not come after"):
            SideStream(CPU).fork(partial(torch.add, torch.ones(3), 1)).value * 2

    def test_an_input_that_is_overwritten_before_the_join_is_a_race(
        self, device: FakeDevice
    ) -> None:
        x = torch.ones(3)
        with Watched(device):
            fork = SideStream(CPU).fork(partial(torch.add, x, 1))
            with pytest.raises(Race):
                x.zero_()
            fork.join()
            x.zero_()

    def test_forks_of_one_side_follow_each_other(self, device: FakeDevice) -> None:
        side = SideStream(CPU)
        with Watched(device):
            first = side.fork(partial(torch.add, torch.ones(3), 1))
            second = side.fork(partial(torch.mul, first.value, 2))
            assert second.join().sum() == 12

    def test_inputs_live_until_the_join(self, device: FakeDevice) -> None:
        """Their memory would else be given to what the current stream is launched next."""
        work = partial(torch.add, torch.ones(3), 1)
        assert SideStream(CPU).fork(work).work is work

    @pytest.mark.parametrize(
        ("options", "num_rows", "is_beside"),
        [
            ({}, 10**6, True),
            ({"enabled": False}, 1, False),
            ({"max_rows": FEW_ROWS}, FEW_ROWS, True),
            ({"max_rows": FEW_ROWS}, FEW_ROWS + 1, False),
        ],
        ids=str,
    )
    def test_what_is_turned_off_or_has_many_rows_runs_where_it_is_forked(
        self, device: FakeDevice, options: dict[str, Any], num_rows: int, is_beside: bool
    ) -> None:
        with Watched(device):
            fork: Fork[Tensor] = SideStream(CPU, **options).fork(
                partial(torch.add, torch.ones(3), 1), num_rows
            )
        assert device.ops_of("side 1") == is_beside
        assert (fork.end is not None) == is_beside


def steps(made: AnyStepper[Any, Any]) -> Iterator[ForwardBatch]:
    """Prompts of few rows and of many, beside each other, and decodes."""
    first, second, third = (made.start(list(range(3, 3 + n))) for n in (100, 30, 7))
    yield made.batch([(first, FEW_ROWS + 1), (second, 2)])
    yield made.batch([(second, FEWER_ROWS + 2)])
    yield made.batch([(second, 9), (third, 6)])
    for _ in range(3):
        yield made.batch([(first, 1)])
    yield made.batch([(first, 1), (second, 1), (third, 1)])


def logits(made: AnyStepper[Any, Any]) -> list[Tensor]:
    with torch.inference_mode():
        return [made.model.logits(forward(made.model, batch)) for batch in steps(made)]


def stepper(device: str = "cpu", **options: Any) -> Stepper:
    return make_stepper(MODEL, device=device, block_size=16, num_slots=4, **options)


def test_no_step_of_a_model_reads_what_is_not_ordered_before(device: FakeDevice) -> None:
    """Coefficients, entries, selections and Engram rows; caches and windows likewise."""
    made = stepper()
    with Watched(device):
        logits(made)
    mixing, indexing, engram = device.streams[1:]
    assert mixing.clock[mixing.name] > 0
    assert indexing.clock[indexing.name] > 0
    assert engram.clock[engram.name] > 0


@pytest.mark.parametrize("forgets", [False, True])
def test_no_step_of_a_v4_reads_what_is_not_ordered_before(
    device: FakeDevice, monkeypatch: pytest.MonkeyPatch, forgets: bool
) -> None:
    """Entries, keys, selections and shared experts; a join that were forgotten would be found."""
    made = make_v4_stepper(V4_CONFIG, block_size=16, num_slots=4)
    [_, beside] = device.streams
    if forgets:
        monkeypatch.setattr(beside, "record_event", lambda: {})
    with Watched(device), pytest.raises(Race) if forgets else nullcontext():
        logits(made)
    assert beside.clock[beside.name] > 0


@pytest.mark.parametrize("number", [1, 2, 3], ids=["mixing", "indexing", "engram"])
def test_a_join_that_were_forgotten_would_be_found(
    device: FakeDevice, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    made = stepper()
    monkeypatch.setattr(device.streams[number], "record_event", lambda: {})
    with Watched(device), pytest.raises(Race):
        logits(made)


MODELS: dict[str, tuple[Callable[[str], AnyStepper[Any, Any]], tuple[str, ...]]] = {
    "V4.1": (
        lambda wanted: stepper(side_streams=wanted, engram_prefetch=False),
        ("mixing", "compressor", "indexer", "shared_expert"),
    ),
    "V4": (
        lambda wanted: make_v4_stepper(V4_CONFIG, block_size=16, num_slots=4, side_streams=wanted),
        ("compressor", "indexer", "shared_expert"),
    ),
}


@functools.cache
def num_ops_beside(model: str, wanted: str) -> int:
    """Of some steps, none of which may read what is not ordered before."""
    make, _ = MODELS[model]
    device = FakeDevice()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "get_device_module", lambda _: device)
        made = make(wanted)
        with Watched(device):
            logits(made)
    return sum(device.ops_of(stream.name) for stream in device.streams[1:])


class TestChosenParts:
    @pytest.mark.parametrize(
        ("model", "part"), [(model, part) for model, (_, parts) in MODELS.items() for part in parts]
    )
    def test_a_part_alone_and_all_but_it_run_in_order_and_add_up_to_all(
        self, model: str, part: str
    ) -> None:
        alone, rest = num_ops_beside(model, part), num_ops_beside(model, f"all,-{part}")
        assert alone > 0
        assert rest > 0
        assert alone + rest == num_ops_beside(model, "all")

    @pytest.mark.parametrize("model", MODELS)
    def test_a_name_of_no_part_is_refused_with_those_of_the_model(self, model: str) -> None:
        make, parts = MODELS[model]
        some = ", ".join(parts)
        with pytest.raises(
            ConfigError, match=f"side_streams has 'x'; write all, none, or some of {some}$"
        ):
            make("indexer,x")

    def test_a_stream_is_made_only_for_parts_that_are_wanted(self, device: FakeDevice) -> None:
        sides = make_side_streams("b", CPU, {("a",): 4, ("b", "c"): 2})
        assert len(device.streams) == 2
        with Watched(device):
            forks = {part: side.fork(partial(torch.ones, 3)) for part, side in sides.items()}
        assert [part for part, fork in forks.items() if fork.end is not None] == ["b"]

    def test_parts_that_share_a_stream_take_turns(self, device: FakeDevice) -> None:
        sides = make_side_streams("all", CPU, {("a",): 4, ("b", "c"): 2})
        assert len(device.streams) == 3
        assert sides["b"] is sides["c"] is not sides["a"]

    @pytest.mark.parametrize(
        ("num_rows", "beside"), [(2, ["a", "b", "c"]), (3, ["a"]), (4, ["a"]), (5, [])]
    )
    def test_each_runs_beside_up_to_rows_of_its_own(
        self, device: FakeDevice, num_rows: int, beside: list[str]
    ) -> None:
        sides = make_side_streams("all", CPU, {("a",): 4, ("b", "c"): 2})
        with Watched(device):
            forks = {
                part: side.fork(partial(torch.ones, 3), num_rows) for part, side in sides.items()
            }
        assert [part for part, fork in forks.items() if fork.end is not None] == beside


def test_without_side_streams_and_prefetch_all_ops_are_of_one_stream(device: FakeDevice) -> None:
    made = stepper(side_streams="none", engram_prefetch=False)
    with Watched(device):
        logits(made)
    assert [stream.name for stream in device.streams] == ["main"]


SOME = pytest.mark.parametrize("side_streams", ["all", *MODELS["V4.1"][1]])


@pytest.mark.gpu
class TestOnAGpu:
    DEVICE = torch.device("cuda")

    @pytest.fixture(autouse=True)
    def _kernels(self) -> Iterator[None]:
        with choose("triton", self.DEVICE, torch.bfloat16).active():
            yield

    def make(self, side_streams: str) -> Stepper:
        return stepper(
            "cuda",
            dtype=torch.bfloat16,
            packed=True,
            table_memory=TableMemory(self.DEVICE),
            side_streams=side_streams,
            engram_prefetch=side_streams == "all",
        )

    @SOME
    def test_logits_are_the_same_to_the_bit(self, side_streams: str) -> None:
        wanted = logits(self.make("none"))
        for _ in range(3):
            for got, want in zip(logits(self.make(side_streams)), wanted, strict=True):
                assert torch.equal(got, want)

    @SOME
    @torch.inference_mode()
    def test_a_graph_has_them_as_branches_and_gives_the_same_to_the_bit(
        self, side_streams: str
    ) -> None:
        wanted = logits(self.make("none"))[-1]
        made = self.make(side_streams)
        for batch in steps(made):
            forward(made.model, batch)
        out = torch.empty_like(wanted)

        def run() -> None:
            """What a step writes is what it finds when it runs again."""
            out.copy_(made.model.logits(forward(made.model, batch)))

        replay = CudaCapture()(run)
        for _ in range(20):
            out.zero_()
            replay()
            assert torch.equal(out, wanted)
