"""Flags that vLLM's users have in their scripts and that have nothing to switch here.

They are accepted with one warning each; values that ask for something that does not exist are
refused by name (serving-api 15.1).
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Collection, Mapping
from typing import Any

from leadline.core.errors import NotSupported

logger = logging.getLogger(__name__)

# setting -> why it has no effect
SWITCHES = {
    "trust_remote_code": "no code is ever loaded from a checkpoint",
    "enable_chunked_prefill": "prefill is always chunked",
    "disable_log_requests": "requests are logged without their text unless asked for",
    "disable_log_stats": "one line is logged per request, and metrics are always there",
    "disable_uvicorn_access_log": "there is none",
    "disable_custom_all_reduce": "there is one rank",
    "disable_frontend_multiprocessing": "the engine always has its own process",
    "disable_hybrid_kv_cache_manager": "there is one cache for all layers",
    "enable_auto_tool_choice": "it is always on",
    "enable_expert_parallel": "one rank holds all experts",
    "enable_dbo": "there is one rank",
    "enable_eplb": "one rank holds all experts",
    "enable_flashinfer_autotune": "flashinfer is not used",
    "enable_prompt_tokens_details": "they are always sent",
    "enable_sleep_mode": "there is none",
    "language_model_only": "images are not served",
}
# setting -> what its being on means here, where that setting is not given itself
MEANINGS: dict[str, tuple[str, str]] = {"enforce_eager": ("cuda_graphs", "off")}
VALUES = {
    "additional_config": "it is for plugins, and there are none",
    "all2all_backend": "one rank holds all experts",
    "allowed_local_media_path": "images are not served",
    "allowed_media_domains": "images are not served",
    "attention_backend": "there is one",
    "attention_config": "the index cache follows --kv-cache-dtype",
    "compilation_config": "nothing is compiled",
    "data_parallel_address": "there is one rank",
    "data_parallel_backend": "there is one rank",
    "data_parallel_rpc_port": "there is one rank",
    "distributed_executor_backend": "there is one rank",
    "engram_config": "--engram-tables and --engram-shared-memory say where tables lie",
    "kernel_config": "the device decides",
    "limit_mm_per_prompt": "images are not served",
    "master_addr": "there is one rank",
    "master_port": "there is one rank",
    "max_cudagraph_capture_size": "--max-num-seqs and --max-num-batched-tokens bound graphs",
    "model_loader_extra_config": "loading has nothing to tune",
    "moe_backend": "there is one",
    "optimization_level": "nothing is compiled",
    "profiler_config": "there is no profiler",
    "quantization": "the checkpoint says how it is packed",
    "safetensors_load_strategy": "files are mapped",
    "speculative_config": "there is no draft head yet; answers are the same without",
    "structured_outputs_config": "there is one backend",
    "swap_space": "pages are not swapped out",
    "uvicorn_log_level": "--log-level is for everything",
}
# setting -> (short form or None, the only value, what another value would need)
FIXED: dict[str, tuple[str | None, int | str, str]] = {
    "tensor_parallel_size": ("-tp", 1, "tensor parallelism"),
    "pipeline_parallel_size": ("-pp", 1, "pipeline parallelism"),
    "data_parallel_size": ("-dp", 1, "data parallelism"),
    "data_parallel_size_local": ("-dpl", 1, "data parallelism"),
    "data_parallel_rank": ("-dpn", 0, "data parallelism"),
    "decode_context_parallel_size": ("-dcp", 1, "context parallelism"),
    "nnodes": ("-n", 1, "an engine over several machines"),
    "node_rank": ("-r", 0, "an engine over several machines"),
    "api_server_count": ("-asc", 1, "several API processes"),
    "logprobs_mode": (None, "raw_logprobs", "another kind of log-probability"),
}
# setting -> what it asks for
MISSING = {
    "chat_template": "another chat template",
    "cpu_offload_gb": "keeping weights outside the device",
    "enable_lora": "adapters",
    "headless": "an engine over several machines",
    "hf_overrides": "overriding config.json",
    "kv_transfer_config": "moving caches between engines",
}
# Settings of chats: for commands that have none, they are flags as good as any.
CHAT_FORMAT = ("reasoning_parser", "tool_call_parser", "tokenizer_mode")
NAMES = (*SWITCHES, *MEANINGS, *VALUES, *FIXED, *MISSING, *CHAT_FORMAT)


def add_flags(parser: argparse.ArgumentParser, known: Collection[str]) -> None:
    """Accept the flags, without showing them in ``--help``.

    Args:
        parser: gets them.
        known: settings that it has flags for.
    """
    for name in (*SWITCHES, *MEANINGS):
        parser.add_argument(
            _flag(name), action=argparse.BooleanOptionalAction, help=argparse.SUPPRESS
        )
    for name in (*VALUES, *(name for name in CHAT_FORMAT if name not in known)):
        parser.add_argument(_flag(name), help=argparse.SUPPRESS)
    for name in MISSING:
        parser.add_argument(_flag(name), nargs="?", const=True, help=argparse.SUPPRESS)
    for name, (short, only, _) in FIXED.items():
        flags = [flag for flag in (short, _flag(name)) if flag is not None]
        parser.add_argument(*flags, type=type(only), help=argparse.SUPPRESS, dest=name)


def settle(values: Mapping[str, Any]) -> dict[str, Any]:
    """Translate the settings above that were given, or warn about them.

    Returns:
        The values of other settings.

    Raises:
        NotSupported: a fixed setting has another value, or a setting asks for what is missing.
    """
    kept = {}
    for name, value in values.items():
        if reason := (SWITCHES | VALUES).get(name):
            logger.warning("%s has no effect: %s", _flag(name), reason)
        elif name in MEANINGS:
            setting, meaning = MEANINGS[name]
            if value:
                kept[setting] = values.get(setting, meaning)
        elif name in FIXED:
            _, only, feature = FIXED[name]
            if value != only:
                raise NotSupported(
                    f"{_flag(name)} {value}: {feature} does not exist yet; leave it {only}"
                )
        elif name in MISSING:
            raise NotSupported(f"{_flag(name)}: {MISSING[name]} does not exist here")
        else:
            kept[name] = value
    return kept


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
