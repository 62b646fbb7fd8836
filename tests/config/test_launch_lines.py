"""C62: launch lines that people published for DeepSeek V4 and V4.1 on vLLM."""

from __future__ import annotations

import shlex
from typing import Any

import pytest

from leadline.config.args import FlagParser, from_values
from leadline.config.engine import EngineConfig
from leadline.config.server import ServerConfig
from leadline.core.errors import NotSupported

GRAPHS = """--compilation-config '{"cudagraph_mode":"FULL_AND_PIECEWISE","custom_ops":["all"]}'"""
PARSERS = (
    "--tokenizer-mode deepseek_v4 --tool-call-parser deepseek_v4 --enable-auto-tool-choice "
    "--reasoning-parser deepseek_v4"
)
PARSERS_41 = PARSERS.replace("deepseek_v4", "deepseek_v41")

# name -> the line behind the program's name, and the feature that it is refused for
LINES: dict[str, tuple[str, str | None]] = {
    "one-gpu": (
        "serve deepseek-ai/DeepSeek-V4-Flash --tensor-parallel-size 1 --pipeline-parallel-size 1 "
        "--kv-cache-dtype fp8 --trust-remote-code --block-size 256 --gpu-memory-utilization 0.92 "
        f"{GRAPHS} --attention_config.use_fp4_indexer_cache True {PARSERS}",
        None,
    ),
    "pro-data-parallel": (
        "serve deepseek-ai/DeepSeek-V4-Pro --trust-remote-code --kv-cache-dtype fp8 "
        "--block-size 256 --enable-expert-parallel --data-parallel-size 8 "
        f"{GRAPHS} --attention_config.use_fp4_indexer_cache=True {PARSERS}",
        "data parallelism",
    ),
    "flash-data-parallel": (
        "serve deepseek-ai/DeepSeek-V4-Flash --trust-remote-code --kv-cache-dtype fp8 "
        f"--block-size 256 --enable-expert-parallel --data-parallel-size 4 {GRAPHS} "
        f"--attention_config.use_fp4_indexer_cache=True {PARSERS}",
        "data parallelism",
    ),
    "two-workstation-cards": (
        "serve /model --served-model-name deepseek-v4-flash --trust-remote-code --host 0.0.0.0 "
        "--port 9201 --tensor-parallel-size 2 --kv-cache-dtype fp8 --block-size 256 "
        "--gpu-memory-utilization 0.95 --max-model-len 136000 --max-num-batched-tokens 12288 "
        "--max-num-seqs 8 --stream-interval 8 --enable-chunked-prefill --enable-prefix-caching "
        f"--enable-flashinfer-autotune {PARSERS} --default-chat-template-kwargs.thinking true "
        f"{GRAPHS} --speculative-config "
        """'{"method":"mtp","num_speculative_tokens":3,"draft_sample_method":"probabilistic"}'""",
        "tensor parallelism",
    ),
    "cluster-of-small-boxes": (
        "serve deepseek-ai/DeepSeek-V4-Flash-0731 --served-model-name deepseek-v4-flash-0731 "
        "--host 0.0.0.0 --port 8888 --trust-remote-code --pipeline-parallel-size 1 "
        "--kv-cache-dtype fp8_ds_mla --block-size 256 --max-model-len 1048576 --max-num-seqs 4 "
        "--max-num-batched-tokens 8264 --max-cudagraph-capture-size 32 "
        '--gpu-memory-utilization 0.75 --compilation-config \'{"cudagraph_mode":"FULL"}\' '
        "--override-generation-config '{\"temperature\":0.0}' --speculative-config "
        """'{"method":"dspark","num_speculative_tokens":5,"draft_sample_method":"greedy"}' """
        "--enable-prefix-caching --async-scheduling --enable-chunked-prefill "
        "--distributed-executor-backend mp --moe-backend auto --enable-flashinfer-autotune "
        f"{PARSERS}",
        None,
    ),
    "other-accelerator": (
        "serve deepseek-ai/DeepSeek-V4-Pro --host localhost --port 8001 --dtype auto "
        "--kv-cache-dtype fp8 --tensor-parallel-size 8 --distributed-executor-backend mp "
        "--trust-remote-code --gpu-memory-utilization 0.9 --max-num-seqs 512 "
        "--tokenizer-mode deepseek_v4 --async-scheduling --speculative-config "
        """'{"method": "mtp", "num_speculative_tokens": 3}' """
        '--compilation-config \'{"cudagraph_mode":"FULL_AND_PIECEWISE"}\'',
        "tensor parallelism",
    ),
    "cache-server": (
        "serve deepseek-ai/DeepSeek-V4-Flash --enable-expert-parallel "
        "--kv-cache-dtype fp8_ds_mla --trust-remote-code --tokenizer-mode deepseek_v4 "
        """--kv-transfer-config '{"kv_connector":"LMCacheMPConnector","kv_role":"kv_both"}'""",
        "moving caches between engines",
    ),
    "regeneration": (
        "serve deepseek-ai/DeepSeek-V4-Flash --host 127.0.0.1 --port 8000 --trust-remote-code "
        "--kv-cache-dtype fp8 --block-size 256 --enable-expert-parallel "
        "--attention_config.use_fp4_indexer_cache=True --moe-backend deep_gemm_mega_moe "
        """--speculative_config '{"method":"mtp","num_speculative_tokens":2}'""",
        None,
    ),
    "v4.1-with-model-flag": (
        "serve --model /models/deepseek-ai/DeepSeek-V4.1-Flash --tokenizer-mode deepseek_v41 "
        "--language-model-only --gpu-memory-utilization 0.95 --served-model-name "
        "/models/deepseek-ai/DeepSeek-V4.1-Flash deepseek-ai/DeepSeek-V4.1-Flash "
        "--trust-remote-code --port 8000 --host 0.0.0.0",
        None,
    ),
    "v4.1-profiling": (
        "serve /models/v41 --served-model-name deepseek-ai/DeepSeek-V4.1-Flash --port 8000 "
        f"--language-model-only {PARSERS_41} "
        """--engram-config '{"cpu_offload":true,"use_thp":true}' """
        """--kernel-config '{"enable_flashinfer_autotune":true}' """
        """--attention-config '{"indexer_kv_dtype":"mxfp4","indexer_sparse_logits":true}' """
        "--kv-cache-dtype fp8 --speculative-config "
        """'{"method":"dspark","num_speculative_tokens":5,"synthetic_acceptance_length":3.51}'""",
        None,
    ),
    "v4.1-two-nodes": (
        "serve /snapshot --served-model-name deepseek-v4.1-flash --host 0.0.0.0 --port 8010 "
        f"{PARSERS_41} --enable-prompt-tokens-details --gpu-memory-utilization 0.65 "
        "--distributed-executor-backend mp --nnodes 2 --node-rank 0 --master-addr 10.200.0.1 "
        "--master-port 29641 --language-model-only --block-size 128",
        "an engine over several machines",
    ),
    "v4.1-pipeline": (
        "serve /models/DeepSeek-V4.1-Flash --host 0.0.0.0 --port 8000 "
        "--served-model-name DeepSeek-V4.1-Flash --pipeline-parallel-size 5 "
        "--tensor-parallel-size 1 --max-num-seqs 4 --kv-cache-dtype fp8_ds_mla "
        """--trust-remote-code --engram-config '{"cpu_offload":true}' --enable-prefix-caching """
        f"--disable-custom-all-reduce {PARSERS_41}",
        "pipeline parallelism",
    ),
}


@pytest.mark.parametrize(("line", "missing"), LINES.values(), ids=LINES.keys())
def test_c62_published_launch_lines_start_or_name_what_is_missing(
    line: str, missing: str | None
) -> None:
    _, *argv = shlex.split(line)
    parser = FlagParser("leadline serve", "[MODEL]", "Serve.", [EngineConfig, ServerConfig])
    if missing is not None:
        with pytest.raises(NotSupported, match=missing):
            parser.parse(argv, {})
        return
    values, positionals = parser.parse(argv, {})
    engine: dict[str, Any] = {**values, "model": values.get("model") or positionals[0]}
    assert from_values(EngineConfig, engine).model.startswith(("deepseek-ai/", "/"))
    assert from_values(ServerConfig, values).port in (8000, 8888)
