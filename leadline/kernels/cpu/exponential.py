"""The exponential function, in a form that compilers turn into vector instructions."""

from __future__ import annotations

import numpy as np

from leadline.kernels.cpu.formats import bits_of, from_bits
from leadline.kernels.cpu.jit import Real, inline

_LOG2_E = np.float32(1.44269504)
# ln 2 in two parts, the first with few enough bits for exact products with whole numbers.
_LN2_HIGH, _LN2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)
# Added to a float32 and taken away again, it leaves the nearest whole number.
_MAGIC = np.float32(12582912.0)
_MAGIC_BITS = int(_MAGIC.view(np.int32))
_LOWEST, _HIGHEST = np.float32(-87.33654), np.float32(88.72283)
# Of (e^r - 1 - r) / r^2 around 0, the highest power first (Cephes, expf).
_C5, _C4, _C3, _C2, _C1, _C0 = np.array(
    [
        1.98756915e-4,
        1.3981999507e-3,
        8.3334519073e-3,
        4.1665795894e-2,
        0.16666665459,
        0.50000001201,
    ],
    np.float32,
)


@inline
def exp(x: Real) -> Real:
    """``e^x`` within two units in the last place; 0 below the normal numbers, NaN stays."""
    near = min(max(x, _LOWEST), _HIGHEST)
    shifted = near * _LOG2_E + _MAGIC
    whole = shifted - _MAGIC
    r = near - whole * _LN2_HIGH - whole * _LN2_LOW
    tail = ((((_C5 * r + _C4) * r + _C3) * r + _C2) * r + _C1) * r + _C0
    power = bits_of(shifted) - _MAGIC_BITS
    # Two factors, as the largest power of two is beyond float32.
    half = power >> 1
    scaled = (tail * r * r + r + np.float32(1)) * from_bits((half + 127) << 23)
    result = scaled * from_bits((power - half + 127) << 23)
    result = np.float32(0) if x < _LOWEST else result
    result = np.float32(np.inf) if x > _HIGHEST else result
    return result if x == x else x
