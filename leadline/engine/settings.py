"""What settings come to on this machine and for this model: ``auto`` resolved, the rest checked."""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from leadline.cache.layout import CacheLayout
from leadline.cache.replay import ReplayPolicy
from leadline.cache.sizing import longest_model_len
from leadline.config.engine import CacheConfig, EngineConfig
from leadline.config.families import AnyConfig
from leadline.config.v4 import V4Config
from leadline.core.errors import ConfigError
from leadline.engine.forwards import GraphMode
from leadline.engine.memory import GIB
from leadline.kernels.records import Record
from leadline.kernels.registry import Kernels
from leadline.weights.engram_tables import TableMemory
from leadline.weights.host_memory import available_bytes

logger = logging.getLogger(__name__)

TABLES_SHARE = 0.9  # of what host memory is free; the rest is for everything else


def resolve_device(device: str) -> torch.device:
    """``auto`` is the GPU where there is one.

    Raises:
        ConfigError: ``cuda`` is wanted and torch finds none.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device is 'cuda', but torch finds no GPU; try device 'cpu'")
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(device)


def resolve_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """``auto`` is bfloat16 on a GPU and float32 on a CPU (design.md)."""
    if dtype == "auto":
        dtype = "float32" if device.type == "cpu" else "bfloat16"
    resolved = getattr(torch, dtype)
    assert isinstance(resolved, torch.dtype)
    return resolved


def obstacle_to_graphs(
    config: EngineConfig, device: torch.device, kernels: Kernels, layout: CacheLayout
) -> str | None:
    """Why forwards with these settings cannot be captured, or None."""
    if device.type != "cuda":
        return "there is no GPU"
    if config.debug_nonfinite:
        return "debug_nonfinite looks at every result"
    if kernels.waiting:
        return f"no kernel of a GPU runs {', '.join(kernels.waiting)} (kernel_backend)"
    if layout.index_record is not Record.FP4_32:
        return f"index keys of kv_cache_dtype {config.cache.kv_cache_dtype!r} have no kernels"
    return None


def resolve_graph_mode(wanted: str, obstacle: str | None) -> GraphMode:
    """``auto`` is ``all`` where nothing is in the way, and ``auto-decode`` is ``decode``.

    Raises:
        ConfigError: graphs are wanted and cannot be.
    """
    if wanted.startswith("auto"):
        mode = GraphMode.ALL if wanted == "auto" else GraphMode.DECODE
        logger.info("graphs: %s", mode if obstacle is None else f"none, since {obstacle}")
        return mode if obstacle is None else GraphMode.OFF
    if wanted != "off" and obstacle is not None:
        raise ConfigError(f"cuda_graphs is {wanted!r}, but {obstacle}; set it to 'off'")
    return GraphMode(wanted)


def expert_row_scales(config: EngineConfig, kernels: Kernels, device: torch.device) -> bool:
    """Whether inputs of routed experts have one scale a row.

    Raises:
        ConfigError: that needs tensor cores which the GPU lacks, or other kernels.
    """
    if config.moe_activations != "fp8":
        return False
    if kernels.backend_of.get("routed_experts") == "flashinfer":
        raise ConfigError(
            "moe_activations is 'fp8', but routed_experts by flashinfer takes inputs as they are; "
            "leave one of the two out"
        )
    if kernels.backend_of.get("routed_experts") == "triton":
        capability = torch.cuda.get_device_capability(device)
        if torch.version.hip is not None or capability < (8, 9):
            raise ConfigError(
                f"moe_activations is 'fp8', but {torch.cuda.get_device_name(device)} has no FP8 "
                "tensor cores of NVIDIA's; they need compute capability 8.9. Set 'mxfp8'"
            )
    return True


def resolve_table_memory(
    config: EngineConfig, model: AnyConfig, device: torch.device, kernels: Kernels
) -> TableMemory | None:
    """Where Engram tables are copied to; None leaves them on the checkpoint's files.

    ``auto`` copies them for kernels that read host memory from a GPU, and where a folder for them
    is named; what a host without a GPU gathers, the system caches by itself.

    Raises:
        ConfigError: they are to be copied to memory that the machine does not have, or the model
            is a V4, which has none.
    """
    wanted, folder = config.engram_tables, config.engram_shared_memory
    for_kernels = device.type == "cuda" and "gather_rows" in kernels.backend_of
    if isinstance(model, V4Config):
        if wanted != "auto" or folder is not None:
            raise ConfigError(
                "DeepSeek-V4 has no Engram tables; leave engram_tables and engram_shared_memory out"
            )
        return None
    if not model.engram_layer_ids or wanted == "mmap":
        return None
    if folder is not None:  # which may hold them already, and says so itself if it is too small
        return TableMemory(device, Path(folder))
    if wanted == "auto" and not for_kernels:
        return None
    row_bytes = model.engram_head_dim + model.engram_head_dim // 32
    needed, available = sum(model.engram_num_embeddings) * row_bytes, available_bytes()
    if needed <= available * TABLES_SHARE:
        return TableMemory(device)
    shortage = (
        f"Engram tables take {needed / GIB:.1f} GiB of host memory, of which "
        f"{available / GIB:.1f} GiB are free"
    )
    if wanted == "memory":
        raise ConfigError(
            f"{shortage}; at most {TABLES_SHARE:.0%} of these may go to them: set engram_tables to "
            "'mmap', or give the machine or its container more"
        )
    logger.warning("%s: they stay on the files, and steps wait for the host to gather", shortage)
    return None


def resolve_policy(config: CacheConfig, model: AnyConfig) -> ReplayPolicy:
    """Which halves are replayed, and by how many rows.

    The upper half is never trimmed where a model does not allow it (cache-and-scheduling 4.7).

    Raises:
        ConfigError: replay is asked for, and the model has none.
    """
    if isinstance(model, V4Config):
        return _policy_without_replay(config, model)
    both = config.swa_bounded_replay is not False
    upper = both if config.swa_replay_upper is None else config.swa_replay_upper
    if upper and (max(model.engram_layer_ids, default=-1) >= model.cut):
        logger.warning("the upper layers run on every row: an Engram layer lies above the cut")
        upper = False
    return ReplayPolicy(
        lower=both if config.swa_replay_lower is None else config.swa_replay_lower,
        upper=upper,
        length=config.swa_replay_length or model.sliding_window,
        window=model.sliding_window,
        snapshot_interval=config.snapshot_interval,
    )


def _policy_without_replay(config: CacheConfig, model: V4Config) -> ReplayPolicy:
    """Nothing lies above a cut, so the last row of a prompt is all that is made logits of."""
    names = ("swa_bounded_replay", "swa_replay_lower", "swa_replay_upper", "swa_replay_length")
    for name in names:
        if wanted := getattr(config, name):
            raise ConfigError(
                f"{name} is {wanted}, but DeepSeek-V4 has no bounded replay: what every layer "
                "compresses behind a replay would be approximate, and would last; leave it out. "
                "Prefix hits are exact here, from snapshots"
            )
    logger.info("prefix hits: exact, from snapshots of slots; DeepSeek-V4 has no bounded replay")
    return ReplayPolicy(
        lower=False,
        upper=True,
        length=1,
        window=model.sliding_window,
        snapshot_interval=config.snapshot_interval,
    )


def resolve_max_model_len(
    config: EngineConfig, model: AnyConfig, layout: CacheLayout, budget_bytes: int
) -> int:
    """The setting, or the model's own limit lowered to what the cache can hold.

    Raises:
        ConfigError: the setting is beyond the model's positions.
    """
    wanted, limit = config.max_model_len, model.max_position_embeddings
    if wanted is None:
        # At least a page: where not even that fits, ``size_cache`` says so.
        return min(limit, max(layout.page_size, longest_model_len(layout, budget_bytes)))
    if wanted > limit:
        raise ConfigError(
            f"max_model_len is {wanted}, but the model has max_position_embeddings {limit}; "
            f"lower it to {limit}"
        )
    return wanted
