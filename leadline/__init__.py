"""Leadline serves DeepSeek V4 and V4.1 to agents."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from leadline.core.version import __version__

# OpenMP threads that spin while they wait slow down whatever shares their cores, other threads of
# this program first of all. Torch's OpenMP reads this when it is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

if TYPE_CHECKING:
    from leadline.core.request import SamplingParams
    from leadline.llm import LLM

__all__ = ["LLM", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    # Lazy, so that importing the package touches neither torch nor a GPU.
    if name == "LLM":
        from leadline.llm import LLM

        return LLM
    if name == "SamplingParams":
        from leadline.core.request import SamplingParams

        return SamplingParams
    raise AttributeError(f"module 'leadline' has no attribute {name!r}")
