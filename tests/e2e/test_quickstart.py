"""The first five minutes of ``docs/quickstart.md``, with the bundled model, as they are written."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from prompt_toolkit.application import create_app_session
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput

from leadline.cli import bundled_model, main
from tests.e2e.process import Served, running
from tests.test_docs import ROOT, blocks

PAGE = ROOT / "docs/quickstart.md"
SMALL = ("--kv-cache-memory-bytes", "32MiB", "--max-num-seqs", "4")
EXAMPLES = [block for block in blocks(PAGE, "python") if block.id.startswith("Five minutes")]


@pytest.fixture(scope="module")
def bundled() -> Iterator[Served]:
    """A server of the bundled model."""
    with running(bundled_model(), *SMALL) as served:
        yield served


@pytest.mark.parametrize("code", EXAMPLES)
def test_examples_print_what_their_comments_say(
    bundled: Served, capsys: pytest.CaptureFixture[str], code: str
) -> None:
    names: dict[str, Any] = {}
    try:
        exec(code.replace("http://localhost:8000", bundled.url), names)
    finally:
        names["client"].close()
    said = re.findall(r"^print\(.*\)  # (.+)$", code, re.M)
    assert said
    assert capsys.readouterr().out.splitlines() == said


def test_the_terminal_shows_what_the_page_shows(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    [session] = blocks(PAGE, "text")
    command, *lines = session.values[0].splitlines()
    asked = [line.removeprefix("> ") for line in lines if line.startswith("> ")]
    monkeypatch.chdir(ROOT)
    with create_pipe_input() as keys, create_app_session(input=keys, output=DummyOutput()):
        keys.send_text("".join(f"{line}\r" for line in asked))
        assert main([*command.removeprefix("$ leadline ").split(), *SMALL]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown == [line for line in lines if not line.startswith("> ")]
