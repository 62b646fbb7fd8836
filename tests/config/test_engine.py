from __future__ import annotations

import re
from typing import Any

import pytest

from leadline.config.args import from_values
from leadline.config.engine import EngineConfig
from leadline.core.errors import ConfigError

BAD = [
    ({"model": ""}, "model is ''; name a checkpoint folder, a hub id or a preset"),
    ({"model": None}, "model is None; name a checkpoint folder"),
    ({"dtype": "fp16"}, "dtype is 'fp16'; choose one of auto, float32, bfloat16, float64"),
    ({"device": "tpu"}, "device is 'tpu'; choose one of auto, cpu, cuda"),
    ({"load_format": "gguf"}, "load_format is 'gguf'; choose one of auto, safetensors, dummy"),
    ({"moe_activations": "fp4"}, "moe_activations is 'fp4'; choose one of mxfp8, fp8"),
    (
        {"moe_activations": "fp8", "quantize_activations": False},
        "moe_activations is 'fp8', but quantize_activations is off",
    ),
    ({"engram_tables": "gpu"}, "engram_tables is 'gpu'; choose one of auto, memory, mmap"),
    (
        {"engram_tables": "mmap", "engram_shared_memory": "/dev/shm"},
        "engram_shared_memory is '/dev/shm', but engram_tables 'mmap' copies nothing there",
    ),
    ({"max_model_len": 1}, "max_model_len is 1; it must be an integer of at least 2"),
    ({"max_model_len": "8k"}, "max_model_len is '8k'; it must be an integer"),
    ({"seed": 1.5}, "seed is 1.5; it must be an integer"),
    ({"seed": None}, "seed is None; it must be an integer"),
    ({"gpu_memory_utilization": 0}, "gpu_memory_utilization is 0; it must lie in (0, 1]"),
    ({"gpu_memory_utilization": 1.01}, "gpu_memory_utilization is 1.01; it must lie in (0, 1]"),
    ({"gpu_memory_utilization": "0.9"}, "gpu_memory_utilization is '0.9'; it must lie in"),
    ({"kv_cache_memory_bytes": 0}, "kv_cache_memory_bytes is 0; it must be an integer of at"),
    ({"max_num_seqs": 0}, "max_num_seqs is 0; it must be an integer of at least 1"),
    ({"max_num_seqs": True}, "max_num_seqs is True; it must be an integer"),
    ({"max_num_batched_tokens": -1}, "max_num_batched_tokens is -1; it must be an integer"),
    ({"max_prefill_rows": 0}, "max_prefill_rows is 0; it must be an integer"),
    ({"max_prefills": 0}, "max_prefills is 0; it must be an integer"),
    ({"max_num_queued_reqs": -1}, "max_num_queued_reqs is -1; it must be an integer"),
    ({"max_bypass": -1}, "max_bypass is -1; it must be an integer of at least 0"),
    ({"block_size": 0}, "block_size is 0; it must be an integer of at least 1"),
    ({"swa_replay_length": 0}, "swa_replay_length is 0; it must be an integer of at least 1"),
    ({"snapshot_interval": -1}, "snapshot_interval is -1; it must be an integer of at least 0"),
    ({"snapshot_memory_fraction": 1}, "snapshot_memory_fraction is 1; it must lie in [0, 1)"),
    ({"hot_slots": -1}, "hot_slots is -1; it must be an integer of at least 0"),
    ({"long_prefill_threshold": 0}, "long_prefill_threshold is 0; it must be an integer"),
    ({"rows_per_decode": 0}, "rows_per_decode is 0; it must be an integer"),
    (
        {"max_num_batched_tokens": 64, "max_num_seqs": 65},
        "max_num_batched_tokens (64) is below max_num_seqs (65)",
    ),
]


@pytest.mark.parametrize(
    ("values", "message"), BAD, ids=lambda v: str(v) if isinstance(v, dict) else ""
)
def test_a_bad_value_is_named_with_what_it_must_be(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        from_values(EngineConfig, {"model": "m", **values})


def test_defaults_are_valid() -> None:
    config = EngineConfig(model="m")
    assert config.max_model_len is None
    assert config.cache.kv_cache_memory_bytes is None
    assert config.cache.enable_prefix_caching
    assert config.cache.swa_bounded_replay is None
