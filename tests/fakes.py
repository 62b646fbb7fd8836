"""Stand-ins with known answers: a model that checks its own memory, and engines around it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING
from unittest import mock

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from leadline.cache.manager import CacheManager
from leadline.cache.replay import ReplayPolicy
from leadline.cache.sizing import CacheSize
from leadline.config.engine import EngineConfig, SchedulerConfig
from leadline.core.request import EngineRequest, SamplingParams
from leadline.engine.engine import Engine
from leadline.engine.sampler import Sampler
from leadline.models.batch import CacheFields, ForwardBatch
from tests.checks import CheckedScheduler

if TYPE_CHECKING:
    from leadline.engine.grammar import GrammarCompiler

VOCAB_SIZE = 97
EOS = 1
FIRST_ID = 20  # ids below it are never generated
NUM_HISTORY = 3

Integers = NDArray[np.int64]


def tags_of(tokens: Sequence[int] | Integers) -> Integers:
    """One number per position that depends on every token up to it, and on their order."""
    return np.cumsum(np.asarray(tokens, np.int64) * np.arange(1, len(tokens) + 1))


def next_token(tokens: Sequence[int]) -> int:
    """What ``FakeModel`` continues a sequence with: a hash of every token; FIRST_ID or above."""
    return _token_after(int(tags_of(tokens)[-1]))


def _token_after(tag: int) -> int:
    return FIRST_ID + tag % (VOCAB_SIZE - FIRST_ID)


def expected_tokens(prompt: Sequence[int], num_tokens: int) -> list[int]:
    """The ``num_tokens`` tokens that follow a prompt when nothing goes wrong."""
    tag, answer = int(tags_of(prompt)[-1]), [] if not num_tokens else [next_token(prompt)]
    for n in range(len(prompt) + 1, len(prompt) + num_tokens):
        tag += answer[-1] * n
        answer.append(_token_after(tag))
    return answer


def sampling(max_tokens: int, **changes: object) -> SamplingParams:
    """Greedy parameters."""
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, **changes)  # type: ignore[arg-type]


def request(
    request_id: str, prompt: Sequence[int], max_tokens: int, **changes: object
) -> EngineRequest:
    """An engine request with greedy parameters."""
    return EngineRequest(request_id, tuple(prompt), sampling(max_tokens, **changes))


class FakeWindow:
    """The window rings of one half of the layers: each row holds its position and text.

    Two rows more than the window suffice: one of a decode, one of a step that ran too far.
    """

    def __init__(self, num_slots: int, window: int) -> None:
        self._window, self._ring = window, window + 2
        self._positions = np.full((num_slots, self._ring), -1)
        self._tags = np.full((num_slots, self._ring), -1)

    def run(self, slot: int, start: int, tags: Integers, floor: int) -> None:
        """Feed rows ``[start, len(tags))``: read the window before them, then store their own."""
        assert start >= floor, f"row {start} runs below the floor {floor}"
        before = np.arange(max(start - self._window + 1, floor), start)
        rows = before % self._ring
        assert (self._positions[slot, rows] == before).all(), "a window row is not there any more"
        assert (self._tags[slot, rows] == tags[before]).all(), "a window row of somebody else"
        fed = np.arange(max(start, len(tags) - self._ring), len(tags))
        self._positions[slot, fed % self._ring] = fed
        self._tags[slot, fed % self._ring] = tags[fed]

    def copy(self, source: int, target: int) -> None:
        self._positions[target] = self._positions[source]
        self._tags[target] = self._tags[source]


@dataclass
class FakeModel:
    """A model whose answer needs every position of its request, read through the page table.

    Pages store ids with their positions, from ``write_from`` on; window rings of a lower and an
    upper half store positions and what text they belong to. A wrong page, slot, chunk, position,
    history, window row or upper row trips an assertion inside the forward.
    """

    size: CacheSize
    window: int = 128
    poison: int | None = None  # an id whose presence makes the logits of its own row NaN
    fail_on: int | None = None  # an id whose presence makes the whole forward raise
    # Whether memory is short now, in a step of so many rows; asked before each group and half.
    is_short: Callable[[int], bool] = lambda num_rows: False
    num_steps: int = 0
    num_lower_rows: int = 0
    num_upper_rows: int = 0
    ids: Integers = field(init=False)
    positions: Integers = field(init=False)
    written_at: Integers = field(init=False)  # the step that wrote each position of each page
    _tags: list[Integers] = field(init=False)  # of the step: by group, of every position
    _ids: list[int] = field(default_factory=list)  # of the step

    def __post_init__(self) -> None:
        self.ids = np.full((self.size.num_pages, self.size.page_size), -1)
        self.positions = np.full((self.size.num_pages, self.size.page_size), -1)
        self.written_at = np.zeros((self.size.num_pages, self.size.page_size), np.int64)
        self.lower_window = FakeWindow(self.size.num_slot_rows, self.window)
        self.upper_window = FakeWindow(self.size.num_slot_rows, self.window)

    def bind_cache(self, cache: CacheFields | None) -> None:
        raise AssertionError("the fake brings its own cache")

    def copy_slots(self, pairs: Sequence[tuple[int, int]]) -> None:
        """As ``CachePool.copy_slots``."""
        for source, target in pairs:
            self.lower_window.copy(source, target)
            self.upper_window.copy(source, target)

    def _allocate(self) -> None:
        if self.is_short(len(self._ids)):
            raise torch.OutOfMemoryError(f"no memory for {len(self._ids)} rows")

    def runs(self, token_id: int) -> bool:
        """Whether the step feeds this id."""
        return token_id in self._ids

    def lower(self, batch: ForwardBatch) -> tuple[Tensor]:
        """``[m]``, the tag of each row; those of all positions so far are kept for ``upper``."""
        self.num_steps += 1
        self.num_lower_rows += len(batch.ids)
        self._ids = batch.ids.tolist()
        if self.fail_on is not None and bool((batch.ids == self.fail_on).any()):
            raise RuntimeError(f"id {self.fail_on} cannot be run")
        slots = batch.slot.tolist()
        assert len(set(slots)) == len(slots), "two groups share a slot"
        ids, pos = batch.ids.numpy(), batch.pos.numpy()
        bounds = list(pairwise(batch.q_off.tolist()))
        self._tags = [
            self._run_lower(batch, g, slots[g], ids[slice(*rows)], pos[slice(*rows)])
            for g, rows in enumerate(bounds)
        ]
        new = [tags[first - end :] for tags, (first, end) in zip(self._tags, bounds, strict=True)]
        return (torch.from_numpy(np.concatenate(new)),)

    def _run_lower(
        self, batch: ForwardBatch, g: int, slot: int, fed_ids: Integers, fed_pos: Integers
    ) -> Integers:
        self._allocate()
        end, size = int(batch.seq_len[g]), self.size.page_size
        start = end - len(fed_ids)
        assert 0 < slot < self.size.num_slots, "a live row in the padding slot or in a snapshot"
        assert (fed_pos == np.arange(start, end)).all(), "positions do not ascend to seq_len"
        pages = batch.page_table[g].numpy()
        write_from = max(start, int(batch.write_from[g]))
        written = np.arange(write_from, end)
        page, place = pages[written // size], written % size
        assert (page > 0).all(), "a live row in the null page"
        self.ids[page, place] = fed_ids[write_from - start :]
        self.positions[page, place] = written
        self.written_at[page, place] = self.num_steps
        ids = self.ids[pages].ravel()[:end]
        assert (self.positions[pages].ravel()[:end] == np.arange(end)).all(), (
            "a page was changed by somebody else, or never written"
        )
        assert (ids[start:] == fed_ids).all(), "cached pages hold another text"
        known = min(NUM_HISTORY, start)
        history = [-1] * (NUM_HISTORY - known) + ids[start - known : start].tolist()
        assert batch.hist[g].tolist() == history, "wrong history before the chunk"
        tags = tags_of(ids)
        self.lower_window.run(slot, start, tags, int(batch.floor_lo[g]))
        return tags

    def upper(self, state: tuple[Tensor, ...], batch: ForwardBatch) -> Tensor:
        """``[u, 2]``: tag and own id of the rows at or above each group's floor."""
        floors, starts = batch.floor_up.tolist(), batch.pos[batch.q_off[:-1]].tolist()
        for slot, start, tags, floor in zip(
            batch.slot.tolist(), starts, self._tags, floors, strict=True
        ):
            self._allocate()
            if max(start, floor) < len(tags):
                self.upper_window.run(slot, max(start, floor), tags, floor)
        upper = batch.pos >= batch.floor_up[batch.req_of_row]
        assert torch.equal(batch.rows_upper, upper.nonzero()[:, 0]), "not the rows from U on"
        assert torch.equal(batch.req_of_upper, batch.req_of_row[upper]), "rows of other groups"
        counts = torch.bincount(batch.req_of_upper, minlength=len(floors))
        assert torch.equal(batch.upper_off.diff(), counts), "not as many rows as there are"
        self.num_upper_rows += len(batch.rows_upper)
        return torch.stack([*state, batch.ids[batch.rows_upper].long()], dim=1)

    def logits(self, hidden: Tensor) -> Tensor:
        """One-hot ``[v, V]`` at ``next_token``."""
        self._allocate()
        tag, own = hidden.unbind(1)
        token = FIRST_ID + tag % (VOCAB_SIZE - FIRST_ID)
        logits = torch.nn.functional.one_hot(token, VOCAB_SIZE).float()
        if self.poison is not None:
            logits[own == self.poison] = torch.nan
        return logits


