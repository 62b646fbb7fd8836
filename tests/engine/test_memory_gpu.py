"""Memory of a real GPU: measured before the cache is sized, and short while steps run."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from torch import Tensor

import leadline
from leadline import LLM, SamplingParams
from leadline.engine.forwards import GraphMode
from leadline.engine.memory import GIB, CudaMemory
from tests.engine.test_graphs_gpu import Served

pytestmark = pytest.mark.gpu

MB = 2**20


@pytest.fixture
def memory() -> CudaMemory:
    return CudaMemory(torch.device("cuda"))


def test_what_a_function_takes_for_a_while_is_its_peak_and_stays_in_nobodys_use(
    memory: CudaMemory,
) -> None:
    before = memory.in_use()

    def run() -> None:
        for size in (100 * MB, 300 * MB, 50 * MB):
            torch.empty(size, dtype=torch.uint8, device="cuda")

    assert 300 * MB <= memory.added_by(run) <= 460 * MB
    assert memory.in_use() == before
    kept = torch.empty(100 * MB, dtype=torch.uint8, device="cuda")
    assert memory.in_use() - before >= kept.numel()


@pytest.mark.parametrize("graphs", ["off", "all"])
def test_an_engine_keeps_within_its_share(
    memory: CudaMemory, graphs: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    share = (memory.in_use() + 4 * GIB) / memory.total
    llm = LLM(
        Path(leadline.__file__).parent / "data/tiny",
        device="cuda",
        dtype="bfloat16",
        kernel_backend="triton",
        cuda_graphs=graphs,
        gpu_memory_utilization=share,
        max_num_batched_tokens=4096,
        max_num_seqs=32,
        skip_tokenizer_init=True,
    )
    draw = random.Random(1)
    prompts = [[draw.randrange(3, 500) for _ in range(900)] for _ in range(32)]
    params = SamplingParams(temperature=1, top_p=0.9, max_tokens=8, ignore_eos=True, logprobs=5)
    llm.generate(prompts, params, use_tqdm=False)
    free, total = torch.cuda.mem_get_info()
    assert total - free <= share * total + 256 * MB
    [line] = [message for message in caplog.messages if message.startswith("memory: ")]
    assert "for the cache" in line


@pytest.mark.parametrize("mode", [GraphMode.OFF, GraphMode.ALL])
@pytest.mark.parametrize("asynchronous", [False, True], ids=["one_at_a_time", "ahead"])
def test_steps_that_find_no_memory_end_nobody(
    mode: GraphMode, asynchronous: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = Served(mode, asynchronous)
    original, calls = served.model.logits, iter(range(10**6))

    def logits(hidden: Tensor) -> Tensor:
        if next(calls) in (0, 7, 25):
            torch.empty(2**50, dtype=torch.uint8, device="cuda")
        return original(hidden)

    monkeypatch.setattr(served.model, "logits", logits)
    answers = served.answers()
    assert [len(answer) for answer in answers.values()] == [40] * 14
    stats = served.engine.stats()
    assert stats.counters["oom_steps"] == 3
    assert (stats.num_free_pages, stats.num_free_slots) == (stats.num_pages, stats.num_slots)
