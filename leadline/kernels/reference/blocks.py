"""How many rows run at once where every row needs a large temporary."""

from __future__ import annotations

import torch

# Elements of the largest temporary: 4 MiB of float32 stay in a CPU's cache, a GPU wants few
# launches.
_ELEMENTS = {"cpu": 2**20, "cuda": 2**24}
_SCORES = 2**28  # of index queries, that exist at once


def rows_per_block(row_elements: int, device: torch.device) -> int:
    """Rows of a block whose temporary has ``row_elements`` elements a row; at least one."""
    return max(1, _ELEMENTS[device.type] // row_elements)


def rows_of_scores(num_entries: int) -> int:
    """Rows that are scored at once: a long chunk of a long prompt is selected from in parts."""
    return max(1, _SCORES // num_entries)


def host_may_wait(device: torch.device) -> bool:
    """Whether what tensors hold may decide how much is computed: on a GPU steps never wait."""
    return device.type == "cpu"
