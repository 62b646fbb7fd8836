"""Sampling (kernels.md 14) at V4.1-Flash's vocabulary."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.kernel_cases.case import Case, Rate, same, within
from leadline.kernels.reference import sampling as reference
from leadline.kernels.triton import logprobs, sampling

VOCAB = 129280
CUTS: dict[str, tuple[float, int, float]] = {  # min_p, top_k, top_p
    "none": (0.0, 0, 1.0),
    "k=50": (0.0, 50, 1.0),
    "k=50,p=0.95": (0.0, 50, 0.95),
    "p=0.95": (0.0, 0, 0.95),
    "min_p=0.05": (0.05, 0, 1.0),
}
_PEERS = {  # kernels.md 18.9
    "greedy": {"torch argmax": (26.7, 27.3, 39.2)},
    "none": {"torch softmax, exponential, argmax": (65.6, 73.8, 137.0)},
    "k=50": {"vLLM top-k mask": (84.1, 89.7, 105.0)},
    "k=50,p=0.95": {"vLLM top-k, top-p mask": (92.2, 98.3, 119.0)},
    "p=0.95": {"vLLM top-p mask": (64.2, 95.4, 541.0), "torch sort": (104.0, 359.0, 1091.0)},
}
ROWS = (1, 8, 64)
SAID = 4000  # different ids of a long context


def _peaked(rows: int, device: torch.device) -> Tensor:
    """Logits as of a language model: weights fall as the 1.5th power of the rank."""
    rank = torch.rand(rows, VOCAB, device=device).argsort(-1) + 1.0
    return 25 - 1.5 * rank.log() + 0.1 * torch.randn(rows, VOCAB, device=device)


def _flat(rows: int, device: torch.device) -> Tensor:
    """Normal logits: nine in ten ids are needed for a mass of 0.95."""
    return torch.randn(rows, VOCAB, device=device)


def _make_greedy(rows: int, device: torch.device) -> tuple[Tensor]:
    return (_peaked(rows, device),)


def _make_sample(rows: int, shape: str, cut: str, device: torch.device) -> tuple[Tensor, ...]:
    logits = _flat(rows, device) if shape == "flat" else _peaked(rows, device)
    wide = functools.partial(torch.full, (rows,), dtype=torch.float64, device=device)
    min_p, top_k, top_p = CUTS[cut]
    k = torch.full((rows,), top_k, device=device)
    uniform = torch.rand(rows, dtype=torch.float64, device=device)
    return logits, wide(1.0), wide(min_p), k, wide(top_p), uniform


def _sample(implementation: Callable[..., Tensor], logits: Tensor, *parameters: Tensor) -> Tensor:
    names = ("temperature_R", "min_p_R", "top_k_R", "top_p_R", "uniform_R")
    return implementation(logits, **dict(zip(names, parameters, strict=True)))


def _make_bitmask(rows: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    size = (rows, VOCAB // 32)
    words = torch.randint(-(2**31), 2**31, size, dtype=torch.int32, device=device)
    return _peaked(rows, device), torch.arange(rows, device=device), words


def _mask(implementation: Callable[..., None], logits: Tensor, *masks: Tensor) -> Tensor:
    implementation(logits, *masks)
    return logits


def _make_penalties(rows: int, device: torch.device) -> tuple[Tensor, ...]:
    said = torch.rand(rows, VOCAB, device=device).topk(SAID).indices.flatten()
    row = torch.arange(rows, device=device).repeat_interleave(SAID)
    count = torch.randint(-50, 4, row.shape, device=device).clamp(min=0)
    columns = torch.rand(3, rows, device=device) + 0.5
    return _peaked(rows, device), row, said, count, *columns


def _penalise(implementation: Callable[..., None], logits: Tensor, *rest: Tensor) -> Tensor:
    *said, presence, frequency, repetition = rest
    implementation(
        logits, *said, presence_R=presence, frequency_R=frequency, repetition_R=repetition
    )
    return logits


def _make_logprobs(rows: int, device: torch.device) -> tuple[Tensor, Tensor]:
    return _peaked(rows, device), torch.randint(VOCAB, (rows,), device=device)


def _logprobs_by_torch(logits: Tensor, tokens: Tensor, *, count: int) -> tuple[Tensor, ...]:
    """What engines without a kernel launch; of equal values any."""
    values = logits.log_softmax(-1)
    chosen = values.gather(-1, tokens[:, None])
    return chosen, (values >= chosen).sum(-1), *values.topk(count)


def _check_logprobs(actual: tuple[Tensor, ...], wanted: tuple[Tensor, ...]) -> float:
    same(actual[1::2], wanted[1::2])
    return within(2e-6)(actual[::2], wanted[::2])


def _peers(cut: str, index: int) -> dict[str, float]:
    return {name: times[index] for name, times in _PEERS.get(cut, {}).items()}


CASES = [
    *(
        Case(
            kernel="14",
            op="greedy",
            shape=f"R={rows}",
            make=functools.partial(_make_greedy, rows),
            fused=sampling.greedy,
            twin=reference.greedy,
            unfused=reference.greedy,
            check=same,
            bytes=rows * VOCAB * 4,
            rate=Rate.FP32,
            peers=_peers("greedy", index),
            target_us=12.0 if rows <= 8 else None,
            target_share=0.6 if rows >= 64 else None,
        )
        for index, rows in enumerate(ROWS)
    ),
    *(
        Case(
            kernel="14",
            op="sample",
            shape=f"{shape},{cut},R={rows}",
            make=functools.partial(_make_sample, rows, shape, cut),
            fused=functools.partial(_sample, sampling.sample),
            twin=functools.partial(_sample, reference.sample),
            check=same,
            bytes=rows * VOCAB * 4,
            rate=Rate.FP32,
            peers=_peers(cut, index),
            target_us=12.0 if rows <= 8 else None,
            target_share=0.6 if rows >= 64 else None,
        )
        for shape, cuts in (("peaked", tuple(CUTS)), ("flat", ("none", "p=0.95")))
        for cut in cuts
        for index, rows in enumerate(ROWS)
    ),
    *(
        Case(
            kernel="14",
            op="logprobs",
            shape=f"n={count},R={rows}",
            make=functools.partial(_make_logprobs, rows),
            fused=functools.partial(logprobs.logprobs, count=count),
            twin=functools.partial(reference.logprobs, count=count),
            unfused=functools.partial(_logprobs_by_torch, count=count),
            check=_check_logprobs,
            bytes=rows * VOCAB * 4,
            rate=Rate.FP32,
            target_us=12.0 if rows <= 8 else None,
            target_share=0.6 if rows >= 64 else None,
        )
        for count in (0, 5, 20)
        for rows in ROWS
    ),
    *(
        Case(
            kernel="14",
            op="apply_bitmask",
            shape=f"R={rows}",
            make=functools.partial(_make_bitmask, rows),
            fused=functools.partial(_mask, sampling.apply_bitmask),
            twin=functools.partial(_mask, reference.apply_bitmask),
            unfused=functools.partial(_mask, reference.apply_bitmask),
            check=same,
            bytes=rows * VOCAB * (4 + 1 / 8),
            rate=Rate.FP32,
        )
        for rows in ROWS
    ),
    *(
        Case(
            kernel="14",
            op="apply_penalties",
            shape=f"R={rows}",
            make=functools.partial(_make_penalties, rows),
            fused=functools.partial(_penalise, sampling.apply_penalties),
            twin=functools.partial(_penalise, reference.apply_penalties),
            unfused=functools.partial(_penalise, reference.apply_penalties),
            check=same,
            bytes=rows * SAID * (3 * 8 + 2 * 4),
            rate=Rate.FP32,
        )
        for rows in ROWS
    ),
]
