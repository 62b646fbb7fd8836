"""What cache memory looks like: records, pages and slots, in integers only.

A page holds 256 token positions (``--block-size``) of everything that lasts; a slot holds what one
running request needs and nobody else (cache-and-scheduling 1.3). Packed bytes are the only storage.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from leadline.config.families import AnyConfig
from leadline.config.model import ModelConfig
from leadline.config.v4 import V4Config, V4LayerMode
from leadline.core.errors import ConfigError
from leadline.kernels.records import Record

logger = logging.getLogger(__name__)

Records = tuple[Record, Record, Record]

_PLAIN: dict[str, Records] = {
    "bfloat16": (Record.BFLOAT16, Record.BFLOAT16, Record.BFLOAT16),
    "float32": (Record.FLOAT32, Record.FLOAT32, Record.FLOAT32),
}
# --kv-cache-dtype -> (window, compressed, index key) records (design.md).
KV_CACHE_DTYPES: dict[str, Records] = {
    "nvfp4_ds_mla": (Record.FP8_32, Record.FP4_16, Record.FP4_32),
    "fp8": (Record.FP8_32, Record.FP8_32, Record.FP4_32),
    **_PLAIN,
}
# The same of V4, for which ``fp8`` is another name of the only packed ones.
V4_KV_CACHE_DTYPES: dict[str, Records] = {
    "fp8_ds_mla": (Record.FP8_64, Record.FP8_64, Record.FP4_32),
    **_PLAIN,
}


@dataclass(frozen=True, slots=True)
class OpenGroup:
    """A ring of rows whose group is not closed yet.

    Attributes:
        rows: position ``p`` lies in row ``p % rows``.
        width: float32 values of a row: a compressor's values and gate logits.
        overlaps: whether entries pool the group before theirs too, so that snapshots hold its rows:
            at the border of a page no group is open.
    """

    rows: int
    width: int
    overlaps: bool = False

    @property
    def num_bytes(self) -> int:
        return self.rows * self.width * 4


@dataclass(frozen=True, slots=True)
class Owner:
    """A layer that owns a compressed cache.

    Attributes:
        ratio: token positions of an entry.
        has_index: whether an index key lies beside each entry.
        open_kv: of the compressor that makes entries; None where single tokens are entries.
        open_index: of that which makes index keys; None where they are made of entries.
    """

    layer: int
    ratio: int
    has_index: bool = True
    open_kv: OpenGroup | None = None
    open_index: OpenGroup | None = None


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """Sizes of every cache tensor of one model.

    Attributes:
        page_size: token positions of a page.
        owners: layers with a compressed cache, ascending.
        head_dim: channels of a window or compressed row.
        index_head_dim: channels of an index key.
        window: tokens a query sees in its window, itself included.
        ring: rows of a window ring; position ``p`` lies in row ``p % ring``.
        window_layers: layers (draft stages included) that own a window ring.
        rotary_dim: of ``head_dim``, the last channels, which are rotated.
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
    rotary_dim: int = 0

    def entries_per_page(self, owner: Owner) -> int:
        """Compressed entries, and as many index keys, that a page holds for ``owner``."""
        return self.page_size // owner.ratio

    @property
    def page_bytes(self) -> int:
        """Bytes of one page over all owners: 227,840 for V4.1-Flash with ``auto`` records."""
        entry = self.kv_record.num_bytes(self.head_dim, self.rotary_dim)
        key = self.index_record.num_bytes(self.index_head_dim)
        return sum(
            self.entries_per_page(owner) * (entry + key * owner.has_index) for owner in self.owners
        )

    @property
    def bytes_per_token(self) -> float:
        """Page bytes per token position: 890 for V4.1-Flash with ``auto`` records."""
        return self.page_bytes / self.page_size

    @property
    def window_row_bytes(self) -> int:
        """Bytes of one row of a window ring."""
        return self.window_record.num_bytes(self.head_dim, self.rotary_dim)

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot: window rings and open groups."""
        return self._ring_bytes + sum(group.num_bytes for group in self._open_groups)

    @property
    def snapshot_bytes(self) -> int:
        """Bytes of what a slot holds that is still needed at the border of a page."""
        groups = (group for group in self._open_groups if group.overlaps)
        return self._ring_bytes + sum(group.num_bytes for group in groups)

    @property
    def _ring_bytes(self) -> int:
        return self.window_layers * self.ring * self.window_row_bytes

    @property
    def _open_groups(self) -> Iterator[OpenGroup]:
        groups = (group for owner in self.owners for group in (owner.open_kv, owner.open_index))
        return (group for group in groups if group is not None)

    def sequence_bytes(self, num_tokens: int) -> int:
        """Bytes of KV of a sequence as they are published: its pages, and a window of every layer.

        Without what rings have beyond the window, and without open groups.
        """
        windows = self.window_layers * self.window * self.window_row_bytes
        return -(-num_tokens // self.page_size) * self.page_bytes + windows

    def staging_units(self, step_rows: int) -> int:
        """Slots' worth of ring rows that hold the window rows of one step."""
        return -(-step_rows // self.ring)

    def staging_bytes(self, step_rows: int) -> int:
        """Bytes of these over all layers: 173 MB for 8192 rows of V4.1-Flash."""
        rows = self.window_layers * self.staging_units(step_rows) * self.ring
        return rows * self.window_row_bytes


def cache_layout(
    config: AnyConfig,
    *,
    kv_cache_dtype: str = "auto",
    block_size: int = 256,
    rows_per_decode: int = 6,
    with_draft: bool = False,
) -> CacheLayout:
    """The layout of a model.

    Args:
        config: the model.
        kv_cache_dtype: ``auto`` (the reference's formats, or bfloat16 where a V4's widths have
            none), ``bfloat16`` or ``float32``; V4.1: ``nvfp4_ds_mla`` or ``fp8`` (also by the name
            ``fp8_ds_mla``); V4: ``fp8_ds_mla`` (also by the name ``fp8``).
        block_size: token positions of a page.
        rows_per_decode: the most query rows of a decode group (1 + longest draft).
        with_draft: whether the draft stages own rings too.

    Raises:
        ConfigError: the record type is unknown, or does not fit the model, or a page does not hold
            whole entries.
    """
    if isinstance(config, V4Config):
        records, drafts = _v4_records(config, kv_cache_dtype), config.num_draft_stages
        owners = _v4_owners(config, rows_per_decode)
    else:
        records, drafts = _v41_records(kv_cache_dtype), config.num_nextn_predict_layers
        owners = _v41_owners(config, rows_per_decode)
    step = math.lcm(16, *(owner.ratio for owner in owners))
    if block_size < 1 or block_size % step:
        raise ConfigError(
            f"block_size is {block_size} tokens, but a page holds whole compressed entries and "
            f"this model's compress_ratios need a multiple of {step}; try {step} or 256"
        )
    window_record, kv_record, index_record = records
    return CacheLayout(
        page_size=block_size,
        owners=owners,
        head_dim=config.head_dim,
        index_head_dim=config.index_head_dim,
        window=config.sliding_window,
        ring=_round_up(config.sliding_window + 2 * rows_per_decode, 32),
        window_layers=config.num_hidden_layers + (drafts if with_draft else 0),
        window_record=window_record,
        kv_record=kv_record,
        index_record=index_record,
        rotary_dim=config.qk_rope_head_dim,
    )


def _v41_records(kv_cache_dtype: str) -> Records:
    name = "nvfp4_ds_mla" if kv_cache_dtype == "auto" else kv_cache_dtype
    if name == "fp8_ds_mla":
        logger.warning("kv_cache_dtype fp8_ds_mla means fp8 for V4.1: rows of 528 bytes, not 584")
        name = "fp8"
    return _choose(KV_CACHE_DTYPES, name, kv_cache_dtype)


def _v4_records(c: V4Config, kv_cache_dtype: str) -> Records:
    plain_channels = c.head_dim - c.qk_rope_head_dim
    fits = plain_channels > 0 and plain_channels % 64 == 0 and c.index_head_dim % 32 == 0
    name = {"auto": "fp8_ds_mla" if fits else "bfloat16", "fp8": "fp8_ds_mla"}.get(
        kv_cache_dtype, kv_cache_dtype
    )
    if name == "fp8_ds_mla" and not fits:
        raise ConfigError(
            f"kv_cache_dtype is {kv_cache_dtype!r}, whose scales cover 64 channels of a row and 32 "
            f"of an index key, but this model has {plain_channels} (head_dim - qk_rope_head_dim) "
            f"and {c.index_head_dim} (index_head_dim); choose bfloat16 or float32"
        )
    return _choose(V4_KV_CACHE_DTYPES, name, kv_cache_dtype)


def _choose(known: Mapping[str, Records], name: str, kv_cache_dtype: str) -> Records:
    if name not in known:
        raise ConfigError(
            f"kv_cache_dtype is {kv_cache_dtype!r}; choose one of {', '.join(['auto', *known])}"
        )
    return known[name]


def _v41_owners(c: ModelConfig, rows_per_decode: int) -> tuple[Owner, ...]:
    return tuple(
        Owner(layer, ratio, open_kv=_open_group(c.head_dim, ratio, rows_per_decode))
        for layer, ratio in ((i, c.compress_ratios[i]) for i in c.kv_source_layer_ids)
    )


def _v4_owners(c: V4Config, rows_per_decode: int) -> tuple[Owner, ...]:
    def owner(layer: int) -> Owner:
        ratio, sparse = c.compress_ratios[layer], c.mode(layer) is V4LayerMode.SPARSE

        def group(width: int) -> OpenGroup | None:
            return _open_group(width, ratio, rows_per_decode, overlaps=sparse)

        keys = group(c.index_head_dim) if sparse else None
        return Owner(layer, ratio, sparse, open_kv=group(c.head_dim), open_index=keys)

    return tuple(owner(i) for i in range(c.num_hidden_layers) if c.compress_ratios[i])


def _open_group(
    width: int, ratio: int, rows_per_decode: int, *, overlaps: bool = False
) -> OpenGroup | None:
    """Rows that an entry of ``width`` channels may still need (cache-and-scheduling 1.4).

    An entry that overlaps the one before pools two groups, with values and gates for either; a
    snapshot holds the last group, which a step after it must not have overwritten.
    """
    if ratio == 1:
        return None
    if not overlaps:
        return OpenGroup(_round_up(ratio - 1 + rows_per_decode, 8), 2 * width)
    rows = max(2 * ratio - 1 + rows_per_decode, ratio + 2 * rows_per_decode)
    return OpenGroup(_round_up(rows, 8), 2 * 2 * width, overlaps=True)


def _round_up(size: int, step: int) -> int:
    return -(-size // step) * step
