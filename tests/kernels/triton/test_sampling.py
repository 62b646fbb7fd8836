"""Sampling against its definition: the same token for the same uniform number."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")


from leadline.kernels.reference import sampling as reference
from leadline.kernels.triton import sampling

VOCAB = 1300  # three tiles, the last one partial


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "_TILE", 512)
    monkeypatch.setattr(sampling, "_LISTED", 32)


def parameters(rows: int, device: torch.device, **given: Any) -> dict[str, Tensor]:
    """Of every row the same, or a tensor; uniform numbers are random."""
    values: dict[str, Any] = {"temperature": 1.0, "min_p": 0.0, "top_k": 0, "top_p": 1.0}
    values["uniform"] = torch.rand(rows, dtype=torch.float64)
    values |= given
    found = {}
    for name, value in values.items():
        dtype = torch.int64 if name == "top_k" else torch.float64
        found[f"{name}_R"] = torch.as_tensor(value, dtype=dtype).expand(rows).contiguous()
    return {name: value.to(device) for name, value in found.items()}


def assert_same(logits: Tensor, device: torch.device, **given: Any) -> Tensor:
    logits = logits.to(device)
    arguments = parameters(len(logits), device, **given)
    actual: Tensor = sampling.sample(logits, **arguments)
    assert torch.equal(actual, reference.sample(logits, **arguments))
    return actual


def logits_of(rows: int, *, spread: float = 3.0, vocab: int = VOCAB) -> Tensor:
    return spread * torch.randn(rows, vocab)


CUTS: dict[str, dict[str, Any]] = {
    "none": {},
    "warm": {"temperature": 1.7},
    "cold": {"temperature": 0.05},
    "min_p": {"min_p": 0.02},
    "top_k": {"top_k": 20},
    "top_p": {"top_p": 0.9},
    "top_k and top_p": {"top_k": 15, "top_p": 0.8},
    "all": {"min_p": 0.01, "top_k": 12, "top_p": 0.7, "temperature": 1.3},
    "best only": {"top_k": 1},
    "p of nothing": {"top_p": 0.0},
    "p of nearly all": {"top_p": 1 - 1e-9},
    "more than there are": {"top_k": 10**9},
}


@pytest.mark.parametrize("cut", CUTS)
def test_peaked_rows(device: torch.device, cut: str) -> None:
    """What is kept is among the listed logits, or needs no list."""
    assert_same(logits_of(3, spread=4.0), device, **CUTS[cut])


FLAT: dict[str, dict[str, Any]] = {
    "top_k": {"top_k": 120},
    "top_p": {"top_p": 0.95},
    "min_p": {"min_p": 1e-3},
    "min_p and top_p": {"min_p": 0.3, "top_p": 0.6},
    "top_k and top_p": {"top_k": 400, "top_p": 0.5},
}


@pytest.mark.parametrize("cut", FLAT)
def test_flat_rows_are_searched_twice(
    device: torch.device, cut: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Far more ids are kept than are listed, of distinct logits and of a few different ones."""
    monkeypatch.setattr(sampling, "_FEW", 16)
    flat = logits_of(1, spread=0.5)
    assert_same(torch.cat([flat, flat.bfloat16().float()]), device, **FLAT[cut])


