"""DeepSeek-V4.1 over whole sequences, differentiable: what the trainer optimises.

Written apart from the engine's model, from the same formulas (v41-model 2 to 6): rows of complete
documents instead of steps and caches. The two agree, which is a test of both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from leadline.config.model import ModelConfig
from leadline.kernels.reference.engram import engram_hash
from leadline.models.deepseek_v41.engram import hash_multipliers, hash_primes
from leadline.tools.train_tiny import layers
from leadline.tools.train_tiny.attention import Attention, Compressed
from leadline.tools.train_tiny.batch import Batch
from leadline.tools.train_tiny.indexer import Selection, index_loss
from leadline.tools.train_tiny.layers import Compiler, Weight, matrix, norm_weight
from leadline.tools.train_tiny.rows import Rows
from leadline.tools.train_tiny.sinkhorn import sinkhorn

PROBES = 128  # rows of a sequence whose attention teaches the indexers


@dataclass(frozen=True, slots=True)
class Phase:
    """What is switched on.

    Attributes:
        sparse: layers attend the indexers' selection; otherwise every visible entry.
        quantize: caches and the inputs of packed weights are rounded as in the engine.
        index_loss: indexers learn.
    """

    sparse: bool = False
    quantize: bool = False
    index_loss: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Losses:
    """What a model learns from.

    Attributes:
        loss: weighted mean cross entropy, in nats, differentiable.
        index_loss: KL divergence of the indexers, summed over them, differentiable.
        expert_counts: ``[L, E]`` float32, tokens that picked each routed expert.
        index_mass: share of the attention to entries that goes to the best ``index_topk`` of them,
            a mean over index sources.
    """

    loss: Tensor
    index_loss: Tensor
    expert_counts: Tensor
    index_mass: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Output(Losses):
    """What a forward gives.

    Attributes:
        token_losses: ``[B, S]`` weighted loss of each token given those before it, detached.
    """

    token_losses: Tensor


@dataclass(frozen=True, slots=True)
class Hidden:
    """What the backbone gives its heads; ``index_loss`` to ``index_mass`` as in ``Losses``.

    Attributes:
        rows: ``[T, D]`` collapsed streams, before the last norm.
        features: ``[T, D]`` averaged streams entering each of ``dspark_target_layer_ids``.
    """

    rows: Tensor
    index_loss: Tensor
    expert_counts: Tensor
    index_mass: Tensor
    features: list[Tensor]


class Experts(nn.Module):
    """Routed experts, stacked."""

    def __init__(self, count: int, inner: int, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.w1 = Weight(count, inner, width, std=0.7 * width**-0.5, dtype=dtype)
        self.w3 = Weight(count, inner, width, std=0.7 * width**-0.5, dtype=dtype)
        self.w2 = Weight(count, width, inner, std=0.3 * inner**-0.5, dtype=dtype)


class SharedExpert(nn.Module):
    """The expert of every token."""

    def __init__(self, inner: int, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.w1 = matrix(inner, width, dtype)
        self.w3 = matrix(inner, width, dtype)
        self.w2 = matrix(width, inner, dtype, gain=0.3)


class Gate(nn.Module):
    """The router; its bias is moved by the balancing rule, not by gradients."""

    bias: Tensor

    def __init__(self, count: int, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter((torch.randn(count, width) * width**-0.5).to(dtype))
        self.register_buffer("bias", torch.zeros(count))


class FeedForward(nn.Module):
    """``ffn`` of a block."""

    def __init__(
        self, config: ModelConfig, count: int, top_k: int, dtype: torch.dtype, compiler: Compiler
    ) -> None:
        super().__init__()
        width, inner = config.hidden_size, config.moe_intermediate_size
        self.top_k, self.compiled = top_k, compiler
        self.scale, self.limit = config.routed_scaling_factor, config.swiglu_limit
        self.gate = Gate(count, width, dtype)
        self.experts = Experts(count, inner, width, dtype)
        self.shared_experts = SharedExpert(inner, width, dtype)

    def forward(self, x: Tensor, quantize: bool) -> tuple[Tensor, Tensor]:
        """``[T, D]`` -> ``[T, D]`` and the picks of each expert ``[E]``."""
        result: tuple[Tensor, Tensor] = self.compiled(layers.moe)(
            x,
            self.gate.weight,
            self.gate.bias,
            self.experts.w1.weight,
            self.experts.w3.weight,
            self.experts.w2.weight,
            self.shared_experts.w1.weight,
            self.shared_experts.w3.weight,
            self.shared_experts.w2.weight,
            self.top_k,
            self.scale,
            self.limit,
            quantize,
        )
        return result


class Engram(nn.Module):
    """n-gram rows, injected into the streams (6.4)."""

    def __init__(self, config: ModelConfig, index: int, dtype: torch.dtype) -> None:
        super().__init__()
        width, streams = config.hidden_size, config.hc_mult
        self.index, self.eps = index, config.rms_norm_eps
        size = config.engram_head_dim
        self.embed = Weight(config.engram_num_embeddings[index], size, std=0.1, dtype=dtype)
        self.wkv = matrix((streams + 1) * width, config.engram_columns * size, dtype)
        self.q_weight = nn.Parameter(torch.ones(streams, width, dtype=dtype))
        self.k_weight = nn.Parameter(torch.ones(streams, width, dtype=dtype))

    def forward(self, streams: Tensor, rows: Tensor, compiler: Compiler, quantize: bool) -> Tensor:
        """``rows [T, layers, columns]`` are table rows of all Engram layers."""
        looked_up = F.embedding(rows[:, self.index], self.embed.weight).flatten(1)
        return compiler(layers.engram_inject)(
            streams, looked_up, self.wkv.weight, self.q_weight, self.k_weight, self.eps, quantize
        )


class Block(nn.Module):
    """A layer: attention and mixture of experts, each between a collapse and an expansion."""

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        dtype: torch.dtype,
        compiler: Compiler,
        *,
        experts: tuple[int, int] | None = None,
    ) -> None:
        """``experts``: count and picks a token where they are not those of the backbone."""
        super().__init__()
        self.config, self.compiled = config, compiler
        width, streams = config.hidden_size, config.hc_mult
        self.attn_norm, self.ffn_norm = norm_weight(width, dtype), norm_weight(width, dtype)
        for site in ("attn", "ffn"):
            fn = torch.randn(streams * (streams + 2), streams * width) * 0.02
            self.register_parameter(f"hc_{site}_fn", nn.Parameter(fn))
            self.register_parameter(f"hc_{site}_base", nn.Parameter(_mix_base(streams)))
            self.register_parameter(f"hc_{site}_scale", nn.Parameter(torch.full((3,), 0.3)))
        self.attn = Attention(config, layer, dtype, compiler)
        count, top_k = experts or (config.n_routed_experts, config.num_experts_per_tok)
        self.ffn = FeedForward(config, count, top_k, dtype, compiler)
        if layer in config.engram_layer_ids:
            self.engram = Engram(config, config.engram_layer_ids.index(layer), dtype)

    def enter(
        self, site: str, streams: Tensor, carried: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """A sublayer's input ``[T, D]``, and pre, post and comb of its site (``attn``, ``ffn``)."""
        c = self.config
        norm = self.attn_norm if site == "attn" else self.ffn_norm
        u, pre, post, logits = self.compiled(layers.enter_site)(
            streams,
            carried,
            norm.weight,
            self.get_parameter(f"hc_{site}_fn"),
            self.get_parameter(f"hc_{site}_base"),
            self.get_parameter(f"hc_{site}_scale"),
            c.hc_eps,
            c.rms_norm_eps,
        )
        fused = self.compiled.fused
        comb = sinkhorn(logits, iters=c.hc_sinkhorn_iters, eps=c.hc_eps, fused=fused)
        return u, pre, post, comb

    def leave(self, y: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
        """The streams behind a sublayer whose output is ``y [T, D]``."""
        return self.compiled(layers.expand)(y, streams, post, comb)


def _mix_base(streams: int) -> Tensor:
    """Near the identity: streams are averaged going in, and stay apart going on."""
    base = torch.zeros(streams * (streams + 2))
    base[:streams] = -1.1  # sigmoid: about 1 / 4
    base[2 * streams :] = 4.0 * torch.eye(streams).flatten()
    return base


class Transformer(nn.Module):
    """The backbone. Parameters carry the official names; experts are stacked."""

    def __init__(
        self,
        config: ModelConfig,
        token_map: Sequence[int],
        *,
        dtype: torch.dtype = torch.float32,
        fused: bool = False,
    ) -> None:
        """Random weights from torch's generator.

        Args:
            config: the model.
            token_map: Engram class of each token id (``compressed_token_map``).
            dtype: of activations and of the weights that files hold in bf16, FP8 or FP4.
            fused: compiled functions and fused attention, for a GPU.
        """
        super().__init__()
        self.config, self.compiled = config, Compiler(fused)
        vocab, width = config.vocab_size, config.hidden_size
        self.embed = Weight(vocab, width, std=0.5, dtype=dtype)
        self.layers = nn.ModuleList(
            Block(config, layer, dtype, self.compiled) for layer in range(config.num_hidden_layers)
        )
        self.norm = norm_weight(width, dtype)
        self.head = Weight(vocab, width, std=0.02, dtype=dtype)
        self._hash = NgramHash(config, token_map)

    def forward(self, batch: Batch, phase: Phase) -> Output:
        """Loss of a batch; see ``Output``."""
        rows = Rows(batch, self.config, PROBES)
        hidden = self.hidden(rows, phase)
        targets = batch.ids.roll(-1, 1).flatten()
        weights = batch.weights.roll(-1, 1)
        weights[:, -1] = 0
        losses = self.compiled(layers.weighted_cross_entropy)(
            hidden.rows,
            self.norm.weight,
            self.head.weight,
            targets,
            weights.flatten(),
            self.config.rms_norm_eps,
        )
        loss = losses.sum() / weights.sum().clamp(min=1e-6)
        return Output(
            loss=loss,
            token_losses=losses.detach().view_as(weights).roll(1, 1),
            index_loss=hidden.index_loss,
            expert_counts=hidden.expert_counts,
            index_mass=hidden.index_mass,
        )

    def logits(self, batch: Batch, phase: Phase) -> Tensor:
        """Float32 logits ``[B, S, V]``."""
        hidden = self.hidden(Rows(batch, self.config, 0), phase)
        normed = layers.rms_norm(hidden.rows, self.norm.weight, self.config.rms_norm_eps)
        return F.linear(normed.float(), self.head.weight.float()).unflatten(0, batch.ids.shape)

    def hidden(self, rows: Rows, phase: Phase) -> Hidden:
        """The backbone without its head."""
        c, batch = self.config, rows.batch
        streams = F.embedding(batch.ids.flatten(), self.embed.weight)
        streams = streams.unsqueeze(1).expand(-1, c.hc_mult, -1).contiguous()
        carried = torch.zeros(len(streams), c.hc_mult, device=streams.device)
        carried[:, 0] = 1
        ngrams = self._hash(batch) if c.engram_layer_ids else None
        compressed: Compressed | None = None
        selection = Selection()
        total_kl, total_mass = carried.new_zeros(()), carried.new_zeros(())
        counts, features = [], []
        for number, block in enumerate(self.layers):
            assert isinstance(block, Block)
            if number in c.engram_layer_ids:
                assert ngrams is not None
                streams = block.engram(streams, ngrams, self.compiled, phase.quantize)
            if number in c.dspark_target_layer_ids:
                features.append(streams.float().mean(1).to(streams.dtype))
            if number in c.index_source_layer_ids:
                selection = Selection(candidates=selection.candidates)
            u, carried, post, comb = block.enter("attn", streams, carried)
            y, compressed = block.attn(
                u, rows, compressed, selection, sparse=phase.sparse, quantize=phase.quantize
            )
            streams = block.leave(y, streams, post, comb)
            u, carried, post, comb = block.enter("ffn", streams, carried)
            y, picks = block.ffn(u, phase.quantize)
            streams = block.leave(y, streams, post, comb)
            counts.append(picks)
            ends_group = number + 1 == c.num_hidden_layers or number + 1 in c.index_source_layer_ids
            if ends_group and selection.scores is not None and phase.index_loss:
                ratio = c.compress_ratios[number]
                kl, mass = index_loss(rows, ratio, selection, c.index_topk, self.compiled)
                total_kl, total_mass = total_kl + kl, total_mass + mass.detach()
        mean_mass = total_mass / max(len(c.index_source_layer_ids), 1)
        return Hidden(
            layers.collapse(streams, carried), total_kl, torch.stack(counts), mean_mass, features
        )


class NgramHash(nn.Module):
    """Engram table rows of every token of a batch, from its ids alone (6.3)."""

    token_map: Tensor
    multipliers: Tensor
    primes: Tensor
    offsets: Tensor

    def __init__(self, config: ModelConfig, token_map: Sequence[int]) -> None:
        super().__init__()
        self.depth = config.engram_max_ngram_size
        primes = torch.tensor(hash_primes(config))
        tensors = {
            "token_map": torch.tensor(token_map),
            "multipliers": torch.from_numpy(hash_multipliers(config)),
            "primes": primes,
            "offsets": primes.cumsum(1) - primes,
        }
        for name, value in tensors.items():
            self.register_buffer(name, value, persistent=False)
        self.pad = int(token_map[config.engram_pad_token_id])

    def forward(self, batch: Batch) -> Tensor:
        """``[T, layers, columns]`` int64."""
        classes = self.token_map[batch.ids]
        positions = batch.positions
        history = [
            torch.where(positions >= back, classes.roll(back, 1), self.pad)
            for back in range(self.depth)
        ]
        looking_back = torch.stack(history, dim=-1).flatten(0, 1)
        return engram_hash(looking_back, self.multipliers, self.primes, self.offsets)
