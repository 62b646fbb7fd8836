"""What no step of this machine can be faster than, in microseconds; None where it is not known."""

from __future__ import annotations

import torch

from leadline.config.model import ModelConfig
from leadline.profile.roofline import H200_MEASURED, decode_bound, prefill_bound


def is_known() -> bool:
    """Rates are those of one kind of GPU."""
    return torch.cuda.is_available() and "H200" in torch.cuda.get_device_name()


def decode_us(model: ModelConfig, *, batch: int, context: int) -> float | None:
    """Of a step of ``batch`` requests with ``context`` tokens each."""
    if not is_known():
        return None
    return sum(decode_bound(model, H200_MEASURED, batch=batch, context=context).values())


def prefill_us(model: ModelConfig, *, prompt: int, replay: bool) -> float | None:
    """Of one prompt; products with FP4 and FP8 weights at the rate of bf16."""
    if not is_known():
        return None
    return sum(prefill_bound(model, H200_MEASURED, prompt=prompt, replay=replay).values())
