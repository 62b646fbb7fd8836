"""What importing a part may load; each claim in a fresh interpreter."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

BUNDLED = Path(__file__).parents[1] / "leadline/data/tiny"

# Only what `leadline.LLM` over token ids may need; torch brings its own along.
NOT_NEEDED = (
    "deepseek_recipe",
    "huggingface_hub",
    "msgspec",
    "prometheus_client",
    "prompt_toolkit",
    "psutil",
    "rich",
    "starlette",
    "tqdm",
    "uvicorn",
    "uvloop",
)


def run(program: str) -> None:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_offline_llm_runs_with_torch_numpy_safetensors_and_tokenizers_alone() -> None:
    run(
        f"""
import sys
sys.modules.update(dict.fromkeys({NOT_NEEDED!r}))  # as if they were not installed
from leadline import LLM, SamplingParams
llm = LLM({str(BUNDLED)!r}, skip_tokenizer_init=True, kv_cache_memory_bytes=2**24)
(output,) = llm.generate([[5, 6, 7]], SamplingParams(max_tokens=2, ignore_eos=True))
assert len(output.outputs[0].token_ids) == 2
"""
    )


@pytest.mark.parametrize(
    "module",
    [
        "leadline",
        "leadline.cache.manager",
        "leadline.config.presets",
        "leadline.engine.async_engine",
        "leadline.engine.scheduler",
        "leadline.serving.app",
        "leadline.text.output_parser",
    ],
)
def test_module_starts_without_torch(module: str) -> None:
    run(f"import sys, {module}; assert 'torch' not in sys.modules")
