"""Stand-ins with known answers: a model that checks its own memory, and engines around it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from leadline.cache.manager import CacheManager
from leadline.cache.sizing import CacheSize
from leadline.config.engine import EngineConfig, SchedulerConfig
from leadline.core.request import EngineRequest, SamplingParams
from leadline.engine.engine import Engine
from leadline.engine.sampler import Sampler
from leadline.models.batch import CacheFields, ForwardBatch

VOCAB_SIZE = 97
EOS = 1
FIRST_ID = 20  # ids below it are never generated
NUM_HISTORY = 3


def next_token(tokens: Sequence[int]) -> int:
    """What ``FakeModel`` continues a sequence with: a hash of every token; FIRST_ID or above."""
    return FIRST_ID + (7 * sum(tokens) + len(tokens) - 1) % (VOCAB_SIZE - FIRST_ID)


def expected_tokens(prompt: Sequence[int], num_tokens: int) -> list[int]:
    """The ``num_tokens`` tokens that follow a prompt when nothing goes wrong."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


def sampling(max_tokens: int, **changes: object) -> SamplingParams:
    """Greedy parameters."""
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, **changes)  # type: ignore[arg-type]


def request(
    request_id: str, prompt: Sequence[int], max_tokens: int, **changes: object
) -> EngineRequest:
    """An engine request with greedy parameters."""
    return EngineRequest(request_id, tuple(prompt), sampling(max_tokens, **changes))


@dataclass
class FakeModel:
    """A model whose answer needs every position of its request, read through the page table.

    Pages store ids with their positions; a slot stores how far its request has come. A wrong
    page, slot, chunk, position or history trips an assertion inside the forward.
    """

    size: CacheSize
    poison: int | None = None  # an id whose presence makes the logits of its own row NaN
    fail_on: int | None = None  # an id whose presence makes the whole forward raise
    num_steps: int = 0
    ids: Tensor = field(init=False)
    positions: Tensor = field(init=False)
    reached: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.ids = torch.full((self.size.num_pages, self.size.page_size), -1)
        self.positions = torch.full((self.size.num_pages, self.size.page_size), -1)
        self.reached = [0] * self.size.num_slots

    def bind_cache(self, cache: CacheFields) -> None:
        raise AssertionError("the fake brings its own cache")

    def lower(self, batch: ForwardBatch) -> Tensor:
        """``[m, 2]``: sum of all ids up to each row, and its position."""
        self.num_steps += 1
        if self.fail_on is not None and bool((batch.ids == self.fail_on).any()):
            raise RuntimeError(f"id {self.fail_on} cannot be run")
        num_groups = len(batch.slot)
        assert len(set(batch.slot.tolist())) == num_groups, "two groups share a slot"
        state = torch.empty(len(batch.ids), 2, dtype=torch.int64)
        for g in range(num_groups):
            first, last = int(batch.q_off[g]), int(batch.q_off[g + 1])
            state[first:last] = self._run_group(batch, g, slice(first, last))
        return state

    def _run_group(self, batch: ForwardBatch, g: int, rows: slice) -> Tensor:
        slot, end = int(batch.slot[g]), int(batch.seq_len[g])
        start = end - (rows.stop - rows.start)
        pos = torch.arange(start, end)
        assert slot > 0, "a live row in the padding slot"
        assert torch.equal(batch.pos[rows], pos), "positions do not ascend to seq_len"
        assert (batch.req_of_row[rows] == g).all()
        assert start in (0, self.reached[slot]), "a chunk does not continue its slot's request"
        self.reached[slot] = end
        pages = batch.page_table[g].long()
        page, place = pages[pos // self.size.page_size], pos % self.size.page_size
        assert (page > 0).all(), "a live row in the null page"
        self.ids[page, place] = batch.ids[rows].long()
        self.positions[page, place] = pos
        ids = self.ids[pages].flatten()[:end]
        tags = self.positions[pages].flatten()[:end]
        assert torch.equal(tags, torch.arange(end)), "a page was changed by somebody else"
        known = min(NUM_HISTORY, start)
        history = [-1] * (NUM_HISTORY - known) + ids[start - known : start].tolist()
        assert batch.hist[g].tolist() == history, "wrong history before the chunk"
        return torch.stack([ids.cumsum(0)[start:], pos], dim=1)

    def upper(self, state: Tensor, batch: ForwardBatch) -> Tensor:
        """``[u, 3]``: the rows of ``lower`` and their own ids."""
        return torch.cat([state, batch.ids[:, None].long()], dim=1)[batch.rows_upper]

    def logits(self, hidden: Tensor) -> Tensor:
        """One-hot ``[v, V]`` at ``next_token``."""
        total, pos, own = hidden.unbind(1)
        token = FIRST_ID + (7 * total + pos) % (VOCAB_SIZE - FIRST_ID)
        logits = torch.nn.functional.one_hot(token, VOCAB_SIZE).float()
        if self.poison is not None:
            logits[own == self.poison] = torch.nan
        return logits


def fake_engine(
    *,
    num_pages: int = 17,
    num_slots: int = 9,
    max_model_len: int = 2048,
    poison: int | None = None,
    fail_on: int | None = None,
    sampler: Sampler | None = None,
    **config: int,
) -> Engine:
    """A real engine around ``FakeModel``; ``config`` changes the scheduler's budgets."""
    size = CacheSize(num_pages=num_pages, num_slots=num_slots, page_size=256)
    budgets = {"max_num_seqs": num_slots - 1, "max_num_batched_tokens": 512} | config
    return Engine(
        FakeModel(size, poison=poison, fail_on=fail_on),
        sampler or Sampler(EOS),
        CacheManager(size),
        SchedulerConfig(**budgets),
        vocab_size=VOCAB_SIZE,
        eos_token_id=EOS,
        max_model_len=max_model_len,
        num_history=NUM_HISTORY,
    )


def build_fake_engine(config: EngineConfig) -> Engine:
    """A factory for an engine process; ids 13 and 14 make a step fail and logits NaN."""
    return fake_engine(fail_on=13, poison=14, max_num_queued_reqs=8)
