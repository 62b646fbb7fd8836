"""CSA2 attention over whole sequences, differentiable (v41-model 3)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from leadline.config.model import ModelConfig
from leadline.kernels.reference.indexer import top_k_mask
from leadline.tools.train_tiny.layers import (
    Compiler,
    matrix,
    norm_weight,
    packed_linear,
    rms_norm,
)
from leadline.tools.train_tiny.quantize import fake_fp4_16, fake_fp4_32, fake_fp8_32
from leadline.tools.train_tiny.rows import Angles, Rows, rotate
from leadline.tools.train_tiny.window import attend, attend_flex


@dataclass(slots=True)
class Compressed:
    """What a KV source publishes: entries ``[B, N, d]`` and index keys ``[B, N, di]``."""

    ratio: int
    entries: Tensor
    keys: Tensor


@dataclass(slots=True)
class Selection:
    """What an index source publishes, and what its group of layers gives back.

    Attributes:
        chosen: ``[B, S, N]`` bool, or None where every visible entry is attended.
        candidates: ``[B, S, N]`` bool, or None where all are.
        scores: ``[B, n, N]`` float32 index scores of the probed rows, differentiable.
        attended: ``[B, n, N]`` float32, the attention that the group gave to entries, summed.
    """

    chosen: Tensor | None = None
    candidates: Tensor | None = None
    scores: Tensor | None = None
    attended: Tensor | None = None


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

    def forward(self, u: Tensor) -> Tensor:
        """``[B, S, D]`` -> latents ``[B, S / ratio, d]``, not rotated."""
        if self.ratio == 1:
            pooled = F.linear(u, self.wkv.weight)
        else:
            wide = u.float()
            values = F.linear(wide, self.wkv.weight.float()).unflatten(1, (-1, self.ratio))
            gates = F.linear(wide, self.wgate.weight.float()).unflatten(1, (-1, self.ratio))
            pooled = (values * gates.softmax(2)).sum(2).to(u.dtype)
        return rms_norm(pooled, self.norm.weight, self.eps)


class Indexer(nn.Module):
    """Index scores; learns from the attention of the layers that use its selection (3.4, 3.5)."""

    def __init__(self, config: ModelConfig, layer: int, dtype: torch.dtype) -> None:
        super().__init__()
        width, dim, heads = config.hidden_size, config.index_head_dim, config.index_n_heads
        self.heads, self.dim, self.eps = heads, dim, config.rms_norm_eps
        self.topk, self.block = config.index_topk, config.candidate_block_size
        self.topk_blocks = config.candidate_topk_blocks
        self.makes_candidates = layer == config.candidate_source_layer_id
        if layer in config.kv_source_layer_ids:
            self.wk = matrix(dim, config.head_dim, dtype, gain=1.0)
            self.k_norm = norm_weight(dim, dtype)
        self.wq_b = matrix(heads * dim, config.q_lora_rank, dtype, gain=1.0)
        self.weights_proj = matrix(heads, width, dtype, gain=1.0)

    def keys(self, latents: Tensor, angles: Angles, quantize: bool) -> Tensor:
        """Latents ``[B, N, d]`` -> keys ``[B, N, di]``."""
        keys = rms_norm(F.linear(latents, self.wk.weight), self.k_norm.weight, self.eps)
        keys = rotate(keys, *angles)
        return fake_fp4_32(keys) if quantize else keys

    def queries(self, u: Tensor, qr: Tensor, angles: Angles, quantize: bool) -> tuple[Tensor, ...]:
        """Queries ``[B, n, Hi, di]`` and head weights ``[B, n, Hi]`` of rows ``[B, n, ...]``."""
        q = packed_linear(qr, self.wq_b.weight, quantize).unflatten(-1, (self.heads, self.dim))
        q = rotate(q, *(part.unsqueeze(2) for part in angles))
        scale = self.dim**-0.5 * self.heads**-0.5
        weights = F.linear(u, self.weights_proj.weight) * scale
        return fake_fp4_32(q) if quantize else q, weights


def index_scores(q: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
    """``sum_h relu(q_h . k_j) w_h``: ``[B, n, Hi, di]``, ``[B, n, Hi]``, ``[B, N, di]``."""
    b, n, heads, _ = q.shape
    dots = torch.bmm(q.flatten(1, 2), keys.transpose(1, 2)).view(b, n, heads, -1)
    return (dots.relu().float() * weights.float().unsqueeze(-1)).sum(2)


def choose(
    scores: Tensor,
    visible: Tensor,
    candidates: Tensor | None,
    topk: int,
    topk_blocks: int,
    block: int,
    fused: bool,
) -> tuple[Tensor, Tensor | None]:
    """Chosen entries and the candidates of the layers above (3.5, 3.6).

    Args:
        scores: ``[B, S, N]``.
        visible: ``[B, S, N]`` bool.
        candidates: ``[B, S, N]`` bool where this layer is restricted to them.
        topk: ``index_topk``.
        topk_blocks: blocks of candidates to publish; 0 publishes none.
        block: ``candidate_block_size``.
        fused: fast on a GPU; entries that equal the last chosen one are then chosen too.

    Returns:
        Two ``[B, S, N]`` bool; the second is None where every entry may be chosen.
    """
    best = _threshold_mask if fused else top_k_mask
    scores = scores.masked_fill(~visible, -torch.inf).flatten(0, 1)
    if candidates is not None:
        scores = scores.masked_fill(~candidates.flatten(0, 1), -torch.inf)
    published = None
    if 0 < topk_blocks * block < scores.shape[1]:
        blocks = F.pad(scores, (0, -scores.shape[1] % block), value=-torch.inf)
        highest = blocks.unflatten(1, (-1, block)).amax(-1)
        # The newest visible entry is the last one; its block counts as one of the best.
        order = torch.arange(scores.shape[1], device=scores.device)
        newest = torch.where(visible.flatten(0, 1), order, -1).amax(-1, keepdim=True)
        pinned = torch.arange(highest.shape[1], device=scores.device) == newest // block
        kept = best(highest.masked_fill(pinned, torch.inf), topk_blocks)
        published = kept.repeat_interleave(block, 1)[:, : scores.shape[1]].view_as(visible)
    return best(scores, topk).view_as(visible), published


def _threshold_mask(scores: Tensor, k: int) -> Tensor:
    """The k best of each row and whatever equals the last, by bisection on bf16 as integers."""
    bits = scores.bfloat16().view(torch.int16).int()
    order = torch.where(bits >= 0, bits, -(bits & 0x7FFF))
    finite = scores > -torch.inf
    order = torch.where(finite, order, -40000)
    low = torch.full_like(order[:, :1], -32768)
    for step in (32768, *(2**i for i in range(14, -1, -1))):
        enough = (order >= low + step).sum(-1, keepdim=True) >= k
        low = torch.where(enough, low + step, low)
    return finite & (order >= low)


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
            self.indexer = Indexer(config, layer, dtype)

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
        qr, q, latents = self.compiled(_project)(
            u,
            self.wq_a.weight,
            self.q_norm.weight,
            self.wq_b.weight,
            self.wkv.weight,
            self.kv_norm.weight,
            cos.flatten(0, 1),
            sin.flatten(0, 1),
            self.eps,
            quantize,
        )
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
        y = self.compiled(_output)(
            out.flatten(0, 1),
            self.wo_a.weight,
            self.wo_b.weight,
            cos.flatten(0, 1),
            sin.flatten(0, 1),
            self.config.o_groups,
            quantize,
        )
        return y, compressed

    def _compress(self, u: Tensor, rows: Rows, quantize: bool) -> Compressed:
        latents = self.compressor(u)
        angles = rows.entries[self.ratio].angles
        entries = rotate(latents, *angles)
        if quantize:
            entries = fake_fp4_16(entries)
        # The indexer learns from the attention alone, and what it reads does not learn from it.
        keys = self.indexer.keys(latents.detach(), angles, quantize)
        return Compressed(self.ratio, entries, keys)

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
            probe = rows.probe
            angles = (rows.yarn[0][:, probe], rows.yarn[1][:, probe])
            q, weights = indexer.queries(u[:, probe], qr[:, probe], angles, quantize)
            selection.scores = index_scores(q, weights, compressed.keys)
            selection.attended = torch.zeros_like(selection.scores)

    @torch.no_grad()
    def _watch(
        self, q: Tensor, entries: Tensor, total: Tensor, rows: Rows, selection: Selection
    ) -> None:
        """Add what the probed rows' heads give to each entry."""
        assert selection.attended is not None
        probe, scale = rows.probe, self.config.head_dim**-0.5
        mask = probed_mask(rows, self.ratio, selection)
        b, _, heads, _ = q.shape
        scores = torch.bmm(q[:, probe].flatten(1, 2), entries.transpose(1, 2)) * scale
        scores = scores.float().view(b, len(probe), heads, -1) - total[:, probe].unsqueeze(-1)
        attended = scores.masked_fill(~mask.unsqueeze(2), -torch.inf).exp().sum(2)
        selection.attended = selection.attended + attended


