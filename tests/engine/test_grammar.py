from __future__ import annotations

import gc
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier, Event
from typing import ClassVar

import numpy as np
import pytest

from leadline.core.errors import BadRequest
from leadline.core.request import Constraint
from leadline.engine import grammar
from leadline.engine.constraint import TokenMasks
from leadline.engine.grammar import GrammarCompiler
from tests.fakes import VOCAB_SIZE
from tests.grammars import ID_OF, THINK_END, TOOL, write_tokenizer


@pytest.fixture
def compiler(tmp_path: Path) -> GrammarCompiler:
    return GrammarCompiler(write_tokenizer(tmp_path))


RULES = "\n".join(f'r{i}: "a{i}" | r{i + 1}' for i in range(20_000))
DEEP = f'start: r0\n{RULES}\nr20000: "b"'
SLOW = "start: " + "|".join(f'"abc{i}"' for i in range(60_000))


def error_of(compiler: GrammarCompiler, text: str) -> BadRequest:
    error = compiler.compile(Constraint(text)).exception()
    assert isinstance(error, BadRequest)
    assert (error.code, error.param) == ("invalid_schema", "structured_outputs")
    return error


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("start: (", "Expected token"),
        ("start: /a(?=b)/", "look-ahead"),
        ('start: %json {"type": "nothing"}', "Invalid type: nothing"),
        ('start: %json {"type": "string", "if": {}}', "Unimplemented keys.*if"),
        ("start: %json " + '{"items": ' * 200 + "{}" + "}" * 200, "recursion limit"),
    ],
    ids=["syntax", "regex", "schema", "keyword", "nesting"],
)
def test_c43_what_cannot_be_compiled_is_a_bad_request_that_says_why(
    compiler: GrammarCompiler, text: str, message: str
) -> None:
    with pytest.raises(BadRequest, match=message):
        raise error_of(compiler, text)


def test_c43_a_grammar_that_crashes_the_compiler_harms_nobody_else(
    compiler: GrammarCompiler,
) -> None:
    assert "nested too deeply" in str(error_of(compiler, DEEP))
    assert compiler.compile(Constraint('start: "a"')).result()


def test_c43_a_grammar_that_takes_too_long_is_given_up(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar, "PROBE_SECONDS", 0.1)
    assert "takes more than 0.1 s" in str(error_of(compiler, SLOW))


def test_what_was_compiled_is_remembered_and_what_failed_is_tried_again(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar, "MAX_CACHED", 2)
    good = compiler.compile(Constraint('start: "a"'))
    good.result()
    assert compiler.compile(Constraint('start: "a"')) is good
    bad = compiler.compile(Constraint("start: ("))
    assert bad.exception() is not None
    assert compiler.compile(Constraint("start: (")) is not bad
    compiler.compile(Constraint('start: "b"')).result()
    assert compiler.compile(Constraint('start: "a"')) is not good  # the oldest of three


def test_what_was_cancelled_in_the_queue_is_compiled_when_it_comes_again(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler, "_threads", ThreadPoolExecutor(1))
    hold = Event()
    compiler._threads.submit(hold.wait)
    queued = compiler.compile(Constraint('start: "a"'))
    assert queued.cancel()
    again = compiler.compile(Constraint('start: "a"'))
    hold.set()
    assert again.result()


def test_few_large_grammars_are_remembered(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar, "MAX_CACHED_CHARACTERS", 30)
    known = [Constraint(after=((TOOL, f'start: "{name}"'),)) for name in "abc"]  # of 10 each
    first, second, third = map(compiler.compile, known)
    assert compiler.compile(Constraint('start: "d"')).result()
    assert [compiler.compile(constraint) for constraint in known[1:]] == [second, third]
    assert compiler.compile(known[0]) is not first
    assert compiler.compile(Constraint(f'start: "{"a" * 50}"')).result()


def test_the_processes_that_check_grammars_end_with_their_compiler(tmp_path: Path) -> None:
    compiler = GrammarCompiler(write_tokenizer(tmp_path))
    compiler.compile(Constraint('start: "a"')).result()
    probe = compiler._idle_probe
    assert probe is not None
    pid = probe._process.pid
    del compiler, probe
    gc.collect()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_grammars_that_come_together_leave_one_process(compiler: GrammarCompiler) -> None:
    held = Barrier(3)

    class Probe(grammar._Probe):
        def check(self, text: str) -> str:
            held.wait()  # so that none is idle when the next one is wanted
            self.pids.append(self._process.pid)
            return super().check(text)

        pids: ClassVar[list[int]] = []

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grammar, "_Probe", Probe)
        for future in [compiler.compile(Constraint(f'start: "{i}"')) for i in range(3)]:
            future.result()
    assert len(set(Probe.pids)) == 3
    assert compiler._idle_probe is not None
    for pid in {*Probe.pids} - {compiler._idle_probe._process.pid}:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_a_grammar_is_not_blamed_for_a_checking_process_that_was_killed(
    compiler: GrammarCompiler,
) -> None:
    compiler.compile(Constraint('start: "a"')).result()
    probe = compiler._idle_probe
    assert probe is not None
    probe._process.kill()
    probe._process.wait()
    assert compiler.compile(Constraint('start: "b"')).result()


def test_no_marker_is_text_whatever_its_file_says(compiler: GrammarCompiler) -> None:
    state = compiler.compile(Constraint("start: /(?s:.*)/")).result()
    assert state.matcher is not None
    bits = TokenMasks().fill([state.matcher], VOCAB_SIZE).view(np.uint8)
    allowed = set(np.flatnonzero(np.unpackbits(bits, bitorder="little")).tolist())
    assert set(ID_OF.values()) < allowed
    assert not allowed & {THINK_END, TOOL}
