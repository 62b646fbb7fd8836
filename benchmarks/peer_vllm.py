"""vLLM's front end over scripted tokens: the peer of ``streaming_cost.py``, which starts this.

Runs where vLLM is installed, without a GPU: its server, its output processing and its detokenizer
are the real ones; in place of its engine core stands one that answers every request with the same
tokens. What its front end pays for messages between processes is left out, as on our side.
"""

# mypy: ignore-errors

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import tempfile
import time
from pathlib import Path

import uvloop

os.environ |= {
    "VLLM_TARGET_DEVICE": "cpu",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "CUDA_VISIBLE_DEVICES": "",
}

from common import TOKENIZER_FILE, argument_parser
from streaming_cost import TEXT, Emitter, run_server

# The smallest configuration that its loader knows; no weight of it is ever made.
MODEL = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "vocab_size": 1024,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "torch_dtype": "float32",
}
TOKENIZER = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "eos_token": "<｜end▁of▁sentence｜>",
    "chat_template": "{% for m in messages %}{{ m['content'] }}{% endfor %}",
}


class ScriptedCore:
    """What ``AsyncLLM`` asks of its engine core."""

    engine_ranks_managed = (0,)

    def __init__(self, emitter: Emitter, token_ids: list[int]) -> None:
        from types import SimpleNamespace

        self.resources = SimpleNamespace(engine_dead=False)
        self._emitter = emitter
        self._token_ids = token_ids
        self._open: dict[str, tuple[object, int]] = {}
        self._streams: dict[str, object] = {}
        self._ready = asyncio.Event()

    async def get_supported_tasks_async(self):
        return ("generate",)

    async def add_request_async(self, request):
        count = request.sampling_params.max_tokens
        self._emitter.times[request.request_id] = []
        self._open[request.request_id] = (request, count)
        self._ready.set()

    async def abort_requests_async(self, request_ids):
        for request_id in request_ids:
            self._open.pop(request_id, None)

    async def get_output_async(self):
        from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason

        while not self._open:
            self._ready.clear()
            await self._ready.wait()
        now = await self._emitter.step()
        outputs = []
        for request_id, (request, left) in list(self._open.items()):
            times = self._emitter.times[request_id]
            token_id = self._token_ids[len(times) % len(self._token_ids)]
            times.append(now)
            reason = FinishReason.LENGTH if left == 1 else None
            outputs.append(EngineCoreOutput(request_id, [token_id], finish_reason=reason))
            if left == 1:
                del self._open[request_id]
            else:
                self._open[request_id] = (request, left - 1)
        return EngineCoreOutputs(outputs=outputs, timestamp=time.monotonic())

    def shutdown(self, timeout=None):
        pass


def main() -> None:
    """Serve until interrupted."""
    parser = argument_parser(__doc__)
    parser.add_argument("--pace", type=float)
    parser.add_argument("--report", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder)
        (model / "config.json").write_text(json.dumps(MODEL))
        (model / "tokenizer_config.json").write_text(json.dumps(TOKENIZER))
        shutil.copy(TOKENIZER_FILE, model)
        with contextlib.suppress(KeyboardInterrupt):
            uvloop.run(serve(model, options.pace, options.report))


async def serve(model: Path, pace: float, report: Path) -> None:
    """Put the server together as its own command does, with the scripted core inside."""
    import tokenizers
    import uvicorn
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.common.cli_args import make_arg_parser
    from vllm.entrypoints.launchers.api_server.app_state import init_app_state
    from vllm.entrypoints.launchers.app import build_app
    from vllm.utils.argparse_utils import FlexibleArgumentParser
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.core_client import EngineCoreClient

    emitter = Emitter(pace)
    ids = tokenizers.Tokenizer.from_file(str(model / "tokenizer.json")).encode(TEXT).ids
    core = ScriptedCore(emitter, ids)
    EngineCoreClient.make_async_mp_client = staticmethod(lambda **_: core)
    arguments = ["--model", str(model), "--max-model-len", "8192", "--disable-log-stats"]
    args = make_arg_parser(FlexibleArgumentParser()).parse_args(arguments)
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs.from_cli_args(args))
    tasks = await engine.get_supported_tasks()
    app = build_app(args, tasks, engine.model_config)
    await init_app_state(engine, app.state, args, tasks)
    config = uvicorn.Config(app, port=0, log_config=None, access_log=False, http="httptools")
    await run_server(uvicorn.Server(config), emitter, report)


if __name__ == "__main__":
    main()