@pytest.mark.parametrize("cut", FLAT)
def test_rows_whose_lists_overflow_are_read_whole(
    device: torch.device, cut: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The border lies among hundreds of almost equal logits."""
    monkeypatch.setattr(sampling, "_LISTED", 8)
    logits = 1 + 1e-4 * torch.randn(1, VOCAB)
    assert_same(logits, device, **FLAT[cut])


def test_a_level_above_the_best_is_no_cut(device: torch.device) -> None:
    """Just below multiples of the temperature, rounding takes some for the multiples."""
    multiple = 0.7 * torch.arange(90, 102, dtype=torch.float32)
    logits = logits_of(12, vocab=40)
    logits[:, 7] = multiple.nextafter(torch.zeros(12))
    tokens = assert_same(logits, device, temperature=0.7, top_p=0.0)
    assert bool((tokens == 7).all())


@pytest.mark.parametrize("scale", [1e-6, 1e4, 1e30])
def test_logits_of_any_size(device: torch.device, scale: float) -> None:
    """Whether or not a grid of multiples of the temperature tells them apart."""
    logits = scale * (10 + torch.randn(2, VOCAB))
    for given in ({"top_k": 20}, {"top_p": 0.9}):
        assert_same(logits, device, temperature=[scale, 1.0], **given)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("cut", ["none", "warm", "min_p", "top_k and top_p"])
def test_a_million_draws_are_distributed_as_they_should_be(device: torch.device, cut: str) -> None:
    """Chi-square of the drawn ids that are expected five times at least."""
    logits = logits_of(1, spread=2.0).to(device)
    counts, draws = torch.zeros(VOCAB, device=device), 0
    for _ in range(32):
        given = parameters(2**15, device, **CUTS[cut])
        tokens = sampling.sample(logits.expand(2**15, -1), **given)
        counts += torch.bincount(tokens, minlength=VOCAB)
        draws += len(tokens)
    expected = draws * distribution(logits[0], **CUTS[cut])
    assert not counts[expected == 0].any()
    often = expected >= 5
    square = ((counts[often] - expected[often]).square() / expected[often]).sum()
    freedom = int(often.sum()) - 1
    assert square < freedom + 6 * (2 * freedom) ** 0.5


def distribution(
    logits: Tensor,
    temperature: float = 1.0,
    min_p: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
) -> Tensor:
    """``[V]`` probabilities, by sorting."""
    probs, ids = (logits.double() / temperature).softmax(0).sort(descending=True)
    probs[probs < min_p * probs[0]] = 0
    if top_k:
        probs[top_k:] = 0
    before = probs.cumsum(0) - probs
    probs[before >= top_p * probs.sum()] = 0
    return torch.zeros_like(probs).scatter(0, ids, probs / probs.sum())


def test_rows_of_all_kinds_in_one_batch(device: torch.device) -> None:
    """Each row is what it is alone."""
    logits = logits_of(6)
    given = {
        "temperature": [1.0, 0.7, 1.0, 2.0, 1.0, 0.3],
        "min_p": [0.0, 0.0, 0.1, 0.0, 0.0, 0.0],
        "top_k": [0, 20, 0, 0, -1, 7],
        "top_p": [1.0, 1.0, 1.0, 0.5, 1.0, 0.9],
        "uniform": torch.rand(6, dtype=torch.float64),
    }
    together = assert_same(logits, device, **given)
    alone = {name: torch.as_tensor(value)[3:4] for name, value in given.items()}
    assert assert_same(logits[3:4], device, **alone)[0] == together[3]


def test_the_borders_of_the_uniform_number(device: torch.device) -> None:
    edges = [0.0, 1 - 2.0**-52, 0.5, 2.0**-52]
    assert_same(logits_of(4), device, uniform=edges)
    assert_same(logits_of(4), device, uniform=edges, top_k=9)


@pytest.mark.parametrize("given", [{"top_k": 3}, {"top_k": 6, "top_p": 0.6}, {"top_p": 0.0}])
def test_among_equals_smaller_ids_stay(device: torch.device, given: dict[str, Any]) -> None:
    """Ten best in different tiles, zeros of both signs among them, and a row of nothing else."""
    logits = torch.full((4, VOCAB), -8.0)
    best = torch.arange(10) * 129
    logits[:, best] = torch.tensor([0.0, -0.0]).repeat(5)
    logits[3] = 1.0
    tokens = assert_same(logits, device, uniform=[0.0, 0.31, 0.999, 0.7123], **given)
    if given == {"top_k": 3}:
        assert tokens[:3].tolist() == [0, 0, 258]


def test_masked_rows(device: torch.device) -> None:
    """One allowed id; few allowed ids; nothing allowed."""
    logits = torch.full((3, VOCAB), -torch.inf)
    logits[0, 900] = -3.0
    logits[1, [5, 511, 512, 1299]] = torch.randn(4)
    for given in ({}, {"top_k": 2}, {"top_p": 0.8}, {"min_p": 0.5}):
        tokens = assert_same(logits, device, **given)
        assert tokens[0] == 900
        assert tokens[2] == -1


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of infinities
def test_broken_rows_stay_alone(device: torch.device) -> None:
    logits = logits_of(4)
    logits[0, 1234], logits[2, 3] = torch.nan, torch.inf
    logits[3] = torch.nan
    for given in ({}, {"top_k": 5, "top_p": 0.9}):
        tokens = assert_same(logits, device, **given)
        assert (tokens < 0).tolist() == [True, False, True, True]
    assert torch.equal(sampling.greedy(logits.to(device)), reference.greedy(logits).to(device))


def test_greedy_takes_the_first_of_equals(device: torch.device) -> None:
    logits = logits_of(5)
    logits[0, [400, 900, 1299]] = 50.0
    logits[1, 5], logits[1, 9] = -0.0, 0.0
    logits[1, 10:] = -1.0
    logits[1, :5] = -1.0
    logits[1, 6:9] = -1.0
    logits[2] = -torch.inf
    logits[3] = -torch.inf
    logits[3, 1298] = -1e30
    actual = sampling.greedy(logits.to(device))
    assert torch.equal(actual, reference.greedy(logits.to(device)))
    assert actual[0] == 400


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("vocab", [1, 31, 64, 1300])
def test_bitmasks(device: torch.device, dtype: torch.dtype, vocab: int) -> None:
    """Bits behind the vocabulary do not count, nor do rows without a mask; NaN is forbidden too."""
    logits = logits_of(4, vocab=vocab).to(device, dtype)
    logits[2, 0] = torch.nan
    size = (3, (vocab + 31) // 32)
    words = torch.randint(-(2**31), 2**31, size, dtype=torch.int32, device=device)
    words[0], words[1] = 0, -1
    rows = torch.tensor([2, 0, 3], device=device)
    actual, wanted = logits.clone(), logits.clone()
    sampling.apply_bitmask(actual, rows, words)
    reference.apply_bitmask(wanted, rows, words)
    assert torch.equal(actual, wanted)
    assert torch.equal(actual[:2], logits[:2])
    assert bool((actual[2] == -torch.inf).all())
    sampling.apply_bitmask(actual, rows[:0], words[:0])
    assert torch.equal(actual, wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_penalties(device: torch.device, dtype: torch.dtype) -> None:
    """Bit for bit, of a masked id too; a row of which nothing was said stays as it is."""
    logits = logits_of(4, vocab=1500).to(device, dtype)
    said = torch.rand(4, 1500, device=device) < 0.3
    said[2] = False
    said[0, 7], logits[0, 7] = True, -torch.inf
    row, token = said.nonzero(as_tuple=True)
    count = torch.randint(-3, 4, row.shape, device=device).clamp(min=0)
    given = {"presence_R": [0.3, -0.5, 1.0, 0.0], "frequency_R": [0.2, 0.0, 1.0, 0.0]}
    given["repetition_R"] = [1.3, 0.7, 2.0, 1.0]
    columns = {name: logits.new_tensor(value) for name, value in given.items()}
    actual, wanted = logits.clone(), logits.clone()
    sampling.apply_penalties(actual, row, token, count, **columns)
    reference.apply_penalties(wanted, row, token, count, **columns)
    assert torch.equal(actual, wanted)
    assert torch.equal(actual[2:], logits[2:])
    assert torch.equal(actual[~said], logits[~said])
    sampling.apply_penalties(actual, row[:0], token[:0], count[:0], **columns)
    assert torch.equal(actual, wanted)


def test_no_rows(device: torch.device) -> None:
    logits = torch.empty(0, 100, device=device)
    assert sampling.greedy(logits).shape == (0,)
    assert sampling.sample(logits, **parameters(0, device)).shape == (0,)


def test_wide_logits_take_the_definition(device: torch.device) -> None:
    logits = logits_of(2, vocab=100).double()
    assert_same(logits, device, top_k=5)
    assert torch.equal(sampling.greedy(logits.to(device)), logits.argmax(-1).to(device))
