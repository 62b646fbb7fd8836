"""Index keys, scores and selections, and how they are learnt (v41-model 3.4 to 3.6)."""

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
from leadline.tools.train_tiny.quantize import fake_fp4_32
from leadline.tools.train_tiny.rows import Angles, Rows, rotate


@dataclass(slots=True)
class Selection:
    """What an index source publishes, and what its group of layers gives back.

    Attributes:
        chosen: ``[B, S, N]`` bool, or None where every visible entry is attended.
        candidates: ``[B, S, N]`` bool, or None where all are.
        scores: ``[B, n, N]`` float32 index scores of the probed rows, differentiable.
        attended: ``[B, n, N]`` float32, the attention that the group gives to entries, summed, if
            it attends every visible one.
    """

    chosen: Tensor | None = None
    candidates: Tensor | None = None
    scores: Tensor | None = None
    attended: Tensor | None = None


class Indexer(nn.Module):
    """Index scores; learns from the attention of the layers that use its selection (3.4, 3.5)."""

    def __init__(
        self, config: ModelConfig, layer: int, dtype: torch.dtype, compiler: Compiler
    ) -> None:
        super().__init__()
        width, dim, heads = config.hidden_size, config.index_head_dim, config.index_n_heads
        self.compiled, self.heads, self.eps = compiler, heads, config.rms_norm_eps
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
        return self.compiled(_index_keys)(
            latents, self.wk.weight, self.k_norm.weight, *angles, self.eps, quantize
        )

    def queries(
        self, u: Tensor, qr: Tensor, angles: Angles, quantize: bool
    ) -> tuple[Tensor, Tensor]:
        """Queries ``[B, n, Hi, di]`` and head weights ``[B, n, Hi]`` of rows ``[B, n, ...]``."""
        return self.compiled(_index_queries)(
            u, qr, self.wq_b.weight, self.weights_proj.weight, *angles, self.heads, quantize
        )


def _index_keys(
    latents: Tensor,
    wk: Tensor,
    k_norm: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float,
    quantize: bool,
) -> Tensor:
    keys = rotate(rms_norm(F.linear(latents, wk), k_norm, eps), cos, sin)
    return fake_fp4_32(keys) if quantize else keys


def _index_queries(
    u: Tensor,
    qr: Tensor,
    wq_b: Tensor,
    weights_proj: Tensor,
    cos: Tensor,
    sin: Tensor,
    heads: int,
    quantize: bool,
) -> tuple[Tensor, Tensor]:
    q = packed_linear(qr, wq_b, quantize).unflatten(-1, (heads, -1))
    q = rotate(q, cos.unsqueeze(2), sin.unsqueeze(2))
    weights = F.linear(u, weights_proj) * (q.shape[-1] ** -0.5 * heads**-0.5)
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
    # All of bf16's order fits in 16 bits, which halves what each of the rounds below reads.
    order = torch.where(finite, order, -32768).to(torch.int16)
    low = torch.full_like(bits[:, :1], -32768)
    for step in (32768, *(2**i for i in range(14, -1, -1))):
        enough = (order.int() >= low + step).sum(-1, keepdim=True) >= k
        low = torch.where(enough, low + step, low)
    return finite & (order.int() >= low)


def add_attention(
    q: Tensor,
    entries: Tensor,
    total: Tensor,
    visible: Tensor,
    chosen: Tensor | None,
    attended: Tensor,
) -> Tensor:
    """``attended`` plus the attention of some queries to all visible entries, summed over heads.

    To all, though only the chosen ones are attended: an indexer that is taught by its own choice
    never learns what it leaves out.

    Args:
        q: ``[B, n, H, d]``.
        entries: ``[B, N, d]``.
        total: ``[B, n, H]`` log of the denominator over what is attended.
        visible: ``[B, n, N]`` bool.
        chosen: ``[B, n, N]`` bool, what is attended; None where that is everything visible.
        attended: ``[B, n, N]`` float32.
    """
    b, n, heads, d = q.shape
    scores = torch.bmm(q.flatten(1, 2), entries.transpose(1, 2)).float() * d**-0.5
    scores = scores.view(b, n, heads, -1).masked_fill(~visible.unsqueeze(2), -torch.inf)
    if chosen is not None:
        left_out = scores.masked_fill(chosen.unsqueeze(2), -torch.inf).logsumexp(-1)
        total = torch.logaddexp(total, left_out)
    return attended + (scores - total.unsqueeze(-1)).exp().sum(2)


def index_loss(
    rows: Rows, ratio: int, selection: Selection, topk: int, compiler: Compiler
) -> tuple[Tensor, Tensor]:
    """How far the index scores are from the attention of the layers that select by them.

    Returns:
        KL of the group's attention over visible entries from the softmax of the scores, a row's
        mean; and the share of that attention that the ``topk`` best entries hold.
    """
    assert selection.scores is not None
    assert selection.attended is not None
    mask = rows.entry_mask(ratio, probed=True)
    return compiler(_divergence)(selection.scores, selection.attended, mask, topk)


def _divergence(scores: Tensor, attended: Tensor, mask: Tensor, topk: int) -> tuple[Tensor, Tensor]:
    target = attended / attended.sum(-1, keepdim=True).clamp(min=1e-20)
    scores = scores.masked_fill(~mask, -1e9)
    kl = target * (target.clamp(min=1e-20).log() - scores.log_softmax(-1))
    rows_with = mask.any(-1).sum().clamp(min=1)
    best = scores.detach().topk(min(topk, scores.shape[-1]), dim=-1).indices
    mass = target.gather(-1, best).sum()
    return kl.masked_fill(~mask, 0).sum() / rows_with, mass / rows_with
