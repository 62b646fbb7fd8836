"""Leadline serves DeepSeek V4 and V4.1 to agents."""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

from leadline.core.version import __version__

# OpenMP threads that spin while they wait slow down whatever shares their cores, other threads of
# this program first of all. Torch's OpenMP reads this when it is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

if TYPE_CHECKING:
    from leadline.async_llm import AsyncLLM
    from leadline.core.request import SamplingParams, StructuredOutputs
    from leadline.core.request import StructuredOutputs as StructuredOutputsParams
    from leadline.llm import LLM
    from leadline.offline.outputs import CompletionOutput, RequestOutput

__all__ = [
    "LLM",
    "AsyncLLM",
    "CompletionOutput",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputs",
    "StructuredOutputsParams",
    "__version__",
]

# name -> module and name there
_HOMES = {
    "LLM": ("leadline.llm", "LLM"),
    "AsyncLLM": ("leadline.async_llm", "AsyncLLM"),
    "CompletionOutput": ("leadline.offline.outputs", "CompletionOutput"),
    "RequestOutput": ("leadline.offline.outputs", "RequestOutput"),
    "SamplingParams": ("leadline.core.request", "SamplingParams"),
    "StructuredOutputs": ("leadline.core.request", "StructuredOutputs"),
    "StructuredOutputsParams": ("leadline.core.request", "StructuredOutputs"),  # vLLM's name
}


def __getattr__(name: str) -> Any:
    # Lazy, so that importing the package touches neither torch nor a GPU.
    if name not in _HOMES:
        raise AttributeError(f"module 'leadline' has no attribute {name!r}")
    module, attribute = _HOMES[name]
    return getattr(importlib.import_module(module), attribute)