class FakeEngine(Engine):
    """A real engine around ``FakeModel`` whose scheduler proves what it plans.

    Attributes:
        model: the fake.
        scheduler: with every plan so far.
        cache: its books.
    """

    model: FakeModel
    scheduler: CheckedScheduler
    cache: CacheManager


BOUNDED = ReplayPolicy(lower=True, upper=True, length=128, window=128)


def fake_engine(
    *,
    num_pages: int = 17,
    num_slots: int = 9,
    num_snapshots: int = 0,
    page_size: int = 256,
    max_model_len: int = 2048,
    policy: ReplayPolicy = BOUNDED,
    prefix_caching: bool = True,
    hot_slots: int = 0,
    asynchronous: bool = False,
    checks_integrity: bool = False,
    clock: Callable[[], float] = time.monotonic,
    poison: int | None = None,
    fail_on: int | None = None,
    sampler: Sampler | None = None,
    grammars: GrammarCompiler | None = None,
    **config: int | float | None,
) -> FakeEngine:
    """A real engine around ``FakeModel``; ``config`` changes the scheduler's budgets."""
    size = CacheSize(num_pages, num_slots, page_size, num_snapshots)
    budgets = {"max_num_seqs": num_slots - 1, "max_num_batched_tokens": 512} | config
    model = FakeModel(size, policy.window, poison=poison, fail_on=fail_on)
    cache = CacheManager(
        size,
        enable_prefix_caching=prefix_caching,
        needs_snapshot=policy.needs_snapshot,
        hot_slots=hot_slots,
    )
    with mock.patch("leadline.engine.engine.Scheduler", CheckedScheduler):
        engine = FakeEngine(
            model,
            sampler or Sampler(EOS),
            cache,
            model.copy_slots,
            policy,
            SchedulerConfig(**budgets),  # type: ignore[arg-type]
            vocab_size=VOCAB_SIZE,
            eos_token_id=EOS,
            max_model_len=max_model_len,
            num_history=NUM_HISTORY,
            grammars=grammars,
            asynchronous=asynchronous,
            checks_integrity=checks_integrity,
            clock=clock,
        )
    assert isinstance(engine._scheduler, CheckedScheduler)
    engine.model, engine.scheduler, engine.cache = model, engine._scheduler, cache
    return engine


def build_fake_engine(config: EngineConfig) -> Engine:
    """A factory for an engine process; ids 13 and 14 make a step fail and logits NaN.

    Its model names the folder of a tokenizer, where grammars are wanted.
    """
    grammars, path = None, Path(config.model) / "tokenizer.json"
    if path.exists():
        from leadline.engine.grammar import GrammarCompiler, TokenizerFile

        grammars = GrammarCompiler(TokenizerFile(path, VOCAB_SIZE, EOS))
    return fake_engine(fail_on=13, poison=14, max_num_queued_reqs=16, grammars=grammars)
