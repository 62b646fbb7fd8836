"""Seams and coefficients against their definitions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from leadline.kernels import ops
from leadline.kernels.reference import mhc as reference
from leadline.kernels.reference import quant
from leadline.kernels.triton import mhc, mhc_head
from tests.kernels.bounds import few_differ

EPS, S = 1e-20, 4
SETTINGS = {"sinkhorn_iters": 20, "hc_eps": 1e-6, "eps": EPS}


class Site:
    """Inputs of a seam over rows of ``width`` channels, the streams of very different norm."""

    def __init__(self, rows: int, width: int, device: torch.device) -> None:
        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, device=device)

        norms = torch.tensor([1e-3, 1.0, 30.0, 3e3], device=device)[:, None]
        self.streams = (draw(rows, S, width) * norms).bfloat16()
        self.y = draw(rows, width).bfloat16()
        self.post, self.mix = (torch.rand(rows, S, device=device) for _ in range(2))
        self.comb = torch.rand(rows, S, S, device=device)
        self.weight = torch.rand(width, device=device) + 0.5
        self.fn = draw(24, S * width) / (S * width) ** 0.5
        self.base = draw(24)
        self.scale = torch.tensor([0.5, 2.0, 3.0], device=device)

    @property
    def seam(self) -> tuple[Tensor, ...]:
        return self.y, self.streams, self.post, self.comb, self.mix, self.weight

    def coefficients(self, how: Any = mhc) -> tuple[Tensor, Tensor, Tensor]:
        made: tuple[Tensor, Tensor, Tensor] = how.mhc_coefficients(
            self.streams, self.fn, self.base, self.scale, **SETTINGS
        )
        return made


def assert_rounded_alike(actual: Tensor, wanted: Tensor) -> None:
    """Sums in another order: hardly any value is another one, and then it is a neighbour."""
    assert actual.dtype == wanted.dtype == torch.bfloat16
    if not wanted.numel():
        return
    assert few_differ(actual, wanted, 0.005)
    largest = wanted.flatten(1).abs().amax(-1).double().view(-1, *[1] * (wanted.dim() - 1))
    error = (actual.double() - wanted.double()).abs()
    assert (error <= 2**-20 * largest + 2**-7 * wanted.double().abs()).all()


@pytest.mark.parametrize(("rows", "width"), [(0, 64), (1, 64), (5, 96), (3, 1280)])
def test_seam_is_expand_collapse_and_norm(device: torch.device, rows: int, width: int) -> None:
    """Each step is held to the definition on what the step before it gave."""
    site = Site(rows, width, device)
    expanded, u = mhc.mhc_seam(*site.seam, eps=EPS)
    assert_rounded_alike(expanded, reference.mhc_expand(*site.seam[:4]))
    assert_rounded_alike(u, ops.mhc_enter(expanded, site.mix, site.weight, eps=EPS))


def test_seam_equals_its_halves(device: torch.device) -> None:
    site = Site(3, 96, device)
    expanded, u = mhc.mhc_seam(*site.seam, eps=EPS)
    assert torch.equal(mhc.mhc_expand(*site.seam[:4]), expanded)
    assert torch.equal(mhc.mhc_enter(expanded, site.mix, site.weight, eps=EPS), u)


@pytest.mark.parametrize("width", [64, 1280])
def test_seam_gives_its_input_in_fp8_and_the_mean_of_streams(
    device: torch.device, width: int
) -> None:
    """What draft layers read lies in wider rows; nothing else changes."""
    site = Site(3, width, device)
    site.streams[1], site.y[1] = 0, 0
    site.y[2, 5] = torch.nan
    expanded, u = mhc.mhc_seam(*site.seam, eps=EPS)
    fp8 = fp8_rows(3, width, device)
    features = torch.full((3, 3 * width), 7.0, device=device, dtype=torch.bfloat16)
    mean = features[:, width : 2 * width]
    for a, b in zip(
        mhc.mhc_seam(*site.seam, eps=EPS, fp8=fp8, mean=mean), (expanded, u), strict=True
    ):
        assert torch.equal(a.view(torch.int16), b.view(torch.int16))
    assert_encodes(fp8, u)
    assert_rounded_alike(mean[:2], reference.mhc_mean(expanded[:2]))
    assert mean[2].isnan().sum() == 1
    assert (features[:, :width] == 7).all()
    assert (features[:, 2 * width :] == 7).all()


def test_enter_gives_its_result_in_fp8(device: torch.device) -> None:
    site, fp8 = Site(3, 96, device), fp8_rows(3, 96, device)
    u = mhc.mhc_enter(site.streams, site.mix, site.weight, eps=EPS, fp8=fp8)
    assert torch.equal(u, mhc.mhc_enter(site.streams, site.mix, site.weight, eps=EPS))
    assert_encodes(fp8, u)


def fp8_rows(rows: int, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Codes and exponents yet to be written."""
    codes = torch.full((rows, width), 1, device=device, dtype=torch.uint8)
    return codes, codes[:, : width // 32].clone()


def assert_encodes(fp8: tuple[Tensor, Tensor], u: Tensor) -> None:
    """Every byte is that of the definition."""
    for actual, wanted in zip(fp8, quant.quantize_fp8_32(u), strict=True):
        assert torch.equal(actual, wanted)


def test_streams_that_share_memory_and_strided_outputs_are_read_as_they_are(
    device: torch.device,
) -> None:
    """The first layer's streams are one embedding, expanded; ``y`` may be part of a wider row."""
    site = Site(3, 64, device)
    site.streams = site.streams[:, :1].expand(-1, S, -1)
    site.y = torch.cat((site.y, site.y), dim=1)[:, 64:]

    def both(site: Site) -> tuple[Tensor, ...]:
        return (*mhc.mhc_seam(*site.seam, eps=EPS), *site.coefficients())

    strided = both(site)
    site.streams, site.y = site.streams.contiguous(), site.y.contiguous()
    for a, b in zip(strided, both(site), strict=True):
        assert torch.equal(a, b)


def test_first_site_enters_the_embedding_itself(device: torch.device) -> None:
    site = Site(2, 64, device)
    site.mix = torch.eye(S, device=device)[[0, 2]]
    u = mhc.mhc_enter(site.streams, site.mix, torch.ones(64, device=device), eps=EPS)
    chosen = torch.stack((site.streams[0, 0], site.streams[1, 2]))
    assert_rounded_alike(u, ops.rms_norm(chosen, torch.ones(64, device=device), eps=EPS))


def test_empty_and_broken_rows_of_a_seam_stay_alone(device: torch.device) -> None:
    """A row of zeros has a factor of 1e10, and stays zero."""
    site = Site(3, 64, device)
    site.streams[0], site.y[0] = 0, 0
    site.streams[2, 1, 5] = torch.nan
    expanded, u = mhc.mhc_seam(*site.seam, eps=EPS)
    assert not expanded[0].any()
    assert not u[0].any()
    assert u[2].isnan().all()
    one = (*(part[1:2] for part in site.seam[:5]), site.weight)
    alone = mhc.mhc_seam(*one, eps=EPS)
    assert torch.equal(expanded[1:2], alone[0])
    assert torch.equal(u[1:2], alone[1])


@pytest.mark.parametrize(
    ("rows", "width", "error"),
    [(0, 64, 0.0), (1, 64, 5e-6), (16, 96, 5e-6), (17, 320, 5e-6), (65, 64, 3e-5)],
)
def test_coefficients(device: torch.device, rows: int, width: int, error: float) -> None:
    """kernels.md 1.4: by the terms that ``fn`` is split into."""
    site = Site(rows, width, device)
    actual = site.coefficients()
    site.streams, site.fn, site.base, site.scale = (
        part.double() for part in (site.streams, site.fn, site.base, site.scale)
    )
    for a, b in zip(actual, site.coefficients(reference), strict=True):
        assert a.dtype == torch.float32
        torch.testing.assert_close(a.double(), b, rtol=0, atol=error)


def test_saturated_coefficients(device: torch.device) -> None:
    """Logits of +-80 and a row of zeros, whose coefficients are those of the base."""
    site = Site(3, 64, device)
    site.base = torch.where(site.base > 0, 80.0, -80.0)
    site.streams[1] = 0
    for a, b in zip(site.coefficients(), site.coefficients(reference), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=2e-6)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter computes by numpy
def test_broken_rows_of_coefficients_stay_alone(device: torch.device) -> None:
    site = Site(3, 64, device)
    sound = site.coefficients()
    site.streams[0, 2, 7], site.streams[2, 0, 0] = torch.inf, torch.nan
    for a, b in zip(site.coefficients(), sound, strict=True):
        assert a[[0, 2]].isnan().all()
        assert torch.equal(a[1], b[1])


@pytest.mark.parametrize(("rows", "width"), [(0, 64), (1, 96), (17, 256), (65, 128)])
def test_weights_of_the_head(device: torch.device, rows: int, width: int) -> None:
    site = Site(rows, width, device)
    arguments = site.streams, site.fn[:S], site.base[:S], site.scale[:1]
    actual = mhc_head.mhc_head(*arguments, hc_eps=1e-6, eps=EPS)
    wanted = reference.mhc_head(*(t.double() for t in arguments), hc_eps=1e-6, eps=EPS)
    assert actual.dtype is torch.float32
    torch.testing.assert_close(actual.double(), wanted, rtol=1e-5, atol=1e-6)


def test_a_broken_row_of_the_head_stays_alone(device: torch.device) -> None:
    site = Site(3, 64, device)
    arguments = site.fn[:S], site.base[:S], site.scale[:1]
    wanted = mhc_head.mhc_head(site.streams, *arguments, hc_eps=1e-6, eps=EPS)
    site.streams[1, 2, 5] = torch.nan
    actual = mhc_head.mhc_head(site.streams, *arguments, hc_eps=1e-6, eps=EPS)
    assert actual[1].isnan().all()
    assert torch.equal(actual[[0, 2]], wanted[[0, 2]])
