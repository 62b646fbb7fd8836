"""The cache's tensors: pages, window rings and open groups, as fields that kernels address."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from leadline.cache.layout import CacheLayout, OpenGroup
from leadline.kernels.packed import RecordField
from leadline.kernels.records import Record

_PLAIN = {Record.BFLOAT16: torch.bfloat16, Record.FLOAT32: torch.float32}


class CachePool:
    """Memory of all pages and slots of one engine.

    Attributes:
        kv: KV source layer -> compressed entries, ``[page, entry]``.
        index: layer with index keys -> these, ``[page, entry]``.
        window: per layer, ``[slot, position % ring]``; behind the slots there is room for the rows
            of one step, which a chunk that its ring cannot hold is read from.
        ring: rows of a slot of ``window``.
        staging: slots of ``window``: where the room behind them begins.
        open_groups: gated KV source layer -> ``[slot, position % rows, 2 d]`` wide rows, values
            and gate logits of tokens whose group is not closed yet.
        open_index_groups: the same of index keys that have a compressor of their own (V4).
    """

    def __init__(
        self,
        layout: CacheLayout,
        *,
        num_pages: int,
        num_slots: int,
        step_rows: int,
        num_snapshots: int = 0,
        wide: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        """Allocate ``num_pages`` and ``num_slots``, the null page and the padding slot included.

        Args:
            layout: of every tensor.
            num_pages: of each field of pages.
            num_slots: of each field of slots.
            step_rows: the most rows of a step.
            num_snapshots: of the slots the last, which only ever hold what ``copy_slots`` copies.
            wide: dtype of open groups.
            device: of all tensors.
        """
        self.layout = layout
        self.num_pages, self.num_slots = num_pages, num_slots
        self.ring, self.staging = layout.ring, num_slots
        d, di, rotary = layout.head_dim, layout.index_head_dim, layout.rotary_dim
        self.kv: dict[int, RecordField] = {}
        self.index: dict[int, RecordField] = {}
        self.open_groups: dict[int, Tensor] = {}
        self.open_index_groups: dict[int, Tensor] = {}

        self._lasting: list[Tensor] = []

        def open_rows(group: OpenGroup) -> Tensor:
            slots = num_slots if group.overlaps else num_slots - num_snapshots
            rows = torch.zeros(slots, group.rows, group.width, dtype=wide, device=device)
            if group.overlaps:
                self._lasting.append(rows)
            return rows

        for owner in layout.owners:
            rows = layout.entries_per_page(owner)
            self.kv[owner.layer] = make_field(layout.kv_record, num_pages, rows, d, device, rotary)
            if owner.has_index:
                keys = make_field(layout.index_record, num_pages, rows, di, device)
                self.index[owner.layer] = keys
            if owner.open_kv is not None:
                self.open_groups[owner.layer] = open_rows(owner.open_kv)
            if owner.open_index is not None:
                self.open_index_groups[owner.layer] = open_rows(owner.open_index)
        self.window = [
            make_field(
                layout.window_record,
                num_slots + layout.staging_units(step_rows),
                layout.ring,
                d,
                device,
                rotary,
            )
            for _ in range(layout.window_layers)
        ]
        for window in self.window:
            self._lasting += [t for t in (window.values, window.scales) if t is not None]

    def copy_slots(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy what slots hold at the border of a page, ``(from, to)`` each.

        A snapshot is taken and restored by this, since a ring holds its rows by position: windows
        of every layer, and open rows that entries behind the border pool (1.5).
        """
        if not pairs:
            return
        for tensor in self._lasting:
            for source, target in pairs:
                tensor[target].copy_(tensor[source])

    @property
    def num_bytes(self) -> int:
        """Bytes of every tensor: of pages, slots and the staged rows of a step (invariant 7)."""
        fields = [*self.kv.values(), *self.index.values(), *self.window]
        tensors = [t for f in fields for t in (f.values, f.scales) if t is not None]
        tensors += [*self.open_groups.values(), *self.open_index_groups.values()]
        return sum(t.numel() * t.element_size() for t in tensors)


def make_field(
    record: Record,
    outer: int,
    inner: int,
    channels: int,
    device: torch.device | str,
    rotary: int = 0,
) -> RecordField:
    """A zeroed field of rows of ``channels``, of which the last ``rotary`` are rotated."""
    if record in _PLAIN:
        shape = (outer, inner, channels)
        return RecordField(record, torch.zeros(shape, dtype=_PLAIN[record], device=device), None)
    value, scale = record.value_bytes(channels, rotary), record.scale_bytes(channels, rotary)
    if record.scales_last:
        data = torch.zeros(outer, inner * (value + scale), dtype=torch.uint8, device=device)
        values, scales = data.split((inner * value, inner * scale), dim=1)
        return RecordField(
            record,
            values.unflatten(1, (inner, value)),
            scales.unflatten(1, (inner, scale)),
            rotary if record is Record.FP8_64 else 0,
        )
    data = torch.zeros(outer, inner, value + scale, dtype=torch.uint8, device=device)
    return RecordField(record, *data.split((value, scale), dim=2))
