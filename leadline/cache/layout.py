"""What cache memory looks like: records, pages and slots, in integers only.

A page holds 256 token positions (``--block-size``) of everything that lasts; a slot holds what one
running request needs and nobody else (cache-and-scheduling 1.3). Packed bytes are the only storage.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass

from leadline.config.model import ModelConfig
from leadline.core.errors import ConfigError
from leadline.kernels.records import Record

logger = logging.getLogger(__name__)

# Rows of an open-group ring: (ratio - 1) + the longest step's rows, rounded up (1.3 and 1.4).
COMPRESSOR_RING_ROWS = 8


# --kv-cache-dtype -> (window, compressed, index key) records (design.md).
KV_CACHE_DTYPES: dict[str, tuple[Record, Record, Record]] = {
    "nvfp4_ds_mla": (Record.FP8_32, Record.FP4_16, Record.FP4_32),
    "fp8": (Record.FP8_32, Record.FP8_32, Record.FP4_32),
    "bfloat16": (Record.BFLOAT16, Record.BFLOAT16, Record.BFLOAT16),
    "float32": (Record.FLOAT32, Record.FLOAT32, Record.FLOAT32),
}


@dataclass(frozen=True, slots=True)
class Owner:
    """A layer that owns a compressed cache and its index keys."""

    layer: int
    ratio: int


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """Sizes of every cache tensor of one model.

    Attributes:
        page_size: token positions of a page.
        owners: KV sources, ascending by layer.
        head_dim: channels of a window or compressed row.
        index_head_dim: channels of an index key.
        window: tokens a query sees in its window, itself included.
        ring: rows of a window ring; position ``p`` lies in row ``p % ring``.
        window_layers: layers (draft stages included) that own a window ring.
    """

    page_size: int
    owners: tuple[Owner, ...]
    head_dim: int
    index_head_dim: int
    window: int
    ring: int
    window_layers: int
    window_record: Record
    kv_record: Record
    index_record: Record

    def entries_per_page(self, owner: Owner) -> int:
        """Compressed entries, and as many index keys, that a page holds for ``owner``."""
        return self.page_size // owner.ratio

    @property
    def page_bytes(self) -> int:
        """Bytes of one page over all owners: 227,840 for V4.1-Flash with ``auto`` records."""
        record = self.kv_record.num_bytes(self.head_dim)
        record += self.index_record.num_bytes(self.index_head_dim)
        return sum(self.entries_per_page(owner) * record for owner in self.owners)

    @property
    def bytes_per_token(self) -> float:
        """Page bytes per token position: 890 for V4.1-Flash with ``auto`` records."""
        return self.page_bytes / self.page_size

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot: window rings and open compression groups (fp32 rows)."""
        rings = self.window_layers * self.ring * self.window_record.num_bytes(self.head_dim)
        open_groups = sum(1 for owner in self.owners if owner.ratio > 1)
        return rings + open_groups * COMPRESSOR_RING_ROWS * 2 * self.head_dim * 4

    def staging_units(self, step_rows: int) -> int:
        """Slots' worth of ring rows that hold the window rows of one step."""
        return -(-step_rows // self.ring)

    def staging_bytes(self, step_rows: int) -> int:
        """Bytes of these over all layers: 173 MB for 8192 rows of V4.1-Flash."""
        rows = self.window_layers * self.staging_units(step_rows) * self.ring
        return rows * self.window_record.num_bytes(self.head_dim)


def cache_layout(
    config: ModelConfig,
    *,
    kv_cache_dtype: str = "auto",
    block_size: int = 256,
    rows_per_decode: int = 6,
    with_draft: bool = False,
) -> CacheLayout:
    """The layout of a V4.1 model.

    Args:
        config: the model.
        kv_cache_dtype: ``auto`` (the reference's formats), ``nvfp4_ds_mla``, ``fp8`` (also by
            the name ``fp8_ds_mla``), ``bfloat16`` or ``float32``.
        block_size: token positions of a page.
        rows_per_decode: the most query rows of a decode group (1 + longest draft).
        with_draft: whether the draft stages own rings too.

    Raises:
        ConfigError: the record type is unknown, or a page does not hold whole entries.
    """
    name = "nvfp4_ds_mla" if kv_cache_dtype == "auto" else kv_cache_dtype
    if name == "fp8_ds_mla":
        logger.warning("kv_cache_dtype fp8_ds_mla means fp8 for V4.1: rows of 528 bytes, not 584")
        name = "fp8"
    if name not in KV_CACHE_DTYPES:
        known = ", ".join(["auto", *KV_CACHE_DTYPES])
        raise ConfigError(f"kv_cache_dtype is {kv_cache_dtype!r}; choose one of {known}")
    step = math.lcm(16, *(config.compress_ratios[i] for i in config.kv_source_layer_ids))
    if block_size < 1 or block_size % step:
        raise ConfigError(
            f"block_size is {block_size} tokens, but a page holds whole compressed entries and "
            f"this model's compress_ratios need a multiple of {step}; try {step} or 256"
        )
    window_record, kv_record, index_record = KV_CACHE_DTYPES[name]
    drafts = config.num_nextn_predict_layers if with_draft else 0
    needed = config.sliding_window + 2 * rows_per_decode
    return CacheLayout(
        page_size=block_size,
        owners=tuple(Owner(i, config.compress_ratios[i]) for i in config.kv_source_layer_ids),
        head_dim=config.head_dim,
        index_head_dim=config.index_head_dim,
        window=config.sliding_window,
        ring=-(-needed // 32) * 32,
        window_layers=config.num_hidden_layers + drafts,
        window_record=window_record,
        kv_record=kv_record,
        index_record=index_record,
    )
