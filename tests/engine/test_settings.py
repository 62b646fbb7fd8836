from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from leadline.cache.layout import cache_layout
from leadline.config.engine import CacheConfig, EngineConfig
from leadline.config.presets import preset
from leadline.config.v4_presets import TINY_V4
from leadline.core.errors import ConfigError
from leadline.engine.forwards import GraphMode
from leadline.engine.settings import (
    expert_row_scales,
    obstacle_to_graphs,
    resolve_device,
    resolve_dtype,
    resolve_graph_mode,
    resolve_max_model_len,
    resolve_policy,
    resolve_table_memory,
)
from leadline.kernels.registry import REFERENCE, Kernels, unfuse
from leadline.weights.engram_tables import TableMemory

CONFIG = EngineConfig(model="tiny-window128")
MODEL = preset("tiny-window128")
LAYOUT = cache_layout(MODEL)
CUDA, CPU = torch.device("cuda"), torch.device("cpu")
TRITON = SimpleNamespace(backend_of={"gather_rows": "triton"})


def test_fp8_experts_by_flashinfer_are_refused() -> None:
    kernels = Mock(backend_of={"routed_experts": "flashinfer"})
    with pytest.raises(ConfigError, match="'fp8', but routed_experts by flashinfer takes inputs"):
        expert_row_scales(replace(CONFIG, moe_activations="fp8"), kernels, CUDA)


@pytest.mark.parametrize(
    ("capability", "hip", "runs"),
    [((8, 0), None, False), ((8, 9), None, True), ((9, 0), None, True), ((9, 4), "6.4", False)],
    ids=str,
)
def test_fp8_experts_by_triton_want_fp8_tensor_cores(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], hip: str | None, runs: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "this GPU")
    monkeypatch.setattr(torch.version, "hip", hip)
    config = replace(CONFIG, moe_activations="fp8")
    kernels = Mock(backend_of={"routed_experts": "triton"})
    if runs:
        assert expert_row_scales(config, kernels, CUDA)
    else:
        with pytest.raises(ConfigError, match="'fp8', but this GPU has no FP8 tensor cores"):
            expert_row_scales(config, kernels, CUDA)
    assert expert_row_scales(config, REFERENCE, CUDA)
    assert not expert_row_scales(CONFIG, kernels, CUDA)


@pytest.mark.parametrize(
    ("settings", "halves", "length"),
    [
        ({}, (True, True), 128),
        ({"swa_bounded_replay": False}, (False, False), 128),
        ({"swa_replay_lower": False}, (False, True), 128),
        ({"swa_bounded_replay": False, "swa_replay_lower": True}, (True, False), 128),
        ({"swa_replay_length": 1000}, (True, True), 1000),
    ],
    ids=str,
)
def test_one_switch_sets_both_halves_and_each_has_its_own(
    settings: dict[str, Any], halves: tuple[bool, bool], length: int
) -> None:
    policy = resolve_policy(CacheConfig(**settings), MODEL)
    assert (policy.lower, policy.upper) == halves
    assert (policy.length, policy.window) == (length, 128)


@pytest.mark.parametrize(
    "settings",
    [
        {"swa_bounded_replay": True},
        {"swa_replay_lower": True},
        {"swa_replay_upper": True},
        {"swa_replay_length": 128},
    ],
    ids=str,
)
def test_bounded_replay_of_a_v4_is_refused_by_name(settings: dict[str, Any]) -> None:
    [(name, value)] = settings.items()
    message = f"{name} is {value}, but DeepSeek-V4 has no bounded replay"
    with pytest.raises(ConfigError, match=message):
        resolve_policy(CacheConfig(**settings), TINY_V4)


