"""Addresses of a batch that every layer shares: positions, angles, who sees whom."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from leadline.config.model import ModelConfig
from leadline.tools.train_tiny.batch import Batch

Angles = tuple[Tensor, Tensor]

# Of a position that is drawn seldom, beside one whose token or number of entries counts fully.
_LEAST_SHARE = 0.1


def frequencies(config: ModelConfig, *, compressed: bool) -> Tensor:
    """Rotary frequencies ``[r / 2]`` float32 of either kind of layer (v41-model 3.2)."""
    r = config.qk_rope_head_dim
    theta = config.compress_rope_theta if compressed else config.rope_theta
    base = 1.0 / theta ** (torch.arange(0, r, 2, dtype=torch.float32) / r)
    if not compressed:
        return base
    yarn = config.rope_scaling

    def turns_to_channel(turns: float) -> float:
        wavelength = yarn.original_max_position_embeddings / (2 * math.pi * turns)
        return r * math.log(wavelength) / (2 * math.log(theta))

    low = max(math.floor(turns_to_channel(yarn.beta_fast)), 0)
    high = min(math.ceil(turns_to_channel(yarn.beta_slow)), r - 1)
    ramp = ((torch.arange(r // 2, dtype=torch.float32) - low) / max(high - low, 1e-3)).clamp(0, 1)
    return base / yarn.factor * ramp + base * (1 - ramp)


def angles(positions: Tensor, freqs: Tensor) -> Angles:
    """Cos and sin ``[..., r / 2]`` float32 of positions ``[...]``."""
    turned = positions.float().unsqueeze(-1) * freqs
    return turned.cos(), turned.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn adjacent pairs of the last r channels of ``[..., n]`` by angles that broadcast."""
    r = 2 * cos.shape[-1]
    kept, turned = x[..., :-r], x[..., -r:].float()
    even, odd = turned[..., 0::2], turned[..., 1::2]
    pairs = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1)
    return torch.cat((kept, pairs.flatten(-2).to(x.dtype)), dim=-1)


@dataclass(frozen=True, slots=True)
class Entries:
    """The compressed entries of one ratio: row j of a sequence pools its tokens ``m j .. m j+m-1``.

    Attributes:
        opening: ``[N]`` the sequence position of each entry's first token.
        angles: cos and sin ``[B, N, r / 2]`` there.
    """

    opening: Tensor
    angles: Angles


class Rows:
    """Everything that layers need to know about a batch besides its activations.

    Attributes:
        batch: the tokens.
        plain: cos and sin ``[B, S, r / 2]`` of window-only layers; ``yarn`` of the others.
        entries: by ratio.
        probe: ``[B, n]`` sequence positions whose attention teaches the indexers.
    """

    def __init__(self, batch: Batch, config: ModelConfig, probes: int) -> None:
        self.batch, self.window = batch, config.sliding_window
        device, length = batch.ids.device, batch.ids.shape[1]
        positions = batch.positions
        plain, yarn = frequency_tables(config, device)
        self.plain, self.yarn = angles(positions, plain), angles(positions, yarn)
        self.entries: dict[int, Entries] = {}
        self.key_blocks: dict[int, tuple[Tensor, Tensor]] = {}  # of the fused attention, by ratio
        for ratio in sorted(
            {config.compress_ratios[layer] for layer in config.kv_source_layer_ids}
        ):
            opening = torch.arange(length // ratio, device=device) * ratio
            self.entries[ratio] = Entries(opening, angles(positions[:, opening], yarn))
        self.probe = draw_probes(batch, min(probes, length), config.index_topk)

    def window_mask(self) -> Tensor:
        """``[B, S, S]`` bool: the own token and those before it within the window (3.9)."""
        row = torch.arange(self.batch.ids.shape[1], device=self.batch.ids.device)
        back = row.unsqueeze(1) - row
        near = (back >= 0) & (back < self.window)
        return near & (row >= self.batch.first.unsqueeze(2))

    def entry_mask(self, ratio: int, *, probed: bool = False) -> Tensor:
        """``[B, S, N]`` bool: closed entries of the own document; ``[B, n, N]`` if ``probed``."""
        opening, first = self.entries[ratio].opening, self.batch.first
        rows = torch.arange(first.shape[1], device=first.device).unsqueeze(0)
        if probed:
            rows, first = self.probe, self.probed(first)
        closed = opening + ratio - 1 <= rows.unsqueeze(2)
        return closed & (opening >= first.unsqueeze(2))

    def probed(self, x: Tensor) -> Tensor:
        """``[B, S, ...]`` -> ``[B, n, ...]`` of the probed rows."""
        return x[torch.arange(len(x), device=x.device).unsqueeze(1), self.probe]


def draw_probes(batch: Batch, count: int, index_topk: int) -> Tensor:
    """``[B, count]`` different positions of each row, at random.

    Most are where a wrong selection costs something: the token behind is to be learnt, and there
    are more entries than are selected.
    """
    shares = batch.weights.roll(-1, 1) + _LEAST_SHARE
    shares = shares * torch.where(batch.positions < index_topk, _LEAST_SHARE, 1.0)
    # The first arrivals of clocks whose rates are the shares; multinomial would wait for the GPU.
    arrivals = torch.empty_like(shares).exponential_() / shares
    return arrivals.topk(count, largest=False, sorted=False).indices


@functools.cache
def frequency_tables(config: ModelConfig, device: torch.device) -> tuple[Tensor, Tensor]:
    """``frequencies`` of window-only layers and of the others, on a device."""
    return (
        frequencies(config, compressed=False).to(device),
        frequencies(config, compressed=True).to(device),
    )
