"""A real engine around a tiny real model, and everything that its requests got from it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from leadline.cache.layout import cache_layout
from leadline.cache.manager import CacheManager
from leadline.cache.pool import CachePool
from leadline.cache.replay import ReplayPolicy
from leadline.cache.sizing import CacheSize
from leadline.config.engine import CacheConfig, SchedulerConfig
from leadline.config.v4_presets import TINY_V4
from leadline.core.request import EngineRequest, FinishReason, SamplingParams
from leadline.engine.batch_builder import BatchBuilder
from leadline.engine.engine import Engine
from leadline.engine.forwards import Capture, GraphLimits, GraphMode, Graphs
from leadline.engine.launch import AnyModel
from leadline.engine.sampler import Sampler
from leadline.engine.settings import resolve_policy
from leadline.models.deepseek_v4.model import DeepseekV4
from leadline.models.deepseek_v41.model import DeepseekV41
from tests.steps import STEP_ROWS, Stepper, make_stepper, make_v4_stepper

GOLDEN = Path(__file__).parents[1] / "golden"
EXACT = functools.partial(torch.testing.assert_close, rtol=0.0, atol=1e-12)
WINDOW = 8  # of most tests: a replay is short, and still longer than a compression group
FULL_HALO = (WINDOW - 1) * 8  # of 8 layers: rows that a replay needs to be exact
PAGE = 16
MOST_STEPS = 1000  # far more than any test needs: an engine that waits for ever fails


@functools.cache
def tiny_model(
    window: int = WINDOW, dtype: torch.dtype = torch.float64, *, quantized: bool = True
) -> DeepseekV41:
    """The golden checkpoint's model: 8 layers, Engram at 1 and 3, KV sources 2 and 4."""
    return make_stepper(
        GOLDEN / "v41-tiny", dtype=dtype, window=window, quantize_activations=quantized
    ).model


# Every kind of layer, at the least of its size.
V4_CONFIG = dataclasses.replace(
    TINY_V4,
    sliding_window=WINDOW,
    compress_ratios=(0, 4, 16, 4, 16, 4),
    index_topk=4,
    dspark_block_size=0,
    dspark_target_layer_ids=(),
    num_nextn_predict_layers=0,
)


@functools.cache
def tiny_v4_model(dtype: torch.dtype = torch.float64) -> DeepseekV4:
    """A V4 with random weights, of pages of ``PAGE`` tokens."""
    return make_v4_stepper(V4_CONFIG, dtype=dtype, block_size=PAGE).model


def stepper_of(model: DeepseekV41, *, num_pages: int = 64, step_rows: int = STEP_ROWS) -> Stepper:
    """The model with an empty cache and no engine, for steps of so many rows."""
    layout = cache_layout(model.config, block_size=PAGE)
    pool = CachePool(
        layout, num_pages=num_pages, num_slots=16, step_rows=step_rows, wide=model.wide
    )
    model.bind_cache(pool)
    return Stepper(model.config, model, pool, torch.device("cpu"))


def tokens_of(length: int, seed: int) -> list[int]:
    """Random text without a marker; the same seed gives prefixes of the same text."""
    return np.random.default_rng(seed).integers(3, 500, length).tolist()  # type: ignore[no-any-return]


@dataclass
class Answer:
    """What a request got.

    Attributes:
        chosen: log-probability of each token.
        rows: those of the whole vocabulary, float64 ``[V]``, unless only the chosen are wanted.
    """

    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    chosen: list[float] = field(default_factory=list)
    rows: list[Tensor] = field(default_factory=list)
    cached: int = 0
    replayed: int = 0
    finish_reason: FinishReason | None = None

    @property
    def text(self) -> list[int]:
        """The prompt and what followed."""
        return self.prompt + self.tokens

    @property
    def logprobs(self) -> Tensor:
        """``[n, V]``."""
        return torch.stack(self.rows)


MODELS: dict[str, Callable[[], AnyModel]] = {"v41": tiny_model, "v4": tiny_v4_model}


