"""The draft head one block at a time, straight from v41-model 8.1 to 8.3, in float32."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from leadline.config.model import ModelConfig
from leadline.tools.train_tiny.quantize import fake_fp8_32


class Definition:
    """A draft head with the weights of ``draft`` between the embedding and head of ``backbone``.

    ``quantize`` rounds window keys and what goes into packed weights, as in service.
    """

    def __init__(
        self, config: ModelConfig, backbone: nn.Module, draft: nn.Module, *, quantize: bool
    ) -> None:
        self.config = config
        self.rounded: Callable[[Tensor], Tensor] = fake_fp8_32 if quantize else lambda x: x
        self.w: dict[str, Tensor] = draft.state_dict()
        self.embed = backbone.state_dict()["embed.weight"]
        self.head = backbone.state_dict()["head.weight"]

    def packed(self, name: str, x: Tensor) -> Tensor:
        return self.w[name] @ self.rounded(x)

    def norm(self, x: Tensor, name: str) -> Tensor:
        return (
            x
            * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.config.rms_norm_eps)
            * self.w[name]
        )

    def turn(self, x: Tensor, position: int, *, back: bool = False) -> Tensor:
        r = self.config.qk_rope_head_dim
        pairs = torch.view_as_complex(x[..., -r:].reshape(*x.shape[:-1], -1, 2))
        exponents = torch.arange(0, r, 2) / r
        angle = position * self.config.rope_theta**-exponents * (-1 if back else 1)
        turned = torch.view_as_real(pairs * torch.polar(torch.ones(r // 2), angle)).flatten(-2)
        return torch.cat((x[..., :-r], turned), dim=-1)

    def key(self, stage: int, x: Tensor, position: int) -> Tensor:
        at = f"mtp.{stage}.attn."
        latent = self.norm(self.packed(at + "wkv.weight", x), at + "kv_norm.weight")
        return self.rounded(self.turn(latent, position))

    def mix(self, stage: int, site: str, streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        s, eps = self.config.hc_mult, self.config.hc_eps
        fn, base, scale = (
            self.w[f"mtp.{stage}.hc_{site}_{part}"] for part in ("fn", "base", "scale")
        )
        z = streams.flatten()
        m = (fn @ z) * torch.rsqrt(z.square().mean() + self.config.rms_norm_eps)
        g = m * torch.cat((scale[0].expand(s), scale[1].expand(s), scale[2].expand(s * s))) + base
        c = g[2 * s :].view(s, s).softmax(1) + eps
        c = c / (c.sum(0) + eps)
        for _ in range(self.config.hc_sinkhorn_iters - 1):
            c = c / (c.sum(1, keepdim=True) + eps)
            c = c / (c.sum(0) + eps)
        return g[:s].sigmoid() + eps, 2 * g[s : 2 * s].sigmoid(), c

    def attention(
        self, stage: int, inputs: list[Tensor], q_last: int, ring: list[Tensor]
    ) -> list[Tensor]:
        at, heads, d = f"mtp.{stage}.attn.", self.config.num_attention_heads, self.config.head_dim
        keys = [*ring, *(self.key(stage, u, q_last + 1 + i) for i, u in enumerate(inputs))]
        result = []
        for i, u in enumerate(inputs):
            position = q_last + 1 + i
            qr = self.norm(self.packed(at + "wq_a.weight", u), at + "q_norm.weight")
            q = self.turn(self.packed(at + "wq_b.weight", qr).view(heads, d), position)
            outs = []
            for h in range(heads):
                scores = torch.stack([q[h] @ key * d**-0.5 for key in keys])
                sink = self.w[at + "attn_sink"][h : h + 1]
                shares = torch.cat((scores, sink)).softmax(0)[:-1]
                outs.append(sum(share * key for share, key in zip(shares, keys, strict=True)))
            out = self.turn(torch.stack(outs), position, back=True)
            groups = out.view(self.config.o_groups, -1)
            wo_a = self.w[at + "wo_a.weight"].view(
                self.config.o_groups, self.config.o_lora_rank, -1
            )
            low = torch.cat([wo_a[g] @ groups[g] for g in range(self.config.o_groups)])
            result.append(self.packed(at + "wo_b.weight", low))
        return result

    def moe(self, stage: int, u: Tensor) -> Tensor:
        at = f"mtp.{stage}.ffn."
        scores = F.softplus(self.w[at + "gate.weight"] @ u).sqrt()
        k = self.config.dspark_num_experts_per_tok
        assert k == 1  # whose weight is not normalised
        (best,) = (scores + self.w[at + "gate.bias"]).topk(k).indices.tolist()

        weight = scores[best] * self.config.routed_scaling_factor
        limit, x = self.config.swiglu_limit, self.rounded(u)

        def expert(weight: Tensor | float, w1: Tensor, w3: Tensor, w2: Tensor) -> Tensor:
            hidden = F.silu((w1 @ x).clamp(max=limit)) * (w3 @ x).clamp(-limit, limit)
            return w2 @ self.rounded(hidden * weight)

        names = ("w1.weight", "w3.weight", "w2.weight")
        routed = expert(weight, *(self.w[f"{at}experts.{name}"][best] for name in names))
        return routed + expert(1.0, *(self.w[f"{at}shared_experts.{name}"] for name in names))

    def draft(self, features: Tensor, tokens: list[int]) -> tuple[Tensor, Tensor]:
        """Logits and confidences behind ``features [q + 1, L D]``; ``tokens`` stand at q + 1 on."""
        q_last, slots = len(features) - 1, self.config.dspark_block_size
        main = [
            self.norm(self.packed("mtp.0.main_proj.weight", f), "mtp.0.main_norm.weight")
            for f in features
        ]
        ids = [tokens[0]] + [self.config.dspark_noise_token_id] * (slots - 1)
        streams = [self.embed[i].expand(self.config.hc_mult, -1) for i in ids]
        carried = [F.one_hot(torch.tensor(0), self.config.hc_mult).float()] * slots
        oldest = max(0, q_last + 1 - self.config.sliding_window)
        for stage in range(self.config.num_nextn_predict_layers):
            ring = [self.key(stage, main[p], p) for p in range(oldest, q_last + 1)]
            for site in ("attn", "ffn"):
                mixes = [self.mix(stage, site, x) for x in streams]
                inputs = [
                    self.norm(c @ x, f"mtp.{stage}.{site}_norm.weight")
                    for c, x in zip(carried, streams, strict=True)
                ]
                outputs = (
                    self.attention(stage, inputs, q_last, ring)
                    if site == "attn"
                    else [self.moe(stage, u) for u in inputs]
                )
                streams = [
                    post.unsqueeze(1) * y + comb.T @ x
                    for (_, post, comb), y, x in zip(mixes, outputs, streams, strict=True)
                ]
                carried = [pre for pre, _, _ in mixes]
        last = f"mtp.{self.config.num_nextn_predict_layers - 1}."
        logits, confidences = [], []
        for i in range(slots):
            hidden = carried[i] @ streams[i]
            e = self.w[last + "markov_head.embed.weight"][tokens[i]]
            u = self.head @ self.norm(hidden, last + "norm.weight")
            logits.append(u + self.w[last + "markov_head.head.weight"] @ e)
            both = torch.cat((hidden, e))
            confidences.append((self.w[last + "confidence_head.proj.weight"] @ both).squeeze(0))
        return torch.stack(logits), torch.stack(confidences)
