"""The layouts and arguments that FlashInfer documents, by a stand-in that takes nothing else."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from leadline.core.errors import ConfigError
from leadline.kernels import registry
from leadline.kernels.packed import LinearWeight, PackedWeight, WeightFormat
from leadline.kernels.reference import experts as reference
from leadline.kernels.reference.quant import dequantize_fp4_32
from leadline.kernels.registry import Kernels, choose

E, D, F, LIMIT = 9, 256, 128, 4.0


def interleave_weights(weight: Tensor, quant_type: str = "fp4") -> Tensor:
    """The real order is FlashInfer's own business; this one can be undone."""
    assert quant_type == "fp4"
    assert weight.dtype == torch.uint8
    assert weight.is_contiguous()
    return weight.flip(2)


def interleave_scales(scales: Tensor, group_size: int = 32) -> Tensor:
    """As documented: 64 rows by 128 channels lie together, 16 bytes for four of the rows."""
    assert group_size == 32
    experts, rows, groups = scales.shape
    blocks = scales.reshape(experts, rows // 64, 4, 16, groups // 4, 4)
    return blocks.permute(0, 1, 4, 3, 2, 5).reshape(experts, rows // 64, groups // 4, 16, 16)


def values(codes: Tensor, scales: Tensor) -> Tensor:
    experts, row_blocks, column_blocks = scales.shape[:3]
    blocks = scales.reshape(experts, row_blocks, column_blocks, 16, 4, 4)
    rows = blocks.permute(0, 1, 4, 3, 2, 5).reshape(experts, row_blocks * 64, column_blocks * 4)
    return dequantize_fp4_32(codes.flip(2), rows)


def cutlass_fused_moe(
    input: Tensor,
    token_selected_experts: Tensor,
    token_final_scales: Tensor,
    fc1_expert_weights: Tensor,
    fc2_expert_weights: Tensor,
    output_dtype: torch.dtype,
    quant_scales: list[Tensor],
    *,
    swiglu_limit: Tensor,
    output: Tensor,
    use_w4_group_scaling: bool,
    use_fused_finalize: bool,
) -> Tensor:
    """Linear rows before gate rows, both clamped; ids of other ranks skipped; scaled at the end."""
    assert use_w4_group_scaling
    assert not use_fused_finalize
    assert input.dtype == output.dtype == output_dtype == torch.bfloat16
    assert token_selected_experts.dtype == torch.int32
    assert token_final_scales.dtype == swiglu_limit.dtype == torch.float32
    assert swiglu_limit.shape == (E,)
    w13 = values(fc1_expert_weights, quant_scales[0])
    w2 = values(fc2_expert_weights, quant_scales[1])
    assert w13.shape == (E, 2 * F, D)
    assert w2.shape == (E, D, F)
    for row, (ids, scales) in enumerate(
        zip(token_selected_experts.tolist(), token_final_scales.tolist(), strict=True)
    ):
        total = torch.zeros(D)
        for expert, scale in zip(ids, scales, strict=True):
            if not 0 <= expert < E:
                continue
            linear, gate = (w13[expert] @ input[row].float()).bfloat16().float().chunk(2)
            gate, linear = gate.clamp(max=LIMIT), linear.clamp(-LIMIT, LIMIT)
            hidden = (gate * gate.sigmoid() * linear).bfloat16().float()
            total += scale * (w2[expert] @ hidden).bfloat16().float()
        output[row] = total
    return output


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    package, fused_moe = ModuleType("flashinfer"), ModuleType("flashinfer.fused_moe")
    contents: dict[str, Any] = {
        "cutlass_fused_moe": cutlass_fused_moe,
        "interleave_moe_weights_for_sm90_mixed_gemm": interleave_weights,
        "interleave_moe_scales_for_sm90_mixed_gemm": interleave_scales,
    }
    fused_moe.__dict__.update(contents)
    package.__dict__["fused_moe"] = fused_moe
    monkeypatch.setitem(sys.modules, "flashinfer", package)
    monkeypatch.setitem(sys.modules, "flashinfer.fused_moe", fused_moe)
    yield
    for name in ("leadline.kernels.flashinfer.experts", "leadline.kernels.flashinfer"):
        sys.modules.pop(name, None)


def stack(out: int, columns: int) -> PackedWeight:
    codes = torch.randint(256, (E, out, columns // 2), dtype=torch.uint8)
    scales = torch.randint(118, 123, (E, out, columns // 32), dtype=torch.uint8)
    return PackedWeight(codes, scales, WeightFormat.MXFP4, False, dtype=torch.float32)


def copied(weight: PackedWeight) -> PackedWeight:
    return PackedWeight(weight.codes.clone(), weight.scales, weight.format)


def test_equals_the_definition_on_inputs_that_are_not_rounded() -> None:
    """Ids of -1 add nothing; gate rows come last in the new order; codes stay where they were."""
    kernels = Kernels({"routed_experts": "flashinfer"})
    op = importlib.import_module("leadline.kernels.flashinfer").IMPLEMENTATIONS["routed_experts"]
    w13, w2 = stack(2 * F, D), stack(D, F)
    given = copied(w13), copied(w2)
    arranged = kernels.arrange_experts(*given)
    for before, after in zip(given, arranged, strict=True):
        assert isinstance(after, PackedWeight)
        assert after.codes.data_ptr() == before.codes.data_ptr()
    x, shared = torch.randn(2, 5, D).bfloat16()
    ids = torch.rand(5, E).topk(3).indices.sort().values
    ids[1, 0], ids[3] = -1, -1
    weights = torch.rand(5, 3)
    for added in (None, lambda: shared):
        actual = op(x, ids, weights, *arranged, limit=LIMIT, shared=added)
        wanted = reference.routed_experts(x, ids, weights, w13, w2, limit=LIMIT, shared=added)
        assert actual.dtype == wanted.dtype
        assert (actual.double() - wanted.double()).norm() <= 1e-2 * wanted.double().norm()
    assert op(x[:0], ids[:0], weights[:0], *arranged, limit=LIMIT).shape == (0, D)


def test_other_formats_and_sizes_are_refused_when_weights_load() -> None:
    kernels = Kernels({"routed_experts": "flashinfer"})
    plain = LinearWeight(torch.ones(E, D, F), WeightFormat.PLAIN)
    with pytest.raises(ConfigError, match="w2 is stored as plain, and routed_experts by flash"):
        kernels.arrange_experts(stack(2 * F, D), plain)
    with pytest.raises(ConfigError, match="map 256 channels to 64, and routed_experts by flash"):
        kernels.arrange_experts(stack(128, D), stack(D, 64))


def test_others_weights_stay_as_they_are() -> None:
    pair = stack(2 * F, D), stack(D, F)
    assert Kernels({}).arrange_experts(*pair) == pair


def test_gpus_other_than_hopper_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 9))
    with pytest.raises(ConfigError, match=r"capability 9\.0, and this GPU has 8\.9"):
        choose("flashinfer", torch.device("cuda"), torch.bfloat16)


def test_where_it_is_absent_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    with pytest.raises(ConfigError, match=r"flashinfer.*pip install 'leadline\[flashinfer\]'"):
        choose("flashinfer", torch.device("cuda"), torch.bfloat16)


def test_it_has_one_op_and_graphs_may_be_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    chosen = choose("reference,routed_experts=flashinfer", torch.device("cuda"), torch.bfloat16)
    assert chosen.backend_of == {"routed_experts": "flashinfer"}
    assert not registry.BACKENDS["flashinfer"].automatic
    pytest.importorskip("triton")
    assert "routed_experts" not in chosen.waiting
