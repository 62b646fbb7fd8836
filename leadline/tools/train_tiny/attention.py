"""CSA2 attention over whole sequences, differentiable (v41-model 3)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from leadline.config.model import ModelConfig
from leadline.tools.train_tiny.indexer import (
    Indexer,
    Selection,
    add_attention,
    choose,
    index_scores,
)
from leadline.tools.train_tiny.layers import (
    Compiler,
    matrix,
    norm_weight,
    packed_linear,
    rms_norm,
)
from leadline.tools.train_tiny.quantize import fake_fp4_16, fake_fp8_32
from leadline.tools.train_tiny.rows import Angles, Rows, rotate
from leadline.tools.train_tiny.window import attend, attend_flex


@dataclass(slots=True)
class Compressed:
    """What a KV source publishes: entries ``[B, N, d]`` and index keys ``[B, N, di]``."""

    entries: Tensor
    keys: Tensor


class Compressor(nn.Module):
    """Entries and index keys of a KV source (3.3, 3.4)."""

    def __init__(self, config: ModelConfig, ratio: int, dtype: torch.dtype) -> None:
        super().__init__()
        d, width = config.head_dim, config.hidden_size
        self.ratio, self.eps = ratio, config.rms_norm_eps
        self.wkv = matrix(d, width, dtype)
        if ratio > 1:
            self.wgate = matrix(d, width, dtype, gain=0.2)
        self.norm = norm_weight(d, dtype)

    def forward(self, u: Tensor, compiler: Compiler) -> Tensor:
        """``[B, S, D]`` -> latents ``[B, S / ratio, d]``, not rotated."""
        gate = self.wgate.weight if self.ratio > 1 else None
        return compiler(pool)(u, self.wkv.weight, gate, self.norm.weight, self.ratio, self.eps)


def pool(
    u: Tensor, wkv: Tensor, wgate: Tensor | None, norm: Tensor, ratio: int, eps: float
) -> Tensor:
    """Latents of every group of ``ratio`` tokens: a softmax over the group for each channel."""
    if wgate is None:
        return rms_norm(F.linear(u, wkv), norm, eps)
    values = F.linear(u.float(), wkv.float()).unflatten(1, (-1, ratio))
    gates = F.linear(u.float(), wgate.float()).unflatten(1, (-1, ratio))
    return rms_norm((values * gates.softmax(2)).sum(2).to(u.dtype), norm, eps)


class Attention(nn.Module):
    """``attn`` of a block."""

    def __init__(
        self, config: ModelConfig, layer: int, dtype: torch.dtype, compiler: Compiler
    ) -> None:
        super().__init__()
        d, heads, width = config.head_dim, config.num_attention_heads, config.hidden_size
        self.config, self.layer, self.compiled = config, layer, compiler
        self.ratio = config.compress_ratios[layer]
        self.eps = config.rms_norm_eps
        self.wq_a = matrix(config.q_lora_rank, width, dtype)
        self.q_norm = norm_weight(config.q_lora_rank, dtype)
        self.wq_b = matrix(heads * d, config.q_lora_rank, dtype)
        self.wkv = matrix(d, width, dtype)
        self.kv_norm = norm_weight(d, dtype)
        self.attn_sink = nn.Parameter(torch.zeros(heads))
        groups, rank = config.o_groups, config.o_lora_rank
        self.wo_a = matrix(groups * rank, heads // groups * d, dtype)
        self.wo_b = matrix(width, groups * rank, dtype, gain=0.3)
        if layer in config.kv_source_layer_ids:
            self.compressor = Compressor(config, self.ratio, dtype)
        if layer in config.index_source_layer_ids:
            self.indexer = Indexer(config, layer, dtype, compiler)

    def forward(
        self,
        u: Tensor,
        rows: Rows,
        compressed: Compressed | None,
        selection: Selection,
        *,
        sparse: bool,
        quantize: bool,
    ) -> tuple[Tensor, Compressed | None]:
        """Attend with the rows ``u [T, D]``; returns ``[T, D]`` and the entries now in force."""
        batch_shape = rows.batch.ids.shape
        cos, sin = rows.yarn if self.ratio else rows.plain
        turns = (cos.flatten(0, 1), sin.flatten(0, 1))
        qr, q, latents = self.project(u, turns, quantize)
        u3, qr3 = u.unflatten(0, batch_shape), qr.unflatten(0, batch_shape)
        q, latents = q.unflatten(0, batch_shape), latents.unflatten(0, batch_shape)
        if self.layer in self.config.kv_source_layer_ids:
            compressed = self._compress(u3, rows, quantize)
        if self.ratio and self.layer in self.config.index_source_layer_ids:
            assert compressed is not None
            self._index(u3, qr3, rows, compressed, selection, sparse, quantize)
        entries = compressed.entries if self.ratio and compressed is not None else None
        core = attend_flex if self.compiled.fused else attend
        out, total = core(q, latents, entries, self.ratio, selection.chosen, self.attn_sink, rows)
        if entries is not None and selection.scores is not None:
            self._watch(q, entries, total, rows, selection)
        return self.output(out.flatten(0, 1), turns, quantize), compressed

    def project(self, u: Tensor, angles: Angles, quantize: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Query residual ``[T, Rq]``, queries ``[T, H, d]`` and window latents ``[T, d]`` (3.1)."""
        return self.compiled(_project)(
            u,
            self.wq_a.weight,
            self.q_norm.weight,
            self.wq_b.weight,
            self.wkv.weight,
            self.kv_norm.weight,
            *angles,
            self.eps,
            quantize,
        )

    def output(self, out: Tensor, angles: Angles, quantize: bool) -> Tensor:
        """Attended ``[T, H, d]`` -> ``[T, D]`` (3.8)."""
        return self.compiled(_output)(
            out, self.wo_a.weight, self.wo_b.weight, *angles, self.config.o_groups, quantize
        )

    def _compress(self, u: Tensor, rows: Rows, quantize: bool) -> Compressed:
        latents = self.compressor(u, self.compiled)
        angles = rows.entries[self.ratio].angles
        entries = rotate(latents, *angles)
        if quantize:
            entries = fake_fp4_16(entries)
        # The indexer learns from the attention alone, and what it reads does not learn from it.
        keys = self.indexer.keys(latents.detach(), angles, quantize)
        return Compressed(entries, keys)

    def _index(
        self,
        u: Tensor,
        qr: Tensor,
        rows: Rows,
        compressed: Compressed,
        selection: Selection,
        sparse: bool,
        quantize: bool,
    ) -> None:
        u, qr = u.detach(), qr.detach()
        indexer = self.indexer
        if sparse:
            with torch.no_grad():
                q, weights = indexer.queries(u, qr, rows.yarn, quantize)
                scores = self.compiled(index_scores)(q, weights, compressed.keys)
                selection.chosen, published = self.compiled(choose)(
                    scores.to(u.dtype),
                    rows.entry_mask(self.ratio),
                    None if indexer.makes_candidates else selection.candidates,
                    indexer.topk,
                    indexer.topk_blocks if indexer.makes_candidates else 0,
                    indexer.block,
                    self.compiled.fused,
                )
                if indexer.makes_candidates:
                    selection.candidates = published
        if torch.is_grad_enabled():
            angles = (rows.probed(rows.yarn[0]), rows.probed(rows.yarn[1]))
            q, weights = indexer.queries(rows.probed(u), rows.probed(qr), angles, quantize)
            selection.scores = self.compiled(index_scores)(q, weights, compressed.keys)
            selection.attended = torch.zeros_like(selection.scores)

    @torch.no_grad()
    def _watch(
        self, q: Tensor, entries: Tensor, total: Tensor, rows: Rows, selection: Selection
    ) -> None:
        """Add what the probed rows' heads give to each entry."""
        assert selection.attended is not None
        chosen = selection.chosen
        selection.attended = self.compiled(add_attention)(
            rows.probed(q),
            entries,
            rows.probed(total),
            rows.entry_mask(self.ratio, probed=True),
            None if chosen is None else rows.probed(chosen),
            selection.attended,
        )


