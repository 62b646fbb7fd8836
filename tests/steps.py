"""Model steps without an engine: sequences with their own slot and pages, fed in any chunks."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, TypeVar

import torch
from tokenizers import Tokenizer
from torch import Tensor

from leadline.cache.layout import cache_layout
from leadline.cache.pool import CachePool
from leadline.config.families import AnyConfig
from leadline.config.keys import read_json
from leadline.config.model import ModelConfig, load_model_config
from leadline.config.v4 import V4Config, parse_v4_config
from leadline.models.batch import ForwardBatch, forward
from leadline.models.common.parameters import Parameters
from leadline.models.deepseek_v4.model import DeepseekV4
from leadline.models.deepseek_v41.engram import compressed_token_map
from leadline.models.deepseek_v41.model import DeepseekV41
from leadline.parallel.placement import Placement
from leadline.weights.checkpoint import Checkpoint
from leadline.weights.engram_tables import TableMemory
from leadline.weights.load import CheckpointSource, DummySource

STEP_ROWS = 2048  # of a stepper for which nobody says more

C = TypeVar("C", bound=AnyConfig)
M = TypeVar("M", bound=DeepseekV41 | DeepseekV4)


@dataclass
class Sequence:
    """Tokens of one request, and how far they are fed."""

    tokens: list[int]
    slot: int
    pages: list[int]
    fed: int = 0
    floor_lo: int = 0
    floor_up: int = 0
    write_from: int = 0


@dataclass
class AnyStepper(Generic[C, M]):
    """A model with its cache; hands out slots and pages and never takes them back."""

    config: C
    model: M
    pool: CachePool
    device: torch.device
    next_page: int = 1
    sequences: list[Sequence] = field(default_factory=list)

    @property
    def num_history(self) -> int:
        """Ids before a group's first row that the model reads."""
        if isinstance(self.config, ModelConfig):
            return self.config.engram_max_ngram_size - 1
        return 0

    def start(self, tokens: list[int], *, max_len: int | None = None) -> Sequence:
        count = math.ceil((max_len or len(tokens) + 64) / self.pool.layout.page_size)
        pages = list(range(self.next_page, self.next_page + count))
        self.next_page += count
        sequence = Sequence(list(tokens), len(self.sequences) + 1, pages)
        self.sequences.append(sequence)
        assert sequence.slot < self.pool.num_slots
        assert self.next_page <= self.pool.num_pages
        return sequence

    def batch(self, parts: list[tuple[Sequence, int]]) -> ForwardBatch:
        """The next n tokens of each sequence; every row runs the upper half and is sampled."""
        history = self.num_history
        starts = [sequence.fed for sequence, _ in parts]
        counts = torch.tensor([n for _, n in parts])
        m = int(counts.sum())
        ids = [t for s, n in parts for t in s.tokens[s.fed : s.fed + n]]
        assert len(ids) == m
        width = max(len(s.pages) for s, _ in parts)

        group = torch.repeat_interleave(torch.arange(len(parts)), counts)
        q_off = torch.cat((counts.new_zeros(1), counts.cumsum(0)))
        tensors = {
            "ids": torch.tensor(ids, dtype=torch.int32),
            "pos": torch.cat(
                [torch.arange(a, a + int(n)) for a, n in zip(starts, counts, strict=True)]
            ),
            "req_of_row": group,
            "q_off": q_off,
            "seq_len": torch.tensor([s.fed + n for s, n in parts]),
            "slot": torch.tensor([s.slot for s, _ in parts]),
            "floor_lo": torch.tensor([s.floor_lo for s, _ in parts]),
            "floor_up": torch.tensor([s.floor_up for s, _ in parts]),
            "write_from": torch.tensor([s.write_from for s, _ in parts]),
            "page_table": torch.tensor(
                [s.pages + [0] * (width - len(s.pages)) for s, _ in parts], dtype=torch.int32
            ),
            "hist": torch.tensor(
                [([-1] * history + s.tokens[: s.fed])[s.fed :] for s, _ in parts],
                dtype=torch.int32,
            ),
            "rows_upper": torch.arange(m),
            "req_of_upper": group,
            "upper_off": q_off,
            "sample_rows": torch.arange(m),
        }
        max_len = max(s.fed + n for s, n in parts)
        for sequence, n in parts:
            sequence.fed += n
        return ForwardBatch(
            **{name: tensor.to(self.device) for name, tensor in tensors.items()},
            max_len=max_len,
            max_rows=max(n for _, n in parts),
        )

    def step(self, parts: list[tuple[Sequence, int]]) -> list[Tensor]:
        """Run one step: logits ``[n, V]`` of each part."""
        batch = self.batch(parts)
        with torch.inference_mode():
            logits = self.model.logits(forward(self.model, batch)).cpu()
        return list(logits.split([n for _, n in parts]))

    def feed(self, sequence: Sequence, chunk: int | None = None) -> Tensor:
        """Feed what is left of a sequence in chunks: logits of every fed row."""
        rows = []
        while left := len(sequence.tokens) - sequence.fed:
            rows.append(self.step([(sequence, min(chunk or left, left))])[0])
        return torch.cat(rows)


