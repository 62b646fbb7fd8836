"""What attention of both models is: a private window, beside entries of a compressed cache."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from torch import Tensor

from leadline.config.families import AnyConfig
from leadline.kernels import ops
from leadline.kernels.packed import RecordField, Weight
from leadline.models.batch import CacheFields
from leadline.models.common.parameters import Parameters
from leadline.models.common.rotary import Rotary
from leadline.models.common.rows import Rows, WindowPlan
from leadline.models.common.side_stream import SideStreams


@dataclass(frozen=True, slots=True)
class StepRows:
    """Everything that the attention layers of one half need to know about its rows.

    Attributes:
        plain: cos and sin ``[r, rope / 2]`` for window-only layers.
        yarn: the same for layers with a compressed cache.
        entry_angles: for each ratio, the same where the group that a row closes begins; empty
            where nothing is compressed.
        visible: for each ratio, ``[r]`` entries that each row may see.
    """

    rows: Rows
    window: WindowPlan
    plain: tuple[Tensor, Tensor]
    yarn: tuple[Tensor, Tensor]
    visible: dict[int, Tensor]
    entry_angles: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    @staticmethod
    def of(
        rows: Rows, window: WindowPlan, rotary: Rotary, layers: Iterable[LatentAttention]
    ) -> StepRows:
        """What these layers ask for, and nothing else."""
        layers = list(layers)
        plain = yarn = rotary.yarn(rows.pos)
        if any(not layer.ratio for layer in layers):
            plain = rotary.plain(rows.pos)
        compressed = {layer.ratio for layer in layers if layer.compressor is not None}
        counted = {layer.ratio for layer in layers if layer.counts_entries}
        return StepRows(
            rows=rows,
            window=window,
            plain=plain,
            yarn=yarn,
            visible={ratio: window.seen // ratio for ratio in counted},
            entry_angles={
                ratio: yarn if ratio == 1 else rotary.yarn(rows.pos - (ratio - 1))
                for ratio in compressed
            },
        )


class EntryWriter(Protocol):
    """Makes the compressed entries and index keys of a layer."""

    def write(self, u: Tensor, step: StepRows, cache: CacheFields) -> None:
        """Store the entries and keys that the rows ``u [r, D]`` complete."""
        ...


class LatentAttention:
    """Low-rank projections around one latent a token, which is key and value of all heads.

    ``write`` fills caches. Reading them is each model's own, which ends with ``attend``. In either
    half ``beside`` has what only meets the rest at its end: entries and keys beside windows, the
    selection of entries beside the queries that attend.

    Attributes:
        ratio: tokens of a compressed entry that this layer reads; 0 where it sees its window only.
        compressor: of the layer's own entries, if it has any.
        counts_entries: whether it asks how many entries each row may see.
    """

    compressor: EntryWriter | None = None
    counts_entries = False

    def __init__(
        self,
        params: Parameters,
        prefix: str,
        config: AnyConfig,
        layer: int,
        exact_rounding: bool,
        *,
        beside: SideStreams,
        split: bool = False,
    ) -> None:
        """Fetch the projections.

        Args:
            params: where they come from.
            prefix: of their names.
            config: the model.
            layer: number of the block.
            exact_rounding: see ``ops.sparse_attention``.
            beside: of the parts whose work may run beside the rest.
            split: queries and window rows are not made by one product, as most rows that are
                stored do not attend.
        """
        d = config.head_dim
        self.beside = beside
        self.layer, self.head_dim, self.eps = layer, d, config.rms_norm_eps
        self.exact_rounding = exact_rounding
        self.ratio = config.compress_ratios[layer]
        heads = params.placement.shard(config.num_attention_heads, "num_attention_heads")
        groups = params.placement.shard(config.o_groups, "o_groups")
        rank = config.o_lora_rank
        self.down: Weight | None = None
        if split:
            self.wq_a = params.linear(f"{prefix}.wq_a")
            self.wkv = params.linear(f"{prefix}.wkv")
        else:
            self.down = params.stacked_linear(f"{prefix}.wq_a", f"{prefix}.wkv")
        self.q_norm = params.tensor(f"{prefix}.q_norm.weight")
        self.wq_b = params.linear(f"{prefix}.wq_b", out=slice(heads.start * d, heads.stop * d))
        self.kv_norm = params.tensor(f"{prefix}.kv_norm.weight")
        self.sink = params.tensor(f"{prefix}.attn_sink", rows=heads)
        low_rank = slice(groups.start * rank, groups.stop * rank)
        self.wo_a = params.grouped_linear(
            f"{prefix}.wo_a", groups=groups.stop - groups.start, out=low_rank
        )
        self.wo_b = params.linear(f"{prefix}.wo_b", inp=low_rank)

    def write(self, u: Tensor, step: StepRows, cache: CacheFields) -> Tensor | None:
        """Store window rows, entries and keys of ``u [r, D]``.

        Returns:
            ``[r, q_lora_rank]``, what queries are made of; None where ``split``.
        """
        plan, compressing = step.window, None
        if self.compressor is not None:
            work = partial(self.compressor.write, u, step, cache)
            compressing = self.beside["compressor"].fork(work, num_rows=len(u))
        place = (*self._angles(step), cache.window[self.layer], plan.outer, plan.inner)
        qr = None
        if self.down is None:
            ops.norm_rotate_store(ops.linear(u, self.wkv), self.kv_norm, *place, eps=self.eps)
        else:
            down = ops.linear(u, self.down)
            qr = ops.norm_query_store_window(down, self.q_norm, self.kv_norm, *place, eps=self.eps)
        if compressing is not None:
            compressing.join()
        return qr

    def attend(
        self,
        q: Tensor,
        step: StepRows,
        cache: CacheFields,
        kv: RecordField | None,
        selected: Tensor | None,
        visible: Tensor | None = None,
    ) -> Tensor:
        """The softmax and what follows it: ``[r, D]``.

        Args:
            q: ``[r, H, d]`` queries.
            step: of these rows.
            cache: that ``write`` has filled.
            kv: as in ``ops.sparse_attention``, like what follows.
            selected: likewise.
            visible: likewise.
        """
        out = ops.sparse_attention(
            q,
            *self._angles(step),
            cache.window[self.layer],
            step.window.index,
            step.window.width,
            kv,
            step.rows.page_table,
            step.rows.req_of_row,
            selected,
            self.sink,
            exact_rounding=self.exact_rounding,
            visible=visible,
        )
        self.commit(step, cache)
        return ops.output_projection(out, self.wo_a, self.wo_b)

    def commit(self, step: StepRows, cache: CacheFields) -> None:
        """Bring window rows that were staged to the rings, now that they have been read."""
        plan, rows = step.window, step.rows
        if plan.stages:
            ops.commit_window(
                cache.window[self.layer],
                plan.q_off,
                rows.seq_len,
                rows.slot,
                window=plan.window,
                staging=plan.staging,
            )

    def _angles(self, step: StepRows) -> tuple[Tensor, Tensor]:
        return step.yarn if self.ratio else step.plain