def probed_mask(rows: Rows, ratio: int, selection: Selection) -> Tensor:
    """``[B, n, N]`` entries that the probed rows attend."""
    mask = rows.entry_mask(ratio, rows.probe)
    return mask if selection.chosen is None else mask & selection.chosen[:, rows.probe]


def index_loss(rows: Rows, ratio: int, selection: Selection, topk: int) -> tuple[Tensor, Tensor]:
    """How far the index scores are from the attention of the layers that select by them.

    Returns:
        KL of the group's attention over entries from the softmax of the scores, a row's mean; and
        the share of that attention that the ``topk`` best entries hold.
    """
    assert selection.scores is not None
    assert selection.attended is not None
    mask = probed_mask(rows, ratio, selection)
    target = selection.attended / selection.attended.sum(-1, keepdim=True).clamp(min=1e-20)
    scores = selection.scores.masked_fill(~mask, -1e9)
    kl = target * (target.clamp(min=1e-20).log() - scores.log_softmax(-1))
    rows_with = mask.any(-1).sum().clamp(min=1)
    best = scores.detach().topk(min(topk, scores.shape[-1]), dim=-1).indices
    mass = target.gather(-1, best).sum()
    return kl.masked_fill(~mask, 0).sum() / rows_with, mass / rows_with


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
    """Query residual ``[T, Rq]``, queries ``[T, H, d]`` and window latents ``[T, d]`` (3.1)."""
    d = wkv.shape[0]
    x = fake_fp8_32(u) if quantize else u
    qr = rms_norm(F.linear(x, wq_a), q_norm, eps)
    q = packed_linear(qr, wq_b, quantize).unflatten(1, (-1, d))
    latents = rotate(rms_norm(F.linear(x, wkv), kv_norm, eps), cos, sin)
    return (
        qr,
        rotate(q, cos.unsqueeze(1), sin.unsqueeze(1)),
        fake_fp8_32(latents) if quantize else latents,
    )


def _output(
    out: Tensor, wo_a: Tensor, wo_b: Tensor, cos: Tensor, sin: Tensor, groups: int, quantize: bool
) -> Tensor:
    """Attended ``[T, H, d]`` -> ``[T, D]``: turned back, then two low-rank products (3.8)."""
    turned = rotate(out, cos.unsqueeze(1), -sin.unsqueeze(1)).flatten(1).unflatten(1, (groups, -1))
    low = torch.einsum("tgi,goi->tgo", turned, wo_a.unflatten(0, (groups, -1)))
    return packed_linear(low.flatten(1), wo_b, quantize)
