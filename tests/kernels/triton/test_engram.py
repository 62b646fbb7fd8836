"""Engram's hash, gather and injection against their definitions."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from leadline.config.presets import V41_FLASH
from leadline.kernels.reference import engram as reference
from leadline.kernels.reference import quant
from leadline.kernels.triton import engram
from leadline.models.deepseek_v41.engram import EngramHash
from leadline.weights.host_memory import HostMemory
from tests.kernels.bounds import few_differ

EPS = 1e-20
BF16 = torch.bfloat16


@pytest.mark.parametrize("rows", [0, 1, 9, 130])
def test_hash_with_the_official_constants(device: torch.device, rows: int) -> None:
    """Primes from 16,000,000 and the multipliers of both layers; the largest products as well."""
    config = dataclasses.replace(V41_FLASH, image_token_id=-7)
    constants = EngramHash(config, None, device)
    classes = V41_FLASH.engram_compressed_vocab_size
    history = torch.randint(0, classes, (rows, 4), device=device)
    history[:1] = classes - 1
    history[1:2] = 0
    tables = (constants.multipliers, constants.primes, constants.offsets)
    actual = engram.engram_hash(history, *tables)
    assert actual.dtype == torch.int64
    assert torch.equal(actual, reference.engram_hash(history, *tables))


@pytest.mark.parametrize("rows", [0, 1, 9, 130])
def test_history_of_requests_images_and_padding(device: torch.device, rows: int) -> None:
    """Groups of any length, histories in part, ids without a class, and rows of no request."""
    sizes = [rows // 3, 0, rows - rows // 3]
    q_off = torch.tensor([0, *sizes]).cumsum(0).to(device)
    req_of_row = torch.repeat_interleave(torch.arange(3), torch.tensor(sizes)).to(device)
    req_of_row[-2:] = -1
    ids = torch.randint(0, 40, (rows,), dtype=torch.int32, device=device)
    hist = torch.randint(-1, 40, (3, 3), dtype=torch.int32, device=device)
    token_map = torch.randint(-1, 20, (40,), device=device)
    arguments = (ids, hist, req_of_row, q_off, token_map)
    history, live = engram.engram_history(*arguments, pad=5, image_token_id=7)
    wanted = reference.engram_history(*arguments, pad=5, image_token_id=7)
    assert torch.equal(history, wanted[0])
    assert torch.equal(live, wanted[1])


def make_table(device: torch.device, rows: int, width: int = 64) -> tuple[Tensor, Tensor]:
    """A packed table of every finite code and scales from subnormal to large."""
    codes = torch.randint(0, 256, (rows, width), dtype=torch.uint8)
    codes[codes & 0x7F == 0x7F] = 0x7E
    scales = torch.randint(0, 254 - 8, (rows, width // 32), dtype=torch.uint8)
    return codes.to(device), scales.to(device)


def same_bits(actual: Tensor, wanted: Tensor) -> bool:
    return torch.equal(actual.view(torch.int16), wanted.view(torch.int16))


@pytest.mark.parametrize("shape", [(0,), (1,), (3, 24), (41, 2)])
def test_gather_is_exact(device: torch.device, shape: tuple[int, ...]) -> None:
    codes, scales = make_table(device, 50)
    rows = torch.randint(-1, 50, shape, device=device)
    actual = engram.gather_rows(codes, scales, rows)
    assert same_bits(actual, reference.gather_rows(codes, scales, rows))


@pytest.mark.parametrize("is_sorted", [False, True], ids=["as_they_come", "sorted"])
@pytest.mark.parametrize("max_programs", [1, 3, None])
def test_any_order_and_number_of_programs_is_exact(
    device: torch.device, is_sorted: bool, max_programs: int | None
) -> None:
    codes, scales = make_table(device, 50)
    rows = torch.randint(-1, 50, (7, 5), device=device)
    actual = engram.gather(codes, scales, rows, is_sorted=is_sorted, max_programs=max_programs)
    assert same_bits(actual, reference.gather_rows(codes, scales, rows))


def test_rows_may_lie_apart(device: torch.device) -> None:
    """Codes and scales of a row side by side, as in one record."""
    records = torch.cat(make_table(device, 50), dim=1)
    codes, scales = records.split([64, 2], dim=1)
    rows = torch.randint(-1, 50, (7, 5), device=device)
    actual = engram.gather(codes, scales, rows)
    assert same_bits(actual, reference.gather_rows(codes, scales, rows))


@pytest.mark.gpu
@pytest.mark.parametrize("huge_pages", [False, True], ids=["small_pages", "huge_pages"])
@pytest.mark.parametrize("count", [5, 20_000])
def test_registered_host_memory_is_read_in_place(huge_pages: bool, count: int) -> None:
    memory = HostMemory(2**17 * 66, huge_pages=huge_pages)
    memory.fill([part.numpy() for part in make_table(torch.device("cpu"), 2**17)], "table")
    memory.register()
    codes, scales = torch.from_numpy(memory.bytes).view(-1, 66).split([64, 2], dim=1)
    rows = torch.randint(-1, 2**17, (count,), device="cuda")
    actual = engram.gather_rows(codes, scales, rows)
    assert same_bits(actual, reference.gather_rows(codes, scales, rows))


def test_gather_reaches_beyond_two_gigabytes(device: torch.device) -> None:
    """A row whose byte offset needs more than 31 bits, in a table that is never filled."""
    if device.type == "cuda":
        codes = torch.empty(2**23 + 1, 512, dtype=torch.uint8, device=device)
        scales = torch.full((2**23 + 1, 16), 127, dtype=torch.uint8, device=device)
    else:  # two rows, 2 ** 32 bytes apart in an address space that is only reserved
        codes = torch.empty(2**23 + 1, 512, dtype=torch.uint8)
        scales = torch.empty(2**23 + 1, 16, dtype=torch.uint8)
        scales[-1] = 127
    codes[-1] = quant.encode_e4m3(torch.arange(512.0).remainder(16)).to(device)
    actual = engram.gather_rows(codes, scales, torch.tensor([2**23], device=device))
    assert torch.equal(actual[0].cpu().float(), torch.arange(512.0).remainder(16))


def make_rows(device: torch.device, rows: int, width: int) -> tuple[Tensor, ...]:
    streams = torch.randn(rows, 4, width, device=device, dtype=BF16)
    kv = torch.randn(rows, 5 * width, device=device, dtype=BF16)
    q_weight, k_weight = torch.rand(2, 4, width, device=device) + 0.5
    return streams, kv, q_weight, k_weight, torch.rand(rows, device=device) < 0.7


@pytest.mark.parametrize(("rows", "width"), [(0, 64), (1, 96), (5, 64)])
def test_inject(device: torch.device, rows: int, width: int) -> None:
    arguments = make_rows(device, rows, width)
    actual = engram.engram_inject(*arguments, eps=EPS)
    wanted = reference.engram_inject(*arguments, eps=EPS)
    torch.testing.assert_close(actual, wanted, rtol=2**-7, atol=1e-3)
    assert few_differ(actual, wanted)


def test_inject_in_chunks_of_several_tokens(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engram, "_FEW_TOKENS", 1)
    arguments = make_rows(device, 5, 1100)
    actual = engram.engram_inject(*arguments, eps=EPS)
    wanted = reference.engram_inject(*arguments, eps=EPS)
    torch.testing.assert_close(actual, wanted, rtol=2**-7, atol=1e-3)


def test_streams_of_one_embedding(device: torch.device) -> None:
    """The first layer's streams are one row seen four times."""
    streams, *rest = make_rows(device, 3, 64)
    expanded = streams[:, :1].expand(-1, 4, -1)
    actual = engram.engram_inject(expanded, *rest, eps=EPS)
    assert torch.equal(actual, engram.engram_inject(expanded.contiguous(), *rest, eps=EPS))


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # NumPy's, of the NaN row
def test_rows_that_are_not_live_stay_bit_for_bit(device: torch.device) -> None:
    """Whatever their keys and values hold; their neighbours do not see it."""
    streams, kv, q_weight, k_weight, live = make_rows(device, 4, 64)
    live[:] = torch.tensor([False, True, False, True])
    streams[0, :, :2] = torch.tensor([-0.0, 0.0])
    alone = engram.engram_inject(streams[1:2], kv[1:2], q_weight, k_weight, live[1:2], eps=EPS)
    kv[0], kv[2] = torch.nan, torch.inf
    actual = engram.engram_inject(streams, kv, q_weight, k_weight, live, eps=EPS)
    dead = ~live
    assert torch.equal(actual[dead].view(torch.int16), streams[dead].view(torch.int16))
    assert torch.equal(actual[1], alone[0])


@pytest.mark.parametrize("dot", [0.0, 1e-7, -1e-7, 1e-3, -1.0, 1e4, -1e4])
def test_gates_at_the_clamp_and_far_from_it(device: torch.device, dot: float) -> None:
    """``dot`` is that of the normalised rows; weights carry it beyond what a cosine reaches."""
    hidden = torch.ones(1, 4, 64, device=device, dtype=BF16)
    kv = torch.ones(1, 5 * 64, device=device, dtype=BF16)
    weight = torch.full((4, 64), dot / 8, device=device)
    live = torch.ones(1, dtype=torch.bool, device=device)
    arguments = (hidden, kv, weight, torch.ones_like(weight), live)
    actual = engram.engram_inject(*arguments, eps=EPS)
    wanted = reference.engram_inject(*arguments, eps=EPS)
    torch.testing.assert_close(actual, wanted, rtol=2**-8, atol=0)


def test_zero_rows_are_finite(device: torch.device) -> None:
    arguments = make_rows(device, 2, 64)
    arguments[0][0], arguments[1][1] = 0, 0
    assert engram.engram_inject(*arguments, eps=EPS).isfinite().all()