@pytest.mark.parametrize("wanted", [None, False])
def test_a_v4_is_served_in_exact_mode(
    wanted: bool | None, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        policy = resolve_policy(CacheConfig(swa_bounded_replay=wanted), TINY_V4)
    assert policy.needs_snapshot
    assert "prefix hits: exact, from snapshots of slots" in caplog.text
    assert policy.upper_floor(256, 1000) == 999  # logits are made of the last row alone


def test_an_engram_layer_above_the_cut_keeps_the_upper_layers_whole(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """cache-and-scheduling 3.4 and 4.7."""
    model = replace(MODEL, engram_layer_ids=(MODEL.engram_layer_ids[0], MODEL.cut))
    assert not resolve_policy(CacheConfig(), model).upper
    assert "an Engram layer lies above the cut" in caplog.text


@pytest.mark.parametrize(
    ("wanted", "pages", "given"),
    [(None, 10, 10 * 256), (None, 10_000, 32768), (None, 0, 256), (700, 10, 700)],
    ids=["what fits", "what the model has", "at least a page", "the setting"],
)
def test_max_model_len_is_lowered_to_what_fits(wanted: int | None, pages: int, given: int) -> None:
    budget = 2 * LAYOUT.slot_bytes + (pages + 1) * LAYOUT.page_bytes
    config = replace(CONFIG, max_model_len=wanted)
    assert resolve_max_model_len(config, MODEL, LAYOUT, budget) == given


def test_a_max_model_len_beyond_the_models_positions_is_refused() -> None:
    config = replace(CONFIG, max_model_len=40_000)
    with pytest.raises(ConfigError, match="max_position_embeddings 32768; lower it to 32768"):
        resolve_max_model_len(config, MODEL, LAYOUT, 2**30)


def test_graphs_are_all_where_nothing_is_in_the_way() -> None:
    assert resolve_graph_mode("auto", None) is GraphMode.ALL
    assert resolve_graph_mode("auto", "there is no GPU") is GraphMode.OFF
    assert resolve_graph_mode("off", None) is GraphMode.OFF
    assert resolve_graph_mode("auto-decode", None) is GraphMode.DECODE
    assert resolve_graph_mode("auto-decode", "there is no GPU") is GraphMode.OFF
    assert resolve_graph_mode("decode", None) is GraphMode.DECODE


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"debug_nonfinite": True}, "looks at every result"),
        ({}, "no kernel of a GPU runs any op (kernel_backend)"),
    ],
    ids=str,
)
def test_what_is_in_the_way_of_graphs_on_a_gpu_without_triton(
    settings: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "leadline.kernels.triton", None)
    config = replace(CONFIG, **settings)
    obstacle = obstacle_to_graphs(config, CUDA, REFERENCE, LAYOUT)
    assert obstacle is not None
    assert reason in obstacle


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
@pytest.mark.parametrize("fusions", ["all", "none", "all,-indexer"])
def test_graphs_hold_caches_of_4_and_8_bits_and_any_fusions(
    kv_cache_dtype: str, fusions: str
) -> None:
    pytest.importorskip("triton")
    from leadline.kernels.triton import IMPLEMENTATIONS

    kernels = Kernels(unfuse(dict.fromkeys(IMPLEMENTATIONS, "triton"), fusions))
    layout = cache_layout(MODEL, kv_cache_dtype=kv_cache_dtype)
    assert obstacle_to_graphs(CONFIG, CUDA, kernels, layout) is None


def test_auto_dtype_follows_the_device() -> None:
    assert resolve_dtype("auto", CPU) == torch.float32
    assert resolve_dtype("auto", CUDA) == torch.bfloat16
    assert resolve_dtype("float64", CUDA) == torch.float64


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_gpu_that_is_not_there_is_an_error() -> None:
    assert resolve_device("auto") == CPU
    with pytest.raises(ConfigError, match="torch finds no GPU"):
        resolve_device("cuda")


@pytest.mark.parametrize(
    ("settings", "device", "kernels", "wanted"),
    [
        ({}, CPU, REFERENCE, None),
        ({}, CUDA, REFERENCE, None),
        ({}, CUDA, TRITON, TableMemory(CUDA)),
        ({"engram_tables": "mmap"}, CUDA, TRITON, None),
        ({"engram_tables": "memory"}, CPU, REFERENCE, TableMemory(CPU)),
        ({"engram_shared_memory": "/x"}, CUDA, TRITON, TableMemory(CUDA, Path("/x"))),
    ],
    ids=["cpu", "gpu", "gpu with its kernels", "mmap", "memory", "shared"],
)
def test_tables_are_copied_for_those_who_read_the_copy(
    settings: dict[str, str], device: torch.device, kernels: Any, wanted: TableMemory | None
) -> None:
    config = replace(CONFIG, **settings)  # type: ignore[arg-type]
    found = resolve_table_memory(config, MODEL, device, kernels)
    assert found == wanted


def test_tables_larger_than_memory_stay_on_the_files_or_are_refused(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("leadline.engine.settings.available_bytes", lambda: 210 * 10**9)
    official: Any = (preset("v4.1-flash"), CUDA, TRITON)
    assert resolve_table_memory(CONFIG, *official) is None
    assert "Engram tables take 188.8 GiB of host memory" in caplog.text
    assert "195.6 GiB are free: they stay on the files" in caplog.text
    with pytest.raises(ConfigError, match=r"at most 90% of these .*engram_tables to 'mmap'"):
        resolve_table_memory(replace(CONFIG, engram_tables="memory"), *official)


@pytest.mark.parametrize(
    "settings",
    [{"engram_tables": "memory"}, {"engram_tables": "mmap"}, {"engram_shared_memory": "/dev/shm"}],
    ids=str,
)
def test_a_model_without_tables_is_told_nothing_of_them(settings: Any) -> None:
    model: Any = (TINY_V4, CUDA, TRITON)
    assert resolve_table_memory(CONFIG, *model) is None
    with pytest.raises(ConfigError, match="DeepSeek-V4 has no Engram tables"):
        resolve_table_memory(replace(CONFIG, **settings), *model)
