"""The ``leadline`` command: the place that wires parts together."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import shlex
import socket
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from leadline import __version__
from leadline.config.args import FlagParser, closest, from_values, settings
from leadline.config.engine import CacheConfig, EngineConfig
from leadline.config.optimization import make_engine_config
from leadline.config.server import ChatConfig, ServerConfig, shown
from leadline.core.errors import ConfigError, LeadlineError

if TYPE_CHECKING:
    from starlette.applications import Starlette

    from leadline.engine.async_engine import AsyncEngine
    from leadline.text.tokenizer import Tokenizer
    from leadline.tools.chat import ChatOptions
    from leadline.tools.generate import GenerateOptions

KindT = TypeVar("KindT", bound=str)

USAGE = """\
usage: leadline COMMAND ...

  serve [MODEL]         OpenAI-compatible HTTP server
  chat [MODEL]          chat in the terminal
  generate PROMPT       complete a text; - reads it from standard input
  bench KIND [MODEL]    latency or throughput of the engine in this process
  profile KIND [MODEL]  where the time of a step goes, beside what the GPU could do
  eval [MODEL]          what a model can do, and what lossy switches cost it
  inspect [MODEL]       layers, parameters, cache bytes, what fits in a memory
  completion SHELL      completion for bash, zsh or fish: eval "$(leadline completion bash)"

