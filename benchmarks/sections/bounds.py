"""What no step of this machine can be faster than, in microseconds; None where it is not known."""

from __future__ import annotations

from typing import TypeGuard

import torch

from leadline.config.families import AnyConfig
from leadline.config.model import ModelConfig
from leadline.profile.roofline import H200_MEASURED, decode_bound, prefill_bound


def decode_us(model: AnyConfig, *, batch: int, context: int) -> float | None:
    """Of a step of ``batch`` requests with ``context`` tokens each."""
    if not _is_known(model):
        return None
    return sum(decode_bound(model, H200_MEASURED, batch=batch, context=context).values())


def prefill_us(model: AnyConfig, *, prompt: int, replay: bool) -> float | None:
    """Of one prompt; products with FP4 and FP8 weights at the rate of bf16."""
    if not _is_known(model):
        return None
    upper_rows = model.sliding_window if replay else None
    return sum(prefill_bound(model, H200_MEASURED, prompt=prompt, upper_rows=upper_rows).values())


def _is_known(model: AnyConfig) -> TypeGuard[ModelConfig]:
    """Formulas are V4.1's, rates those of one kind of GPU."""
    is_measured = torch.cuda.is_available() and "H200" in torch.cuda.get_device_name()
    return is_measured and isinstance(model, ModelConfig)