def _project(
    u: Tensor,
    wq_a: Tensor,
    q_norm: Tensor,
    wq_b: Tensor,
    wkv: Tensor,
    kv_norm: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float,
    quantize: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    d = wkv.shape[0]
    x = fake_fp8_32(u) if quantize else u
    qr = rms_norm(F.linear(x, wq_a), q_norm, eps)
    q = packed_linear(qr, wq_b, quantize).unflatten(1, (-1, d))
    latents = window_latents(x, wkv, kv_norm, cos, sin, eps, quantize)
    return qr, rotate(q, cos.unsqueeze(1), sin.unsqueeze(1)), latents


def window_latents(
    x: Tensor, wkv: Tensor, norm: Tensor, cos: Tensor, sin: Tensor, eps: float, quantize: bool
) -> Tensor:
    """``[T, d]``, as the window's cache holds them, of rows ``[T, D]`` that are MXFP8 already."""
    latents = rotate(rms_norm(F.linear(x, wkv), norm, eps), cos, sin)
    return fake_fp8_32(latents) if quantize else latents


def _output(
    out: Tensor, wo_a: Tensor, wo_b: Tensor, cos: Tensor, sin: Tensor, groups: int, quantize: bool
) -> Tensor:
    # Turned back, then two low-rank products.
    turned = rotate(out, cos.unsqueeze(1), -sin.unsqueeze(1)).flatten(1).unflatten(1, (groups, -1))
    low = torch.einsum("tgi,goi->tgo", turned, wo_a.unflatten(0, (groups, -1)))
    return packed_linear(low.flatten(1), wo_b, quantize)