Stepper = AnyStepper[ModelConfig, DeepseekV41]
V4Stepper = AnyStepper[V4Config, DeepseekV4]


def trimmed(batch: ForwardBatch, rows: Tensor) -> ForwardBatch:
    """A batch of which only these rows run the upper half: of each group its last ones."""
    group = batch.req_of_row[rows]
    counts = torch.bincount(group, minlength=len(batch.slot))
    upper_off = torch.cat((counts.new_zeros(1), counts.cumsum(0)))
    return dataclasses.replace(batch, rows_upper=rows, req_of_upper=group, upper_off=upper_off)


def make_stepper(
    folder: Path | ModelConfig,
    *,
    dtype: torch.dtype = torch.float32,
    kv_cache_dtype: str = "auto",
    block_size: int = 256,
    quantize_activations: bool = True,
    expert_row_scales: bool = False,
    exact_rounding: bool = True,
    num_pages: int = 64,
    num_slots: int = 16,
    device: str = "cpu",
    window: int | None = None,
    packed: bool = False,
    table_memory: TableMemory | None = None,
    side_streams: str = "all",
    engram_prefetch: bool = True,
) -> Stepper:
    """A checkpoint's model, or a seeded random one of a configuration.

    ``window`` stands in for the checkpoint's own, which no weight's shape knows. ``table_memory``
    is for models of random weights.
    """
    token_map = None
    source: CheckpointSource | DummySource
    if isinstance(folder, ModelConfig):
        config, source = folder, DummySource(folder, table_memory=table_memory)
    else:
        config = load_model_config(folder)
        if window is not None:
            config = dataclasses.replace(config, sliding_window=window)
        source = CheckpointSource(Checkpoint(folder), config, show_progress=False)
        token_map = compressed_token_map(Tokenizer.from_file(str(folder / "tokenizer.json")))
    params = Parameters(
        source,
        dtype,
        torch.device(device),
        Placement(),
        quantize_activations=quantize_activations,
        expert_row_scales=expert_row_scales,
        packed=packed,
    )
    model = DeepseekV41(
        config,
        params,
        token_map=token_map,
        exact_rounding=exact_rounding,
        side_streams=side_streams,
        engram_prefetch=engram_prefetch,
    )
    source.finish()
    return _bound(config, model, params, kv_cache_dtype, block_size, num_pages, num_slots)


def make_v4_stepper(
    folder: Path | V4Config,
    *,
    dtype: torch.dtype = torch.float32,
    kv_cache_dtype: str = "auto",
    block_size: int = 256,
    exact_rounding: bool = True,
    num_pages: int = 64,
    num_slots: int = 16,
    device: str = "cpu",
    packed: bool = False,
    side_streams: str = "all",
) -> V4Stepper:
    """The same for V4."""
    source: CheckpointSource | DummySource
    if isinstance(folder, V4Config):
        config, source = folder, DummySource(folder)
    else:
        config = parse_v4_config(read_json(folder / "config.json"))
        source = CheckpointSource(Checkpoint(folder), config, show_progress=False)
    params = Parameters(source, dtype, torch.device(device), Placement(), packed=packed)
    model = DeepseekV4(config, params, exact_rounding=exact_rounding, side_streams=side_streams)
    source.finish()
    return _bound(config, model, params, kv_cache_dtype, block_size, num_pages, num_slots)


def _bound(
    config: C,
    model: M,
    params: Parameters,
    kv_cache_dtype: str,
    block_size: int,
    num_pages: int,
    num_slots: int,
) -> AnyStepper[C, M]:
    pool = CachePool(
        cache_layout(config, kv_cache_dtype=kv_cache_dtype, block_size=block_size),
        num_pages=num_pages,
        num_slots=num_slots,
        step_rows=STEP_ROWS,
        wide=params.wide,
        device=params.device,
    )
    model.bind_cache(pool)
    return AnyStepper(config, model, pool, params.device)
