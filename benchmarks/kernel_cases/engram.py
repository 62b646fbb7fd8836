"""Engram (kernels.md 12): hash, gather and injection at V4.1-Flash's sizes."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
from torch import Tensor

from benchmarks.kernel_cases.case import Case, Rate, same, within
from leadline.config.presets import V41_FLASH
from leadline.kernels.reference import engram as reference
from leadline.kernels.triton import engram
from leadline.models.deepseek_v41.engram import EngramHash

STREAMS, WIDTH, COLUMNS, ROW, EPS = 4, 5120, 24, 256, 1e-20
TABLE_ROWS = 2**21  # 554 MB; the official ones have 384 million


@functools.cache
def _constants() -> EngramHash:
    return EngramHash(dataclasses.replace(V41_FLASH, image_token_id=-7), None, torch.device("cpu"))


def _make_hash(tokens: int, device: torch.device) -> tuple[Tensor, ...]:
    constants = _constants()
    history = torch.randint(0, V41_FLASH.engram_compressed_vocab_size, (tokens, 4), device=device)
    tables = (constants.multipliers, constants.primes, constants.offsets)
    return history, *(table.to(device) for table in tables)


def _make_history(tokens: int, device: torch.device) -> tuple[Any, ...]:
    """A chunk of one request, or one row of each."""
    groups = tokens if tokens <= 64 else 1
    ids = torch.randint(0, V41_FLASH.vocab_size, (tokens,), dtype=torch.int32, device=device)
    hist = torch.randint(-1, V41_FLASH.vocab_size, (groups, 3), dtype=torch.int32, device=device)
    q_off = torch.arange(groups + 1, device=device) * (tokens // groups)
    req_of_row = torch.arange(tokens, device=device) // (tokens // groups)
    return ids, hist, req_of_row, q_off, _constants().token_map.to(device)


def _make_gather(tokens: int, place: str, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    repeats = TABLE_ROWS // 2**14
    codes = torch.randint(0, 0x7F, (2**14, ROW), dtype=torch.uint8).repeat(repeats, 1)
    scales = torch.randint(110, 130, (2**14, ROW // 32), dtype=torch.uint8).repeat(repeats, 1)
    rows = torch.randint(0, TABLE_ROWS, (tokens, COLUMNS), device=device)
    if place == "device":
        return codes.to(device), scales.to(device), rows
    if device.type == "cuda":
        codes, scales = codes.pin_memory(), scales.pin_memory()
    return codes, scales, rows


def _make_inject(tokens: int, device: torch.device) -> tuple[Any, ...]:
    streams = torch.randn(tokens, STREAMS, WIDTH, device=device, dtype=torch.bfloat16)
    kv = torch.randn(tokens, (STREAMS + 1) * WIDTH, device=device, dtype=torch.bfloat16)
    weights = torch.rand(2, STREAMS, WIDTH, device=device) + 0.5
    live = torch.rand(tokens, device=device) < 0.9
    return streams, kv, *weights, live


_PEERS = {1: 3.07, 8: 4.62, 64: 15.8, 4096: 1820.0}  # kernels.md 18.9

_NO_IMAGES: dict[str, Any] = {"pad": 2, "image_token_id": -7}

CASES = [
    *(
        Case(
            kernel="12a",
            op="engram_history",
            shape=f"T={tokens}",
            make=functools.partial(_make_history, tokens),
            fused=functools.partial(engram.engram_history, **_NO_IMAGES),
            twin=functools.partial(reference.engram_history, **_NO_IMAGES),
            unfused=functools.partial(reference.engram_history, **_NO_IMAGES),
            check=same,
            bytes=tokens * (4 + 4 * 8 + 4 * 8 + 1),
        )
        for tokens in (1, 64, 8192)
    ),
    *(
        Case(
            kernel="12a",
            op="engram_hash",
            shape=f"T={tokens}",
            make=functools.partial(_make_hash, tokens),
            fused=engram.engram_hash,
            twin=reference.engram_hash,
            unfused=reference.engram_hash,
            check=same,
            bytes=tokens * (4 * 8 + 2 * COLUMNS * 8),
        )
        for tokens in (1, 64, 8192)
    ),
    *(
        Case(
            kernel="12b",
            op="gather_rows",
            shape=f"{place},T={tokens}",
            make=functools.partial(_make_gather, tokens, place),
            fused=engram.gather_rows,
            twin=reference.gather_rows,
            unfused=reference.gather_rows if place == "device" else None,
            check=same,
            bytes=tokens * COLUMNS * (ROW + ROW // 32 + 2 * ROW),
            peers={"gather": _PEERS[tokens]} if place == "host" else {},
            target_us=_PEERS[tokens] if place == "host" else None,
            target_share=0.6 if (place, tokens) == ("device", 8192) else None,
        )
        for place, sizes in (("device", (1, 64, 8192)), ("host", tuple(_PEERS)))
        for tokens in sizes
    ),
    *(
        Case(
            kernel="12d",
            op="engram_inject",
            shape=f"T={tokens}",
            make=functools.partial(_make_inject, tokens),
            fused=functools.partial(engram.engram_inject, eps=EPS),
            twin=functools.partial(reference.engram_inject, eps=EPS),
            unfused=functools.partial(reference.engram_inject, eps=EPS),
            check=within(2e-3),
            bytes=tokens * 2 * (STREAMS + STREAMS + 1 + STREAMS) * WIDTH,
            flops=60 * tokens * WIDTH,
            rate=Rate.FP32,
            target_us=5.0 if tokens <= 32 else None,
            target_share=0.75 if tokens >= 1024 else None,
        )
        for tokens in (1, 32, 8192)
    ),
]
