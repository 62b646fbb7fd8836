"""Bounded replay by its definition: one forward over ``[s, ...)`` with an explicit mask (3.1)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from leadline.models.common.rows import Rows, WindowPlan, plan_window
from leadline.models.deepseek_v41 import model as model_module
from leadline.models.deepseek_v41.model import DeepseekV41
from tests.replay.harness import PAGE, stepper_of


def masked_window(
    rows: Rows, floor: Tensor, stored: Tensor, *, window: int, **geometry: Any
) -> WindowPlan:
    """``plan_window`` for steps that hold every visible row: what is read is a mask ``[r, r]``."""
    plan = plan_window(rows, floor, stored, window=window, **geometry)
    query, key = rows.pos.unsqueeze(1), rows.pos.unsqueeze(0)
    group = rows.req_of_row
    mask = (key <= query) & (key > query - window) & (key >= floor[group].unsqueeze(1))
    mask &= group.unsqueeze(1) == group.unsqueeze(0)
    address = plan.outer * geometry["cache"].ring + plan.inner
    index = torch.full((len(rows.pos), window), -1)
    for row, visible in enumerate(mask):
        keys = address[visible]
        index[row, : len(keys)] = keys
    return dataclasses.replace(plan, index=index)


def replay_logprobs(
    model: DeepseekV41,
    tokens: Sequence[int],
    *,
    hit: int,
    prefill_end: int,
    upper: bool = True,
) -> Tensor:
    """Log-probabilities ``[n, V]`` behind the tokens from ``prefill_end - 1`` on.

    The global KV of ``[0, hit)`` is that of a cold run; everything else is computed in one step,
    all of it in both halves, with windows cut by a mask: at s, and with ``upper`` at U above.
    """
    window = model.config.sliding_window
    stepper = stepper_of(model)
    start = max(0, hit - window)
    warm = stepper.start(list(tokens))
    if hit:
        cold = stepper.start(list(tokens[:hit]))
        stepper.step([(cold, hit)])
        warm.pages[: hit // PAGE] = cold.pages[: hit // PAGE]
    warm.fed = warm.floor_lo = start
    warm.floor_up = max(start, prefill_end - window) if upper else start
    warm.write_from = hit
    with patch.object(model_module, "plan_window", masked_window):
        [logits] = stepper.step([(warm, len(tokens) - start)])
    return logits[prefill_end - 1 - start :].double().log_softmax(-1)
