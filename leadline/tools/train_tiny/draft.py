"""The DSpark draft head, differentiable: many blocks of a batch at once (v41-model 8)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from leadline.config.model import ModelConfig
from leadline.tools.train_tiny import layers
from leadline.tools.train_tiny.attention import window_latents
from leadline.tools.train_tiny.blocks import Blocks
from leadline.tools.train_tiny.layers import Compiler, Weight, matrix, norm_weight
from leadline.tools.train_tiny.model import Block, Transformer
from leadline.tools.train_tiny.quantize import fake_fp8_32
from leadline.tools.train_tiny.rows import Angles, angles, frequency_tables
from leadline.tools.train_tiny.window import masked_attention


@dataclass(frozen=True, slots=True)
class Drafted:
    """What the head says about each slot.

    Attributes:
        logits: ``[n, slots, V]`` float32.
        confidence: ``[n, slots]`` float32 logits of being accepted once all slots before are.
        expert_counts: ``[stages, E]`` float32, slots that picked each routed expert.
    """

    logits: Tensor
    confidence: Tensor
    expert_counts: Tensor


class MarkovHead(nn.Module):
    """Bends a slot's distribution by the token in front of it."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        super().__init__()
        vocab, rank = config.vocab_size, config.dspark_markov_rank
        self.embed = Weight(vocab, rank, std=0.5, dtype=dtype)
        self.head = Weight(vocab, rank, std=0.02, dtype=dtype)


