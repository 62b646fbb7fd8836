"""No step can be faster than this: bytes and FLOPs of every component (kernels.md 16).

One GPU without others beside it: all layers, all experts of the configuration with uniform routing,
the whole vocabulary, nothing over NVLink. A component's bound is the sum over layers of
``max(bytes / read, flops / rate)``, by the formulas of kernels.md 1 to 14: weights as the
checkpoint packs them, each input read and each output written once. No launch costs anything and
nothing overlaps: bounds, not predictions.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from leadline.cache.layout import KV_CACHE_DTYPES
from leadline.config.model import ModelConfig

MICROSECONDS = 1e6
_SCORE_BYTES = 2

SEAMS = "mHC seams"
ROUTER = "router"
PROJECTIONS = "attention projections"
INDEX_PROJECTIONS = "compressor and index projections"
DENSE_LOGITS = "dense index logits"
CANDIDATE_LOGITS = "candidate logits"
SELECTION = "selection"
ATTENTION = "attention"
ROUTED_EXPERTS = "routed experts"
SHARED_EXPERT = "shared expert"
ENGRAM = "Engram"
HEAD = "head and sampling"

COMPONENTS = (
    SEAMS,
    ROUTER,
    PROJECTIONS,
    INDEX_PROJECTIONS,
    DENSE_LOGITS,
    CANDIDATE_LOGITS,
    SELECTION,
    ATTENTION,
    ROUTED_EXPERTS,
    SHARED_EXPERT,
    ENGRAM,
    HEAD,
)


@dataclass(frozen=True, slots=True)
class MachineRates:
    """What a GPU reaches.

    Attributes:
        read: bytes/s.
        bf16: dense FLOP/s.
        fp8: the same.
    """

    read: float
    bf16: float
    fp8: float


# kernels.md 0.3, with which its tables were made, and what was measured later (18.1).
H200 = MachineRates(read=4.3e12, bf16=7.9e14, fp8=1.5e15)
H200_MEASURED = MachineRates(read=4.55e12, bf16=7.8e14, fp8=1.32e15)


def decode_bound(
    config: ModelConfig,
    machine: MachineRates,
    *,
    batch: int,
    context: int,
    kv_record_bytes: int | None = None,
    window_record_bytes: int | None = None,
    index_record_bytes: int | None = None,
) -> dict[str, float]:
    """A step in which each request feeds one token (kernels.md 16.1).

    Args:
        config: of the model, with the experts that this GPU holds.
        machine: the GPU.
        batch: requests.
        context: tokens of each, the one that is fed included.
        kv_record_bytes: of a compressed entry; None takes the record of ``--kv-cache-dtype auto``.
        window_record_bytes: of a window row; likewise.
        index_record_bytes: of an index key; likewise.

    Returns:
        Microseconds by ``COMPONENTS``.
    """
    records = _Records.of(config, kv_record_bytes, window_record_bytes, index_record_bytes)
    rows = _Rows(batch, context - 1, context)
    bound = _Bound(config, machine, records, fp8=False)
    bound.step(rows, rows, sampled=batch)
    return bound.us


def prefill_bound(
    config: ModelConfig,
    machine: MachineRates,
    *,
    prompt: int,
    upper_rows: int | None,
    fp8: bool = False,
    kv_record_bytes: int | None = None,
    window_record_bytes: int | None = None,
    index_record_bytes: int | None = None,
) -> dict[str, float]:
    """One whole prompt, whose last row's token is sampled (kernels.md 16.2).

    Args:
        config: as for ``decode_bound``.
        machine: likewise.
        prompt: tokens.
        upper_rows: last rows that the layers above the cut run on; None for all.
        fp8: products with FP8 and FP4 weights run at the FP8 rate, otherwise at that of bf16.
        kv_record_bytes: as for ``decode_bound``.
        window_record_bytes: likewise.
        index_record_bytes: likewise.

    Returns:
        Microseconds by ``COMPONENTS``.
    """
    records = _Records.of(config, kv_record_bytes, window_record_bytes, index_record_bytes)
    lower = _Rows(1, 0, prompt)
    upper = lower if upper_rows is None else _Rows(1, max(0, prompt - upper_rows), prompt)
    bound = _Bound(config, machine, records, fp8=fp8)
    bound.step(lower, upper, sampled=1)
    return bound.us


@dataclass(frozen=True, slots=True)
class _Records:
    """Bytes of a compressed entry, a window row and an index key."""

    kv: int
    window: int
    index: int

    @classmethod
    def of(
        cls, config: ModelConfig, kv: int | None, window: int | None, index: int | None
    ) -> _Records:
        native = KV_CACHE_DTYPES["nvfp4_ds_mla"]
        widths = (config.head_dim, config.head_dim, config.index_head_dim)
        sizes = [record.num_bytes(width) for record, width in zip(native, widths, strict=True)]
        return cls(kv=kv or sizes[1], window=window or sizes[0], index=index or sizes[2])


@dataclass(frozen=True, slots=True)
class _Rows:
    """Positions ``[first, last)`` of so many requests."""

    requests: int
    first: int
    last: int

    @property
    def count(self) -> int:
        return self.requests * (self.last - self.first)

    def visible(self, ratio: int, most: int | None = None) -> int:
        """Entries that all rows see together, each row at most so many."""
        seen = np.arange(self.first + 1, self.last + 1) // ratio
        if most is not None:
            seen = np.minimum(seen, most)
        return self.requests * int(seen.sum())

    def windows(self, width: int) -> int:
        """Rows that lie in the window of some row."""
        return self.requests * (self.last - max(0, self.first + 1 - width))

    def entries(self, ratio: int) -> int:
        """Entries that exist, of all requests."""
        return self.requests * (self.last // ratio)


class _Bound:
    """Adds up the bounds of a step's calls, component by component.

    Attributes:
        us: microseconds so far.
    """

    def __init__(
        self, config: ModelConfig, machine: MachineRates, records: _Records, *, fp8: bool
    ) -> None:
        self.us = dict.fromkeys(COMPONENTS, 0.0)
        self._config, self._machine, self._records = config, machine, records
        self._product_rate = machine.fp8 if fp8 else machine.bf16
        packed = config.quantization_config is not None
        self._dense_bytes = 1 + 1 / 1024 if packed else 2.0  # of a weight (kernels.md 0.2)
        self._expert_bytes = 17 / 32 if packed else 2.0

    def step(self, lower: _Rows, upper: _Rows, sampled: int) -> None:
        """All layers: those below the cut and the cut's caches on ``lower``, the rest on upper."""
        config = self._config
        for layer in range(config.num_hidden_layers):
            stored = lower if layer <= config.cut else upper  # whose rows fill caches
            rows = lower if layer < config.cut else upper
            self._seam(stored.count)
            self._seam(rows.count)
            self._projections(stored.count, rows.count)
            if layer in config.kv_source_layer_ids:
                self._compressor(layer, stored.count)
            if layer in config.index_source_layer_ids:
                self._index(layer, rows)
            self._attention(layer, rows)
            self._experts(rows.count)
            if layer in config.engram_layer_ids:
                self._engram(rows.count)
        self._head(sampled)

    def _add(self, component: str, num_bytes: float, flops: float, rate: float) -> None:
        """One call."""
        seconds = max(num_bytes / self._machine.read, flops / rate)
        self.us[component] += MICROSECONDS * seconds

    def _product(self, component: str, rows: int, parameters: int, values: int) -> None:
        """One with FP8 weights, which moves so many activations a row."""
        num_bytes = parameters * self._dense_bytes + 2 * values * rows
        self._add(component, num_bytes, 2 * parameters * rows, self._product_rate)

    def _seam(self, rows: int) -> None:
        """Expand, collapse and norm, and the coefficients of what follows (kernels.md 1.2)."""
        width, streams = self._config.hidden_size, self._config.hc_mult
        mixes = streams * (streams + 2)  # pre, post and comb of a row, float32, read and written
        num_bytes = rows * (4 * width * (streams + 1) + 8 * mixes)
        num_bytes += 4 * mixes * streams * width + 2 * width
        expand, collapse, squares = streams * (2 * streams + 2), 2 * streams, 2 * streams
        per_channel = expand + collapse + 2 * mixes * streams + squares + 4
        self._add(SEAMS, num_bytes, per_channel * width * rows, self._machine.bf16)

    def _projections(self, stored: int, rows: int) -> None:
        """Down, up, and both products of the output (kernels.md 9 and 11.1)."""
        config = self._config
        width, rank, head = config.hidden_size, config.q_lora_rank, config.head_dim
        heads, low = config.num_attention_heads * head, config.o_groups * config.o_lora_rank
        if stored == rows:
            self._product(PROJECTIONS, rows, width * (rank + head), width + rank + head)
        else:  # at the cut
            self._product(PROJECTIONS, stored, width * head, width + head)
            self._product(PROJECTIONS, rows, width * rank, width + rank)
        self._product(PROJECTIONS, rows, rank * heads, rank + heads)
        self._product(PROJECTIONS, rows, heads * config.o_lora_rank, heads + low)
        self._product(PROJECTIONS, rows, low * width, low + width)

    def _compressor(self, layer: int, rows: int) -> None:
        """Products with bf16 weights, and the entries and keys they make (kernels.md 3.1)."""
        config, ratio = self._config, self._config.compress_ratios[layer]
        width, head, dim = config.hidden_size, config.head_dim, config.index_head_dim
        pooled = width * (head if ratio == 1 else 2 * head)  # ... values and gates
        keys, entries = head * dim, rows / ratio
        stored = entries * (self._records.kv + self._records.index)
        num_bytes = 2 * (pooled + keys) + 2 * width * rows + stored
        flops = 2 * (pooled * rows + keys * entries)
        self._add(INDEX_PROJECTIONS, num_bytes, flops, self._machine.bf16)

    def _index(self, layer: int, rows: _Rows) -> None:
        """Queries, scores, and what is selected by these (kernels.md 5 to 7)."""
        config, ratio = self._config, self._config.compress_ratios[layer]
        heads, dim, rank = config.index_n_heads, config.index_head_dim, config.q_lora_rank
        # The weights of the heads are a product of what the down-projection reads anyway.
        queries, weights = rank * heads * dim, config.hidden_size * heads
        num_bytes = queries * self._dense_bytes + 2 * weights
        num_bytes += 2 * rows.count * (rank + heads * dim)
        flops = 2 * (queries + weights) * rows.count
        self._add(INDEX_PROJECTIONS, num_bytes, flops, self._product_rate)

        source, per_score = config.candidate_source_layer_id, 2 * heads * dim
        if 0 <= source < layer:
            seen = rows.visible(ratio, config.candidate_topk_blocks * config.candidate_block_size)
            num_bytes = seen * (self._records.index + _SCORE_BYTES)
            self._add(CANDIDATE_LOGITS, num_bytes, per_score * seen, self._machine.fp8)
            passes = 1
        else:
            seen = rows.visible(ratio)
            num_bytes = rows.entries(ratio) * self._records.index + seen * _SCORE_BYTES
            self._add(DENSE_LOGITS, num_bytes, per_score * seen, self._machine.fp8)
            passes = 2 if layer == source else 1  # entries, and blocks of candidates
        self._add(SELECTION, passes * seen * _SCORE_BYTES, 0, self._machine.bf16)

    def _attention(self, layer: int, rows: _Rows) -> None:
        """Selected entries, read for each row alone, and windows (kernels.md 8.2 and 8.5)."""
        config, ratio = self._config, self._config.compress_ratios[layer]
        width = config.num_attention_heads * config.head_dim
        entries = rows.visible(ratio, config.index_topk) if ratio else 0
        num_bytes = entries * self._records.kv + rows.count * 4 * width
        num_bytes += rows.windows(config.sliding_window) * self._records.window
        flops = 4 * width * (entries + rows.visible(1, config.sliding_window))
        self._add(ATTENTION, num_bytes, flops, self._machine.bf16)

    def _experts(self, rows: int) -> None:
        """Router, routed experts by uniform choice, shared expert (kernels.md 2, 10.1, 11.1)."""
        config = self._config
        width, inner = config.hidden_size, config.moe_intermediate_size
        num, chosen = config.n_routed_experts, config.num_experts_per_tok
        gate = width * num
        routing = 2 * gate + rows * (2 * width + 12 * chosen)
        self._add(ROUTER, routing, 2 * gate * rows, self._machine.bf16)
        expert = 3 * width * inner
        active = num * (1 - (1 - chosen / num) ** rows)
        # A row comes in and goes out, and between the products its hidden row does.
        moved = 4 * (width + inner)
        num_bytes = active * expert * self._expert_bytes + rows * chosen * moved
        self._add(ROUTED_EXPERTS, num_bytes, 2 * expert * chosen * rows, self._product_rate)
        self._product(SHARED_EXPERT, rows, expert, 2 * (width + inner))

    def _engram(self, rows: int) -> None:
        """Table rows, their projection and the gate, as one (kernels.md 12.1)."""
        config = self._config
        width, streams = config.hidden_size, config.hc_mult
        row = config.engram_columns * config.engram_head_dim
        out = (streams + 1) * width
        # Of the gate: streams, keys and value in, streams out. Table rows come from the host.
        self._product(ENGRAM, rows, row * out, (3 * streams + 1) * width)

    def _head(self, rows: int) -> None:
        """Float32 logits, which sampling reads once (kernels.md 11.1 and 14)."""
        width, vocabulary = self._config.hidden_size, self._config.vocab_size
        num_bytes = 2 * width * vocabulary + rows * (2 * width + 8 * vocabulary)
        self._add(HEAD, num_bytes, 2 * width * vocabulary * rows, self._machine.bf16)
