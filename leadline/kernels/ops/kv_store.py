"""Cache rows: packed into records, stored, and unpacked again."""

from __future__ import annotations

from leadline.kernels.reference import kv_store
from leadline.kernels.registry import op

pack_rows = op(watched=False)(kv_store.pack_rows)
unpack_rows = op(watched=False)(kv_store.unpack_rows)
store_rows = op(watched=False)(kv_store.store_rows)