Without MODEL the small one that comes with the package is used.
`leadline COMMAND --help` lists flags; `leadline --version` prints the version.
"""


def bundled_model() -> Path:
    """The checkpoint that comes with the package."""
    return Path(__file__).parent / "data" / "tiny"


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Returns:
        The exit code: 0, 2 after an error that is told in one line, 130 after Ctrl-C.
    """
    command, *rest = (sys.argv[1:] if argv is None else argv) or ["--help"]
    try:
        if command in ("-h", "--help"):
            print(USAGE, end="")
        elif command == "--version":
            print(f"leadline {__version__}")
        elif command in COMMANDS:
            COMMANDS[command](rest)
        else:
            raise ConfigError(f"unknown command {command!r}{closest(command, COMMANDS)}")
    except LeadlineError as error:
        message = " ".join(str(error).split())  # some libraries' messages are paragraphs
        print(f"leadline: error: {message}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


def serve(argv: Sequence[str]) -> None:
    """``leadline serve [MODEL] [flags]``."""
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    values, positionals = _serve_parser().parse(argv, os.environ)
    engine_config = _engine_config(values, positionals)
    server_config = from_values(ServerConfig, values)
    if "print_config" in values:
        resolved = {**shown(engine_config), "server": shown(server_config)}
        print(json.dumps(resolved, indent=2))
        return

    import uvloop

    from leadline.serving.listen import bind
    from leadline.serving.logs import configure_logging

    configure_logging(server_config.telemetry)

    # Before the model loads: a port that is taken should not cost minutes.
    with bind(server_config) as listener:
        uvloop.run(_serve(engine_config, server_config, listener))


def _serve_parser() -> FlagParser:
    parser = FlagParser(
        "leadline serve", "[MODEL]", "Serve a model over HTTP.", [EngineConfig, ServerConfig]
    )
    parser.add_argument("--print-config", action="store_true", help="print all settings and exit")
    return parser


async def _serve(
    engine_config: EngineConfig, server_config: ServerConfig, listener: socket.socket
) -> None:
    from leadline.serving.app import build_app
    from leadline.serving.context import ModelInfo
    from leadline.serving.listen import announce
    from leadline.serving.run import ServerProcess

    @asynccontextmanager
    async def load() -> AsyncIterator[tuple[Starlette, AsyncEngine]]:
        folder = await asyncio.to_thread(_checkpoint, engine_config)
        tokenizer = await asyncio.to_thread(_load_tokenizer, folder)
        async with _engine(engine_config) as engine:
            model = engine_config.model
            model_info = ModelInfo(
                root=Path(model).resolve().name if Path(model).is_dir() else model,
                max_model_len=engine.limits.max_model_len,
                vocab_size=engine.limits.vocab_size,
                max_open=engine.limits.max_open,
            )
            settings = shown(engine_config)
            app = build_app(engine, tokenizer, model_info, server_config, settings, folder)
            announce(app.state.server, listener)
            yield app, engine

    await ServerProcess(server_config, load).run(listener)


def chat(argv: Sequence[str]) -> None:
    """``leadline chat [MODEL] [flags]``."""
    from leadline.tools.chat import ChatOptions

    values, positionals = _chat_parser().parse(argv, os.environ)
    asyncio.run(_chat(_engine_config(values, positionals), from_values(ChatOptions, values)))


def _chat_parser() -> FlagParser:
    from leadline.tools.chat import ChatOptions

    return FlagParser(
        "leadline chat", "[MODEL]", "Chat in the terminal.", [ChatOptions, EngineConfig]
    )


async def _chat(config: EngineConfig, options: ChatOptions) -> None:
    from prompt_toolkit import PromptSession
    from rich.console import Console

    from leadline.text.encoding import ChatEncoder
    from leadline.text.profiles import choose_profile
    from leadline.text.sampling_defaults import with_generation_config
    from leadline.tools.chat import ChatSession, read_attached, run_chat

    attached = read_attached(options)  # before the model loads, as its mistakes cost no minutes
    folder = _checkpoint(config)
    encoder = ChatEncoder(_load_tokenizer(folder), choose_profile("auto", folder))
    defaults = with_generation_config(ChatConfig(), folder)
    async with _engine(config) as engine:
        limit = engine.limits.max_model_len
        session = ChatSession(engine, encoder, limit, options, defaults, attached)
        lines: PromptSession[str] = PromptSession("> ")
        await run_chat(session, Console(highlight=False), lines.prompt_async)


def generate(argv: Sequence[str]) -> None:
    """``leadline generate PROMPT [flags]``."""
    from leadline.tools.generate import GenerateOptions

    values, positionals = _generate_parser().parse(argv, os.environ)
    prompt = _single(positionals, "a prompt, or - to read it from standard input")
    if prompt is None:
        raise ConfigError("generate needs a prompt, or - to read it from standard input")
    if prompt == "-":
        prompt = sys.stdin.read()
    config = _engine_config(values, [])
    asyncio.run(_generate(config, prompt, from_values(GenerateOptions, values)))


def _generate_parser() -> FlagParser:
    from leadline.tools.generate import GenerateOptions

    return FlagParser(
        "leadline generate", "PROMPT", "Complete a text.", [GenerateOptions, EngineConfig]
    )


async def _generate(config: EngineConfig, prompt: str, options: GenerateOptions) -> None:
    from leadline.text.sampling_defaults import with_generation_config
    from leadline.tools.generate import generate_text

    folder = _checkpoint(config)
    tokenizer = _load_tokenizer(folder)
    defaults = with_generation_config(ChatConfig(), folder)
    async with _engine(config) as engine:
        async with aclosing(generate_text(engine, tokenizer, prompt, options, defaults)) as pieces:
            async for piece in pieces:
                print(piece, end="", flush=True)
        print()


def evaluate(argv: Sequence[str]) -> None:
    """``leadline eval [MODEL] [flags]``."""
    from leadline.eval.command import eval_main
    from leadline.eval.options import EvalOptions

    values, positionals = _eval_parser().parse(argv, os.environ)
    options = from_values(EvalOptions, values)
    known = {setting.name for setting in settings(EngineConfig)}
    given = {name: value for name, value in values.items() if name in known}
    if options.endpoint is None:
        given["model"] = _engine_config(values, positionals).model
    elif positionals:
        given["model"] = _single(positionals, "a model")
    eval_main(options, given, shlex.join(["leadline", "eval", *argv]))


def _eval_parser() -> FlagParser:
    from leadline.eval.options import EvalOptions

    return FlagParser(
        "leadline eval",
        "[MODEL]",
        "Measure a model, and arms of it over the same prompts.",
        [EvalOptions, EngineConfig],
    )


def bench(argv: Sequence[str]) -> None:
    """``leadline bench latency|throughput [MODEL] [flags]``."""
    from leadline.bench.command import KINDS, bench_main
    from leadline.bench.options import BenchOptions

    values, positionals = _bench_parser().parse(argv, os.environ)
    kind = _kind("bench", KINDS, positionals)
    config = _engine_config(values, positionals[1:])
    bench_main(
        kind, from_values(BenchOptions, values), config, shlex.join(["leadline", "bench", *argv])
    )


def _bench_parser() -> FlagParser:
    from leadline.bench.options import BenchOptions

    return FlagParser(
        "leadline bench",
        "latency|throughput [MODEL]",
        "Measure the engine without HTTP: one batch, or as many requests as are given.",
        [BenchOptions, EngineConfig],
    )


def profile(argv: Sequence[str]) -> None:
    """``leadline profile decode|prefill [MODEL] [flags]``."""
    from leadline.profile.command import KINDS, profile_main
    from leadline.profile.options import ProfileOptions

    values, positionals = _profile_parser().parse(argv, os.environ)
    kind = _kind("profile", KINDS, positionals)
    config = _engine_config(values, positionals[1:])
    command = shlex.join(["leadline", "profile", *argv])
    profile_main(kind, from_values(ProfileOptions, values), config, command)


def _profile_parser() -> FlagParser:
    from leadline.profile.options import ProfileOptions

    return FlagParser(
        "leadline profile",
        "decode|prefill [MODEL]",
        "Where the time of a step goes, beside what the machine could do.",
        [ProfileOptions, EngineConfig],
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectOptions:
    """What is asked about a model.

    Attributes:
        memory: of one device, such as 141GiB; adds what fits in it.
        kv_cache_dtype: records of the cache, as for serving.
    """

    memory: str | None = None
    kv_cache_dtype: str = CacheConfig().kv_cache_dtype


def inspect(argv: Sequence[str]) -> None:
    """``leadline inspect MODEL [--memory SIZE] [--kv-cache-dtype NAME]``."""
    from leadline.tools.inspect import inspect_main

    values, positionals = _inspect_parser().parse(argv, os.environ)
    options = from_values(InspectOptions, values)
    target = _single(positionals, "a folder or a preset") or str(bundled_model())
    inspect_main(target, options.memory, options.kv_cache_dtype)


def _inspect_parser() -> FlagParser:
    return FlagParser(
        "leadline inspect", "[MODEL]", "Describe a checkpoint or a preset.", [InspectOptions]
    )


def completion(argv: Sequence[str]) -> None:
    """``leadline completion SHELL``: a script that the shell evaluates."""
    import shtab

    shell = _single(argv, "a shell")
    if shell not in shtab.SUPPORTED_SHELLS:
        known = ", ".join(shtab.SUPPORTED_SHELLS)
        raise ConfigError(f"completion is for {known}; got {shell!r}")
    parser = argparse.ArgumentParser("leadline")
    commands = parser.add_subparsers()
    for name, make_parser in PARSERS.items():
        command = make_parser()
        commands.add_parser(name, parents=[command], add_help=False, help=command.description)
    print(shtab.complete(parser, shell))


PARSERS: dict[str, Callable[[], FlagParser]] = {
    "serve": _serve_parser,
    "chat": _chat_parser,
    "generate": _generate_parser,
    "bench": _bench_parser,
    "profile": _profile_parser,
    "eval": _eval_parser,
    "inspect": _inspect_parser,
}

COMMANDS: dict[str, Callable[[Sequence[str]], None]] = {
    "serve": serve,
    "chat": chat,
    "generate": generate,
    "bench": bench,
    "profile": profile,
    "eval": evaluate,
    "inspect": inspect,
    "completion": completion,
}


def _engine_config(values: dict[str, Any], positionals: Sequence[str]) -> EngineConfig:
    """The settings; a model that stands alone wins over ``--model``, the bundled one is last."""
    model = _single(positionals, "a model") or values.get("model") or str(bundled_model())
    return make_engine_config({**values, "model": model})


def _kind(command: str, kinds: Sequence[KindT], positionals: Sequence[str]) -> KindT:
    """What the first word chooses."""
    for kind in kinds:
        if positionals[:1] == [kind]:
            return kind
    found = f"; got {positionals[0]!r}" if positionals else ""
    raise ConfigError(f"{command} needs what to measure first, {' or '.join(kinds)}{found}")


def _single(positionals: Sequence[str], what: str) -> str | None:
    if len(positionals) > 1:
        raise ConfigError(f"unexpected argument {positionals[1]!r}: one is taken, {what}")
    return positionals[0] if positionals else None


def _checkpoint(config: EngineConfig) -> Path:
    from leadline.weights.checkpoint import resolve_checkpoint

    return resolve_checkpoint(config.model, config.revision)


def _load_tokenizer(folder: Path) -> Tokenizer:
    from leadline.text.tokenizer import Tokenizer

    return Tokenizer(folder / "tokenizer.json")


@asynccontextmanager
async def _engine(config: EngineConfig) -> AsyncIterator[AsyncEngine]:
    """An engine process for as long as the block runs."""
    from leadline.engine.async_engine import AsyncEngine

    engine = await AsyncEngine.start(config)
    try:
        yield engine
    finally:
        await engine.shutdown()
