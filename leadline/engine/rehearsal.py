"""The largest step that an engine may be asked for, and some of its graphs, to measure memory by.

What a step needs grows with its rows, with the requests that are sampled from, and with the length
that scores of entries have room for; stand-ins for requests have the most of each.
"""

from __future__ import annotations

import functools
import gc
import statistics
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from leadline.cache.layout import CacheLayout
from leadline.cache.pool import CachePool
from leadline.cache.sizing import CacheSize, pages_of
from leadline.core.errors import LeadlineError
from leadline.core.request import SamplingParams
from leadline.engine.batch_builder import BatchBuilder, BatchLayout, BatchShape, StaticBatch
from leadline.engine.forwards import (
    TUNED_LENGTH,
    Capture,
    CudaCapture,
    GraphLimits,
    GraphMode,
    Graphs,
    Replay,
    stand_in,
)
from leadline.engine.memory import DeviceMemory
from leadline.engine.metrics import EngineMetrics
from leadline.engine.plan import RowGroup, StepPlan
from leadline.engine.runner import LOGITS_BLOCK_ROWS, Runner
from leadline.engine.sampler import Sampler
from leadline.kernels.registry import Kernels
from leadline.models.batch import ForwardBatch, Model, forward_sampled

# As many as kernels are tuned with; more of them would take memory that a full GPU may not have.
_MAX_SLOTS = 64
# Everything that makes sampling take memory.
_SAMPLING = SamplingParams(
    temperature=1.0,
    top_p=0.9,
    top_k=50,
    min_p=0.01,
    presence_penalty=0.1,
    logprobs=20,
    prompt_logprobs=20,
)


class Rehearsal:
    """Steps and graphs of a model on a small cache; implements ``memory.Rehearsal``.

    Args:
        model: without a cache; it has none afterwards.
        kernels: what runs its ops.
        builder: of batches.
        layout: of the cache.
        wide: dtype of open groups.
        limits: of steps.
        mode: of the engine's graphs.
        new_capture: makes what captures them.
    """

    def __init__(
        self,
        model: Model,
        kernels: Kernels,
        builder: BatchBuilder,
        layout: CacheLayout,
        wide: torch.dtype,
        limits: GraphLimits,
        mode: GraphMode,
        new_capture: Callable[[], Capture] = CudaCapture,
    ) -> None:
        self._model, self._kernels, self._builder = model, kernels, builder
        self._limits, self._mode, self._new_capture = limits, mode, new_capture
        self._size = CacheSize(
            num_pages=1 + pages_of(min(limits.max_len, TUNED_LENGTH), layout.page_size),
            num_slots=1 + min(limits.max_num_seqs, _MAX_SLOTS),
            page_size=layout.page_size,
        )
        self._layout, self._wide = layout, wide
        self._is_bound = False

    def step(self) -> None:
        """See ``memory.Rehearsal``: one prompt's rows beside decodes, and all are sampled."""
        self._bind()
        runner = Runner(
            self._model,
            Sampler(eos_token_id=0),
            self,
            EngineMetrics(),
            copy_slots=lambda pairs: None,
            kernels=self._kernels,
        )
        step = runner.launch(StepPlan(self._groups()), None)
        runner.sample(step)
        runner.results(step)
        if step.is_short:
            raise torch.OutOfMemoryError(step.error)
        if step.error is not None:
            raise LeadlineError(f"the step that memory is measured with failed: {step.error}")

    def graph_bytes(self, memory: DeviceMemory) -> int:
        """See ``memory.Rehearsal``: two graphs of each kind are captured.

        The largest of a kind leaves its memory to the others, so these add what the driver keeps
        of any graph, as the second ones do: about half of those that are captured.
        """
        if self._mode is GraphMode.OFF:
            return 0
        self._bind()
        capture, added = self._new_capture(), []

        def measured(run: Callable[[], None]) -> Replay:
            before = memory.in_use()
            replay = capture(run)
            added.append(memory.in_use() - before)
            return replay

        before = memory.in_use()
        graphs = Graphs(self._model, self._builder, measured, self._mode, self._limits, self._size)
        self._kernels.compile_ahead(functools.partial(graphs.launch_largest, 2))
        with self._kernels.active():
            graphs.capture_largest(2)
        held = memory.in_use() - before
        return held + (graphs.num_graphs - len(added)) * max(0, statistics.median_low(added))

    def end(self) -> None:
        """See ``memory.Rehearsal``."""
        self._model.bind_cache(None)
        self._is_bound = False
        gc.collect()  # of what lies in a cycle, tensors too

    def prepare(self, groups: Sequence[RowGroup]) -> tuple[ForwardBatch, Callable[[], Tensor]]:
        """See ``forwards.Forwards``: op by op, as if one of the groups had the longest sequence."""
        pages = pages_of(self._limits.max_len, self._size.page_size)
        shape = BatchShape.of(groups)._replace(pages=pages)
        layout = BatchLayout(shape, self._builder.num_history)
        buffer = torch.empty(layout.num_bytes, dtype=torch.uint8, device=self._builder.device)
        static = StaticBatch(layout, buffer, self._limits.max_len)
        self._builder.load(static, shape, groups)
        batch = static.batch(shape, max_rows=max(group.num_rows for group in groups))
        return batch, functools.partial(forward_sampled, self._model, batch)

    def _bind(self) -> None:
        if self._is_bound:
            return
        pool = CachePool(
            self._layout,
            num_pages=self._size.num_pages,
            num_slots=self._size.num_slots,
            step_rows=self._limits.max_num_batched_tokens,
            wide=self._wide,
            device=self._builder.device,
        )
        self._model.bind_cache(pool)
        self._is_bound = True
        if self._mode is not GraphMode.OFF:  # or forwards might wait for the host
            self._kernels.compile_ahead(self._forward)

    @torch.inference_mode()
    def _forward(self) -> None:
        _, run = self.prepare(self._groups())
        run()

    def _groups(self) -> list[RowGroup]:
        """As many requests as there may be, a row each; the first have what else a step may."""
        limits, groups = self._limits, []
        spare = limits.max_num_batched_tokens - limits.max_num_seqs
        for number in range(limits.max_num_seqs):
            more = min(spare, limits.max_len - 1)
            spare -= more
            group = stand_in(number, 1 + more, 1 + more, limits, self._size)
            group.request.sampling = _SAMPLING
            group.num_sampled = 1
            if more:
                group.request.prompt_logprobs = [None]
                group.num_sampled = min(group.num_rows, LOGITS_BLOCK_ROWS)
            groups.append(group)
        return groups
