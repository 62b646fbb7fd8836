"""What bounded replay saves, in rows per layer: cache-and-scheduling 3.2, 4.1 and invariant 26."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from leadline.config.presets import TINY_WINDOW128
from leadline.models.deepseek_v41.model import Block, DeepseekV41, Streams
from tests.replay.harness import Service, bounded, exact, tokens_of
from tests.steps import make_stepper

WINDOW, PAGE, CUT, LAYERS = 128, 256, 4, 8


@functools.cache
def window128_model() -> DeepseekV41:
    return make_stepper(TINY_WINDOW128).model


class RowCounts:
    """Rows that each block saw: of its caches (``begin``), of attention and experts (``finish``).

    Args:
        computes: whether the blocks do their work too; the numbers of rows cannot tell.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, computes: bool) -> None:
        self.caches: Counter[int] = Counter()
        self.attends: Counter[int] = Counter()
        begin, finish = (Block.begin, Block.finish) if computes else (begin_idle, finish_idle)
        monkeypatch.setattr(Block, "begin", self._counted(self.caches, begin))
        monkeypatch.setattr(Block, "finish", self._counted(self.attends, finish))

    def _counted(self, counts: Counter[int], method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(block: Block, streams: Streams | Tensor, *args: Any) -> Any:
            x = streams.before if isinstance(streams, Streams) else streams
            counts[block.layer] += len(x)
            return method(block, streams, *args)

        return call

    def take(self) -> tuple[list[int], list[int]]:
        """Rows by layer since the last call."""
        found = [
            [counts[layer] for layer in range(LAYERS)] for counts in (self.caches, self.attends)
        ]
        self.caches.clear()
        self.attends.clear()
        return found[0], found[1]


def begin_idle(block: Block, streams: Streams, *_: Any) -> tuple[Tensor, Tensor, None]:
    return streams.before, torch.zeros(len(streams.before), block.attn_norm.shape[0]), None


def finish_idle(block: Block, x: Tensor, *_: Any) -> Streams:
    return Streams(x, torch.zeros(x.shape[:2]))


def rows(lower: int, upper: int) -> tuple[list[int], list[int]]:
    """The cut layer makes its caches for every row and attends for the upper ones."""
    above = LAYERS - CUT - 1
    return (
        [lower] * CUT + [lower] + [upper] * above,
        [lower] * CUT + [upper] + [upper] * above,
    )


def service(**options: Any) -> Service:
    return bounded(window128_model(), page_size=PAGE, num_pages=128, **options)


def check_turns(counts: RowCounts, served: Service, prompt: int, answer: int, added: int) -> None:
    """A cold prompt with its answer, and a turn that adds tokens to both."""
    [first] = served.ask(tokens_of(prompt, seed=prompt), max_tokens=answer)
    decoded = answer - 1  # the first token comes from the prompt's last row
    assert counts.take() == rows(prompt + decoded, WINDOW + decoded)

    [second] = served.ask(first.text + tokens_of(added, seed=1), max_tokens=1)
    cached = (prompt + decoded) // PAGE * PAGE
    tail = prompt + answer - cached
    assert (second.cached, second.replayed) == (cached, WINDOW)
    assert counts.take() == rows(WINDOW + tail + added, WINDOW)


@pytest.mark.parametrize("chunk", [None, 300], ids=["one_chunk", "chunks_of_300"])
def test_26_a_turn_runs_the_window_its_tail_and_what_is_new(
    chunk: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = service(chunk=chunk, max_num_batched_tokens=chunk or 2048)
    counts = RowCounts(monkeypatch, computes=True)
    check_turns(counts, served, prompt=700, answer=3, added=300)


@pytest.mark.parametrize(
    ("prompt", "answer", "added"), [(8192, 5, 1), (20_000, 100, 300)], ids=["8K", "20K"]
)
@pytest.mark.parametrize("computes", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_26_long_prompts(
    prompt: int, answer: int, added: int, computes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks that only count stand for the real ones where those would take minutes."""
    counts = RowCounts(monkeypatch, computes=computes)
    check_turns(counts, service(), prompt, answer, added)


@pytest.mark.parametrize(
    ("hit", "end", "upper"),
    [
        (512, 512, 128),
        (512, 513, 128),
        (512, 700, 128),
        (0, 100, 100),
        (0, 128, 128),
        (0, 129, 128),
    ],
)
def test_26_upper_rows_of_a_prefill(
    hit: int, end: int, upper: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``min(E - s, 128)``, at whole hits and short prompts too."""
    counts = RowCounts(monkeypatch, computes=False)
    served = service(chunk=50)
    tokens = tokens_of(end, seed=3)
    if hit:
        served.ask([*tokens[:hit], 5], max_tokens=1)
        counts.take()
    served.ask(tokens, max_tokens=1)
    start = max(0, hit - WINDOW)
    assert counts.take() == rows(end - start, upper)


def test_several_prompts_of_one_step_keep_their_own_trim(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = RowCounts(monkeypatch, computes=False)
    lengths = (700, 128, 40, 300)
    service().ask(*(tokens_of(n, seed=n) for n in lengths), max_tokens=2)
    decoded = len(lengths)
    assert counts.take() == rows(
        sum(lengths) + decoded, sum(min(n, WINDOW) for n in lengths) + decoded
    )


def test_exact_mode_skips_what_a_snapshot_holds_and_trims_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counts = RowCounts(monkeypatch, computes=False)
    served = exact(window128_model(), page_size=PAGE, num_pages=128)
    [first] = served.ask(tokens_of(700, seed=4), max_tokens=3)
    assert counts.take() == rows(702, 702)
    [second] = served.ask(first.text + tokens_of(300, seed=5), max_tokens=1)
    assert (second.cached, second.replayed) == (512, 0)
    assert counts.take() == rows(703 - 512 + 300, 703 - 512 + 300)


def test_prompt_rows_that_are_read_run_the_whole_model(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = RowCounts(monkeypatch, computes=False)
    served = service()
    served.model.bind_cache(served.pool)
    served.engine.prompt_logits(tokens_of(400, seed=6))
    assert counts.take() == rows(400, 400)
