"""Rotary embedding: YaRN's frequencies, float32 angles, the complex product."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from leadline.config.presets import V41_FLASH
from leadline.kernels.reference import rope

DTYPES = [torch.bfloat16, torch.float32, torch.float64]


def official_yarn() -> torch.Tensor:
    """Frequencies of the official layers with a compressed cache."""
    scaling = V41_FLASH.rope_scaling
    return rope.yarn_frequencies(
        V41_FLASH.qk_rope_head_dim,
        V41_FLASH.compress_rope_theta,
        factor=scaling.factor,
        beta_fast=scaling.beta_fast,
        beta_slow=scaling.beta_slow,
        original_max_position_embeddings=scaling.original_max_position_embeddings,
    )


@pytest.mark.parametrize("theta", [10000.0, 160000.0])
def test_base_frequencies(theta: float) -> None:
    exact = [theta ** (-2 * i / 64) for i in range(32)]
    torch.testing.assert_close(
        rope.rope_frequencies(64, theta).double(), torch.tensor(exact).double(), rtol=3e-7, atol=0
    )


def test_official_yarn_ramps_from_pair_15_to_25() -> None:
    base, yarn = rope.rope_frequencies(64, 160000.0), official_yarn()
    assert torch.equal(yarn[:16], base[:16])
    assert torch.equal(yarn[25:], base[25:] / 16)
    ramp = torch.arange(1, 10) / 10
    inner = base[16:25] * (1 - ramp) + base[16:25] / 16 * ramp
    torch.testing.assert_close(yarn[16:25], inner)


def test_ramp_of_no_width_is_a_step() -> None:
    yarn = rope.yarn_frequencies(
        8, 10000.0, factor=4, beta_fast=1, beta_slow=1, original_max_position_embeddings=7
    )
    assert torch.equal(yarn, rope.rope_frequencies(8, 10000.0) / torch.tensor([1.0, 4, 4, 4]))


@pytest.mark.parametrize("position", [0, 1, 1000, 65_536, 999_983, 1_048_575])
def test_angle_is_the_float32_product(position: int) -> None:
    """Near a million the float32 product is off by up to 0.03 rad; every port uses it."""
    frequencies = official_yarn()
    cos, sin = rope.rope_angles(torch.tensor([position]), frequencies)
    angles = (np.float32(position) * frequencies.numpy()).astype(np.float64)
    torch.testing.assert_close(cos[0].double(), torch.from_numpy(np.cos(angles)), atol=2e-7, rtol=0)
    torch.testing.assert_close(sin[0].double(), torch.from_numpy(np.sin(angles)), atol=2e-7, rtol=0)


@pytest.mark.parametrize("shape", [(3, 24), (3, 2, 24)], ids=["rows", "heads"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("inverse", [False, True], ids=["forward", "inverse"])
def test_rotate_multiplies_adjacent_pairs(
    shape: tuple[int, ...], dtype: torch.dtype, inverse: bool
) -> None:
    x = torch.randn(shape).to(dtype)
    cos, sin = rope.rope_angles(torch.tensor([0, 5, 77]), rope.rope_frequencies(16, 10000.0))
    turned = rope.rotate(x, cos, sin, inverse=inverse)
    turns = torch.complex(cos.double(), sin.double())
    turns = (turns.conj() if inverse else turns).resolve_conj()
    turns = turns if len(shape) == 2 else turns.unsqueeze(1)
    tail = torch.view_as_complex(x[..., 8:].double().unflatten(-1, (-1, 2)).contiguous())
    exact = torch.view_as_real(tail * turns).flatten(-2)
    assert turned.dtype is dtype
    assert torch.equal(turned[..., :8], x[..., :8])
    unit = max(torch.finfo(dtype).eps, 1e-15)
    torch.testing.assert_close(turned[..., 8:].double(), exact, rtol=unit, atol=2 * unit)


def test_inverse_undoes_the_rotation() -> None:
    x = torch.randn(4, 2, 64).double()
    positions = torch.tensor([0, 3, 1000, 900_000])
    cos, sin = rope.rope_angles(positions, official_yarn()[:16])
    back = rope.rotate(rope.rotate(x, cos, sin), cos, sin, inverse=True)
    torch.testing.assert_close(back, x, rtol=0, atol=1e-6)  # cos^2 + sin^2 is 1 to float32


def test_position_zero_turns_nothing() -> None:
    x = torch.randn(1, 64)
    angles = rope.rope_angles(torch.tensor([0]), rope.rope_frequencies(64, 10000.0))
    assert torch.equal(rope.rotate(x, *angles), x)


def test_scores_depend_on_the_distance_only() -> None:
    q, k = torch.randn(2, 1, 16).double()
    frequencies = rope.rope_frequencies(16, 10000.0)

    def score(query: int, key: int) -> float:
        (cos, sin), (ck, sk) = (
            rope.rope_angles(torch.tensor([p]), frequencies) for p in (query, key)
        )
        return float((rope.rotate(q, cos, sin) * rope.rotate(k, ck, sk)).sum())

    assert math.isclose(score(30, 12), score(118, 100), rel_tol=0, abs_tol=1e-4)