class ConfidenceHead(nn.Module):
    """Whether a slot's token will be accepted."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.proj = matrix(1, config.hidden_size + config.dspark_markov_rank, dtype, gain=0.1)


class Stage(Block):
    """A window-only block with experts of its own; the first reads features, the last predicts."""

    def __init__(
        self, config: ModelConfig, number: int, dtype: torch.dtype, compiler: Compiler
    ) -> None:
        experts = (config.dspark_n_routed_experts, config.dspark_num_experts_per_tok)
        layer = config.num_hidden_layers + number
        super().__init__(config, layer, dtype, compiler, experts=experts)
        width = config.hidden_size
        if number == 0:
            self.main_proj = matrix(width, len(config.dspark_target_layer_ids) * width, dtype)
            self.main_norm = norm_weight(width, dtype)
        if number == config.num_nextn_predict_layers - 1:
            self.norm = norm_weight(width, dtype)
            self.markov_head = MarkovHead(config, dtype)
            self.confidence_head = ConfidenceHead(config, dtype)

    def forward(
        self,
        streams: Tensor,
        carried: Tensor,
        context: Tensor,
        mask: Tensor,
        turns: Angles,
        quantize: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """One stage over all slots.

        Args:
            streams: ``[n slots, S, D]``.
            carried: ``[n slots, S]`` float32.
            context: ``[n, W, d]`` keys of committed tokens.
            mask: ``[n, slots, W + slots]`` bool, the keys that each slot sees.
            turns: cos and sin ``[n slots, r / 2]``.
            quantize: see ``Phase``.

        Returns:
            Both streams and carried behind the stage, and the picks of each expert ``[E]``.
        """
        u, carried, post, comb = self.enter("attn", streams, carried)
        _, q, latents = self.attn.project(u, turns, quantize)
        slots = mask.shape[:2]
        keys = torch.cat((context, latents.unflatten(0, slots)), dim=1)
        attend = self.compiled(masked_attention)
        out, _ = attend(q.unflatten(0, slots), keys, mask, self.attn.attn_sink)
        y = self.attn.output(out.flatten(0, 1), turns, quantize)
        streams = self.leave(y, streams, post, comb)
        u, carried, post, comb = self.enter("ffn", streams, carried)
        y, picks = self.ffn(u, quantize)
        return self.leave(y, streams, post, comb), carried, picks


class Draft(nn.Module):
    """The head. Parameters carry the official names; experts are stacked.

    Embedding and output head are the backbone's and do not learn here.
    """

    def __init__(
        self, config: ModelConfig, *, dtype: torch.dtype = torch.float32, fused: bool = False
    ) -> None:
        """Random weights from torch's generator; the arguments are those of ``Transformer``."""
        super().__init__()
        self.config, self.compiled = config, Compiler(fused)
        self.mtp = nn.ModuleList(
            Stage(config, number, dtype, self.compiled)
            for number in range(config.num_nextn_predict_layers)
        )

    def forward(
        self,
        backbone: Transformer,
        features: Sequence[Tensor],
        context_turns: Angles,
        blocks: Blocks,
        *,
        quantize: bool,
    ) -> Drafted:
        """Draft all blocks with the true tokens in front of their slots.

        Args:
            backbone: lends its embedding and its output head.
            features: ``Hidden.features`` of the batch, ``[T, D]`` each.
            context_turns: cos and sin ``[T, r / 2]`` of the batch's tokens (``Rows.plain``).
            blocks: what to draft.
            quantize: see ``Phase``.
        """
        c = self.config
        embed, head = backbone.embed.weight.detach(), backbone.head.weight.detach()
        first, last = self.mtp[0], self.mtp[-1]
        assert isinstance(first, Stage)
        assert isinstance(last, Stage)
        main = self.compiled(_read_features)(
            torch.cat(tuple(features), dim=-1),
            first.main_proj.weight,
            first.main_norm.weight,
            c.rms_norm_eps,
            quantize,
        )
        ids = torch.full_like(blocks.previous, c.dspark_noise_token_id)
        ids[:, 0] = blocks.previous[:, 0]
        streams = F.embedding(ids.flatten(), embed)
        streams = streams.unsqueeze(1).expand(-1, c.hc_mult, -1).contiguous()
        carried = torch.zeros(len(streams), c.hc_mult, device=streams.device)
        carried[:, 0] = 1
        slots = ids.shape[1]
        # Slots see one another, whatever their order.
        mask = F.pad(blocks.sees, (0, slots), value=True).unsqueeze(1).expand(-1, slots, -1)
        plain, _ = frequency_tables(c, streams.device)
        turns = angles(blocks.positions.flatten(), plain)
        counts = []
        for stage in self.mtp:
            assert isinstance(stage, Stage)
            wkv, kv_norm = stage.attn.wkv.weight, stage.attn.kv_norm.weight
            latents = self.compiled(window_latents)(
                main, wkv, kv_norm, *context_turns, c.rms_norm_eps, quantize
            )
            context = F.embedding(blocks.context, latents)
            streams, carried, picks = stage(streams, carried, context, mask, turns, quantize)
            counts.append(picks)
        logits, confidence = self.compiled(_predict)(
            layers.collapse(streams, carried),
            F.embedding(blocks.previous.flatten(), last.markov_head.embed.weight),
            last.norm.weight,
            head,
            last.markov_head.head.weight,
            last.confidence_head.proj.weight,
            c.rms_norm_eps,
        )
        return Drafted(logits.unflatten(0, ids.shape), confidence.view_as(ids), torch.stack(counts))


def _read_features(
    features: Tensor, main_proj: Tensor, norm: Tensor, eps: float, quantize: bool
) -> Tensor:
    """What all stages make their context keys of, as MXFP8 where quantised (8.1)."""
    main = layers.rms_norm(layers.packed_linear(features, main_proj, quantize), norm, eps)
    return fake_fp8_32(main) if quantize else main


def _predict(
    hidden: Tensor,
    markov: Tensor,
    norm: Tensor,
    head: Tensor,
    markov_head: Tensor,
    confidence: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Logits ``[T, V]`` and confidences ``[T]`` of collapsed rows, in float32 (8.3)."""
    markov = markov.float()
    logits = F.linear(layers.rms_norm(hidden, norm, eps).float(), head.float())
    logits = logits + F.linear(markov, markov_head.float())
    both = torch.cat((hidden.float(), markov), dim=-1)
    return logits, F.linear(both, confidence.float()).squeeze(-1)