class Service:
    """An engine with its own cache; engines of one model take turns.

    Args:
        model: shared; its cache is bound anew before each step.
        lower: ``ReplayPolicy.lower``, and so on.
        chunk: rows of one prompt in a step at most.
        page_size: token positions of a page.
        num_pages: that requests can hold.
        num_seqs: requests that run at once.
        num_snapshots: 0 where no hit needs one.
        capture: what stands for a graph launches the same again, on the same memory.
    """

    def __init__(
        self,
        model: AnyModel,
        *,
        lower: bool,
        upper: bool,
        length: int | None = None,
        caching: bool = True,
        chunk: int | None = None,
        page_size: int = PAGE,
        num_pages: int = 255,
        num_seqs: int = 10,
        num_snapshots: int = 64,
        kv_cache_dtype: str = "auto",
        asynchronous: bool = False,
        max_num_batched_tokens: int = 2048,
        max_model_len: int | None = None,
        graphs: GraphMode = GraphMode.OFF,
        capture: Capture = lambda run: run,
    ) -> None:
        config = model.config
        max_model_len = max_model_len or config.max_position_embeddings
        layout = cache_layout(config, kv_cache_dtype=kv_cache_dtype, block_size=page_size)
        self.size = CacheSize(num_pages + 1, num_seqs + 1, page_size, 0 if lower else num_snapshots)
        self.model = model
        self.pool = CachePool(
            layout,
            num_pages=self.size.num_pages,
            num_slots=self.size.num_slot_rows,
            num_snapshots=self.size.num_snapshots,
            step_rows=max_num_batched_tokens,
            wide=model.wide,
        )
        self.cache = CacheManager(
            self.size, enable_prefix_caching=caching, needs_snapshot=not lower
        )
        num_history = model.num_history
        forwards: Graphs | None = None
        if graphs is not GraphMode.OFF:
            model.bind_cache(self.pool)
            forwards = Graphs(
                model,
                BatchBuilder(num_history=num_history, device=torch.device("cpu")),
                capture,
                graphs,
                GraphLimits(num_seqs, max_num_batched_tokens, max_model_len, config.vocab_size),
                self.size,
            )
            forwards.capture()
        self.engine = Engine(
            model,
            Sampler(config.eos_token_id),
            self.cache,
            self.pool.copy_slots,
            ReplayPolicy(
                lower=lower,
                upper=upper,
                length=length or config.sliding_window,
                window=config.sliding_window,
            ),
            SchedulerConfig(
                max_num_seqs=num_seqs,
                max_num_batched_tokens=max_num_batched_tokens,
                long_prefill_threshold=chunk,
            ),
            vocab_size=config.vocab_size,
            eos_token_id=config.eos_token_id,
            max_model_len=max_model_len,
            num_history=num_history,
            graphs=forwards,
            asynchronous=asynchronous,
            checks_integrity=True,
        )
        self.answers: dict[str, Answer] = {}

    def add(
        self,
        name: str,
        prompt: Sequence[int],
        max_tokens: int = 4,
        *,
        salt: str | None = None,
        priority: int = 0,
        logprobs: int = -1,
    ) -> Answer:
        """Queue a greedy request; what it gets appears in the returned answer."""
        sampling = SamplingParams(
            temperature=0, max_tokens=max_tokens, ignore_eos=True, logprobs=logprobs
        )
        self.engine.add(
            EngineRequest(name, tuple(prompt), sampling, priority=priority, cache_salt=salt)
        )
        answer = self.answers[name] = Answer(list(prompt))
        return answer

    def step(self) -> None:
        self.model.bind_cache(self.pool)
        for output in self.engine.step():
            answer = self.answers[output.request_id]
            answer.tokens += output.token_ids
            for entry in output.logprobs:
                answer.chosen.append(entry.logprob)
                if not entry.top:
                    continue
                row = torch.empty(len(entry.top), dtype=torch.float64)
                ids, values = zip(*entry.top, strict=True)
                row[list(ids)] = torch.tensor(values, dtype=torch.float64)
                answer.rows.append(row)
            answer.cached, answer.replayed = output.num_cached_tokens, output.num_replayed_tokens
            answer.finish_reason = output.finish_reason
            assert output.error is None, output.error

    def run(self) -> None:
        """Step until everything has ended, and nothing is held."""
        for _ in range(MOST_STEPS):
            if not self.engine.has_work:
                break
            self.step()
        assert not self.engine.has_work, f"work is left after {MOST_STEPS} steps"
        assert self.cache.num_free_pages == self.cache.num_pages
        assert self.cache.num_free_slots == self.cache.num_slots

    def ask(self, *prompts: Sequence[int], max_tokens: int = 4) -> list[Answer]:
        """Answer prompts, all of them together."""
        first = len(self.answers)
        answers = [self.add(str(first + i), prompt, max_tokens) for i, prompt in enumerate(prompts)]
        self.run()
        return answers

    @property
    def counters(self) -> dict[str, int]:
        return dict(self.engine.stats().counters)


def exact(model: AnyModel, **options: object) -> Service:
    """Exact mode: hits need snapshots, nothing is approximate."""
    policy = resolve_policy(CacheConfig(swa_bounded_replay=False), model.config)
    halves = {"lower": policy.lower, "upper": policy.upper, "length": policy.length}
    return Service(model, **halves, **options)  # type: ignore[arg-type]


def bounded(model: DeepseekV41, **options: object) -> Service:
    """Bounded replay in both halves."""
    return Service(model, lower=True, upper=True, **options)  # type: ignore[arg-type]


def assert_same(got: Answer, want: Answer) -> None:
    """Equal tokens, logits equal to 1e-12."""
    assert got.tokens == want.tokens
    EXACT(got.logprobs, want.logprobs)
