"""Matrix products with weights as stored; plain ones are torch's."""

from __future__ import annotations

import dataclasses
from typing import TypeGuard

import torch
from torch import Tensor

from leadline.kernels import batch_invariance
from leadline.kernels.packed import PackedWeight, Weight, WeightFormat
from leadline.kernels.reference import linear as reference
from leadline.kernels.triton.packed_matmul import packed_matmul
from leadline.kernels.triton.router import project

# Products that cuBLAS cuts along their input would otherwise add parts rounded to bf16.
torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False


def linear(x: Tensor, weight: Weight) -> Tensor:
    """FP8 weights are expanded where they are multiplied."""
    if is_fp8(weight):
        return packed_matmul(x.unsqueeze(1), as_group(weight))
    if batch_invariance.switch.enabled and not weight.quantizes_input:
        return wide_linear(x, weight.dense).to(x.dtype)
    return reference.linear(x, weight)


def wide_linear(x: Tensor, weight: Tensor) -> Tensor:
    """bf16 weights meet bf16 activations as they are: the products are exact, the sum is wide."""
    if batch_invariance.switch.enabled and len(x):
        return project(x, weight, most_cuts=1)[0]  # cuBLAS chooses by the number of rows
    if x.dtype == weight.dtype == torch.bfloat16 and x.is_cuda:
        return torch.mm(x, weight.T, out_dtype=torch.float32)
    return reference.wide_linear(x, weight)


def is_fp8(weight: Weight) -> TypeGuard[PackedWeight]:
    """Whether ``packed_matmul`` takes it."""
    return isinstance(weight, PackedWeight) and weight.format is WeightFormat.FP8_BLOCK32


def as_group(weight: PackedWeight) -> PackedWeight:
    """A matrix ``[out, in]`` as the only one of its group."""
    return dataclasses.replace(
        weight, codes=weight.codes.unsqueeze(0), scales=weight.scales.unsqueeze(0)
    )
