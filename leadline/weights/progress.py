"""The bar that loading shows."""

from __future__ import annotations

from typing import Any


def progress_bar(total: int, description: str) -> Any:
    """A bar in bytes that shows on a terminal only; None where ``tqdm`` is not installed."""
    try:
        from tqdm import tqdm
    except ImportError:
        return None
    return tqdm(total=total, desc=description, unit="B", unit_scale=True, disable=None)
