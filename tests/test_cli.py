from __future__ import annotations

import contextlib
import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from prompt_toolkit.application import create_app_session
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput

from leadline import __version__
from leadline.cli import bundled_model, main
from leadline.config.engine import EngineConfig
from leadline.config.server import ServerConfig
from leadline.text.chat import ChatInput, ChatPrompt
from leadline.text.encoding import ChatEncoder

ROOT = Path(__file__).parents[1]
SMALL = ["--kv-cache-memory-bytes", "32MiB", "--max-num-seqs", "4"]


def test_usage_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    for argv in ([], ["--help"], ["-h"]):
        assert main(argv) == 0
        shown = capsys.readouterr().out
        for command in ("serve", "chat", "generate", "eval", "inspect"):
            assert f"  {command} " in shown


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"leadline {__version__}\n"


@pytest.mark.parametrize("command", ["serve", "chat", "generate", "eval", "inspect"])
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main([command, "--help"])
    assert exit_.value.code == 0
    assert f"usage: leadline {command}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["sevre"], "unknown command 'sevre'; did you mean serve?"),
        (["serve", "--prot", "1"], "unknown flag --prot; did you mean --port?"),
        (["serve", "--port", "x"], "--port: 'x' is not a whole number"),
        (["serve", "--port", "70000"], "port is 70000; it must lie in 0..65535"),
        (["serve", "a", "b"], "unexpected argument 'b': one is taken, a model"),
        (["serve", "-tp", "2"], "--tensor-parallel-size 2: tensor parallelism does not exist"),
        (["serve", "--dtype", "fp4"], "dtype is 'fp4'; choose one of auto"),
        (["serve", "./nowhere", "--port", "0"], "model is './nowhere', which is neither a folder"),
        (["chat", "--file", "./nowhere"], "file is './nowhere', which cannot be read as text"),
        (["chat", "./nowhere"], "model is './nowhere', which is neither a folder"),
        (["generate"], "generate needs a prompt, or - to read it from standard input"),
        (["generate", "a", "b"], "unexpected argument 'b': one is taken, a prompt"),
        (["generate", "a", "--model", "./nowhere"], "model is './nowhere', which is neither"),
        (["completion", "sh"], "completion is for bash, zsh, "),
        (["serve", "--ssl-keyfile", "k"], "ssl_keyfile is given without ssl_certfile"),
        (["serve", "--port", "0", "--ssl-certfile", "nowhere"], "the certificate or its key"),
        (["eval", "--arms", "replay"], "arms has 'replay'"),
        (["eval", "--quick", "--full"], "quick and full exclude each other"),
        (["eval", "--endpoint", "http://localhost/v1"], "endpoint needs --model"),
        (["inspect", "./nowhere"], "'./nowhere' is neither a folder nor a preset"),
        (["inspect", "--memory", "much"], "memory: 'much' is not a whole number"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_is_one_line_and_code_2(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == 2
    shown = capsys.readouterr().err.splitlines()
    assert len(shown) == 1
    assert shown[0].startswith(f"leadline: error: {message}")


def test_a_port_in_use_is_told_before_the_model_loads(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert main(["serve", "--host", "127.0.0.1", "--port", str(port)]) == 2
    assert f"cannot listen on 127.0.0.1:{port} (Address already in use)" in capsys.readouterr().err


def test_print_config_shows_what_a_server_would_run_with(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LEADLINE_MAX_NUM_SEQS", "5")
    monkeypatch.setenv("LEADLINE_PORT", "1")
    argv = ["serve", "some/model", "--port", "9000", "--served-model-name", "a", "b"]
    assert main([*argv, "--max-model-len", "128k", "--print-config"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["model"] == "some/model"
    assert shown["max_model_len"] == 128 * 1024
    assert shown["scheduler"]["max_num_seqs"] == 5
    assert shown["dtype"] == EngineConfig(model="m").dtype
    assert shown["server"]["port"] == 9000
    assert shown["server"]["served_model_name"] == ["a", "b"]
    assert shown["server"]["host"] == ServerConfig().host


def test_c55_keys_come_from_the_environment_and_are_never_printed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LEADLINE_API_KEY", "secret-1 secret-2")
    monkeypatch.setenv("LEADLINE_ADMIN_API_KEY", "secret-3")
    assert main(["serve", "m", "--print-config"]) == 0
    shown = capsys.readouterr().out
    access = json.loads(shown)["server"]["access"]
    assert (access["api_key"], access["admin_api_key"]) == ("***", "***")
    assert "secret" not in shown
    monkeypatch.undo()
    assert main(["serve", "m", "--print-config"]) == 0
    access = json.loads(capsys.readouterr().out)["server"]["access"]
    assert (access["api_key"], access["admin_api_key"]) == ([], None)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shells_get_completion_of_commands_and_flags(
    shell: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    for word in ("serve", "inspect", "max-model-len", "api-key"):
        assert word in script


@pytest.mark.parametrize(
    ("argv", "model"),
    [
        ([], str(bundled_model())),
        (["--model", "a"], "a"),
        (["b"], "b"),
        (["b", "--model", "a"], "b"),
    ],
    ids=["bundled", "flag", "positional", "both"],
)
def test_the_model_is_positional_flag_or_bundled(
    argv: list[str], model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", *argv, "--print-config"]) == 0
    assert json.loads(capsys.readouterr().out)["model"] == model


def test_generate_prints_the_same_text_for_an_argument_and_for_stdin(
    random_tiny: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = ["--max-tokens", "5", "--temperature", "0", "--ignore-eos", *SMALL]
    flags += ["--model", str(random_tiny)]
    assert main(["generate", "Hello", *flags]) == 0
    told = capsys.readouterr().out
    assert len(told) > 5
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hello"))
    assert main(["generate", *flags, "-"]) == 0
    assert capsys.readouterr().out == told


def test_chat_takes_a_pasted_note_as_one_message_behind_an_attached_one(
    random_tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A terminal sends a paste between two markers, and its ends of lines as returns."""
    note = (ROOT / "docs/examples/note.txt").read_text(encoding="utf-8")
    (tmp_path / "attached.txt").write_text("The tide is low.", encoding="utf-8")
    said = []
    encode = ChatEncoder.encode

    def spy(encoder: ChatEncoder, chat: ChatInput) -> ChatPrompt:
        said.append(chat.messages[-1]["content"])
        return encode(encoder, chat)

    monkeypatch.setattr(ChatEncoder, "encode", spy)
    flags = ["--file", str(tmp_path / "attached.txt"), "--max-tokens", "2", *SMALL]
    with create_pipe_input() as keys, create_app_session(input=keys, output=DummyOutput()):
        pasted = note.replace("\n", "\r")
        keys.send_text(f"\x1b[200~{pasted}\x1b[201~Where is the oil lamp?\r")
        keys.send_text("And the key?\r/exit\r")
        assert main(["chat", str(random_tiny), *flags]) == 0
    assert said == [f"The tide is low.\n\n{note}Where is the oil lamp?", "And the key?"]


def test_an_error_of_the_engine_process_is_one_line_and_code_2(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["generate", "Hello", "--max-model-len", "1m"]) == 2
    shown = capsys.readouterr().err.splitlines()
    assert len(shown) == 1
    assert shown[0].startswith("leadline: error: max_model_len is 1048576, but the model has")


def children(pid: int) -> list[Path]:
    """Where the system describes the processes that a server has started."""
    pids = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [Path("/proc") / child for child in pids]


def is_alive(process: Path) -> bool:
    with contextlib.suppress(OSError):
        return "zombie" not in (process / "status").read_text()
    return False


@contextlib.contextmanager
def running_server(
    model: Path, *flags: str
) -> Iterator[tuple[subprocess.Popen[str], str, list[str]]]:
    """A server process, its base URL and the log so far."""
    command = [sys.executable, "-m", "leadline", "serve", str(model), "--port", "0", *SMALL]
    command += ["--drain-delay", "0", *flags]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        log = []
        try:
            for line in process.stderr:
                log.append(line)
                if found := re.search(r"serves tiny at http://[\d.]+:(\d+)/v1", line):
                    break
            else:
                raise AssertionError("".join(log))
            yield process, f"http://127.0.0.1:{found[1]}", log
        finally:
            process.kill()


@pytest.mark.parametrize(
    ("number", "host", "warns"),
    [(signal.SIGTERM, "127.0.0.1", False), (signal.SIGINT, "0.0.0.0", True)],
    ids=["SIGTERM on loopback", "SIGINT on all addresses"],
)
def test_c6_c57_serve_tells_its_chat_format_answers_and_ends_with_code_0_when_told(
    random_tiny: Path, number: signal.Signals, host: str, warns: bool
) -> None:
    with running_server(random_tiny, "--host", host) as (process, url, log):
        body = {"prompt": "Hello", "max_tokens": 4, "temperature": 0}
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
        assert answer.status_code == 200
        assert answer.json()["model"] == "tiny"
        started = children(process.pid)
        assert started, "the engine has a process of its own"
        process.send_signal(number)
        assert process.stderr is not None
        log += process.stderr
        assert process.wait() == 0
        while any(is_alive(child) for child in started):  # each sees the end of its pipe
            time.sleep(0.01)
    assert any("chat format v41 (model_type is deepseek_v41)" in line for line in log)
    assert any("there are no API keys" in line for line in log) == warns
    assert "Traceback" not in "".join(log)


def test_item_92_the_server_ends_when_its_engine_is_killed(random_tiny: Path) -> None:
    with running_server(random_tiny, "--host", "127.0.0.1") as (process, _, log):
        started = children(process.pid)
        [engine] = (p for p in started if b"spawn_main" in (p / "cmdline").read_bytes())
        os.kill(int(engine.name), signal.SIGKILL)
        assert process.stderr is not None
        log += process.stderr
        assert process.wait() == 2
    assert "leadline: error: the engine process ended by itself" in "".join(log)
