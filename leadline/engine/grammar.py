"""Grammars are compiled beside the engine's steps, and first where a crash does no harm. No torch.

The compiler gives up the interpreter's lock, so other requests go on meanwhile. But it has no
clock, and some grammars overflow its stack: each is therefore compiled by a probe process first
(``grammar_probe``), which may be killed, and only then by the engine (serving-api 9.4, C43).
"""

from __future__ import annotations

import contextlib
import json
import logging
import signal
import subprocess
import sys
import threading
import weakref
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from llguidance import LLMatcher

from leadline.core.errors import BadRequest
from leadline.core.request import Constraint
from leadline.engine import grammar_probe
from leadline.engine.constraint import ConstraintState, first_words

logger = logging.getLogger(__name__)

# Of one grammar in the probe; the engine needs about as long again, 10 s together (9.4).
PROBE_SECONDS = 5.0
MAX_WORKERS = 4
MAX_CACHED = 128
# Of all remembered grammars; compiled, a large schema takes some fifty times its own size.
MAX_CACHED_CHARACTERS = 2**23


class TokenizerFile(NamedTuple):
    """What grammars need to know of a tokenizer.

    Attributes:
        path: its ``tokenizer.json``.
        vocab_size: ids of the model, those that the tokenizer does not use included.
    """

    path: Path
    vocab_size: int
    eos_token_id: int


class GrammarCompiler:
    """Compiles constraints in threads; the latest ones are remembered by their content.

    Reading the tokenizer holds the interpreter's lock for most of a second, so it happens when
    this is made, before requests run.
    """

    def __init__(self, tokenizer: TokenizerFile) -> None:
        path, vocab_size, eos_token_id = tokenizer
        self._file = tokenizer
        self._tokenizer = grammar_probe.read_tokenizer(str(path), vocab_size, eos_token_id)
        self._threads = ThreadPoolExecutor(MAX_WORKERS, thread_name_prefix="grammar")
        self._lock = threading.Lock()
        self._idle_probe: _Probe | None = None
        self._cache: OrderedDict[Constraint, Future[ConstraintState]] = OrderedDict()

    def compile(self, constraint: Constraint) -> Future[ConstraintState]:
        """The state before any token, to be copied; the future fails with ``BadRequest``.

        It may be cancelled. What failed is tried again when it comes again: the machine may have
        been busy.
        """
        known = self._cache.pop(constraint, None)
        if known is None or known.cancelled() or (known.done() and known.exception()):
            known = self._threads.submit(self._compile, constraint)
        self._cache[constraint] = known
        excess = sum(map(_num_characters, self._cache)) - MAX_CACHED_CHARACTERS
        while len(self._cache) > 1 and (len(self._cache) > MAX_CACHED or excess > 0):
            oldest, _ = self._cache.popitem(last=False)
            excess -= _num_characters(oldest)
        return known

    def _compile(self, constraint: Constraint) -> ConstraintState:
        at_once = constraint.at_once
        return ConstraintState(
            None if at_once is None else self._matcher(at_once),
            {trigger: self._matcher(grammar) for trigger, grammar in constraint.after},
        )

    def _matcher(self, grammar: str) -> LLMatcher:
        error = self._probe(grammar)
        if not error:
            matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=grammar_probe.LIMITS)
            error = matcher.get_error()
        if error:
            raise BadRequest(
                f"structured_outputs or a strict tool cannot be compiled: {first_words(error)}",
                param="structured_outputs",
                code="invalid_schema",
            )
        return matcher

    def _probe(self, grammar: str) -> str:
        """What a probe says; each thread takes one of its own.

        One is kept for the next grammar: a new one takes a second to start, and each 150 MB.
        """
        probe = self._take_probe()
        error = probe.check(grammar)
        self._idle_probe = probe
        return error

    def _take_probe(self) -> _Probe:
        with self._lock:
            probe, self._idle_probe = self._idle_probe, None
        # Something else may have ended it; a grammar must not be blamed.
        return probe if probe is not None and probe.is_alive else _Probe(self._file)


def _num_characters(constraint: Constraint) -> int:
    return len(constraint.at_once or "") + sum(len(grammar) for _, grammar in constraint.after)


class _Probe:
    """A running ``grammar_probe``; ends when nobody refers to it any more."""

    def __init__(self, tokenizer: TokenizerFile) -> None:
        arguments = [sys.executable, "-P", grammar_probe.__file__, *tokenizer, PROBE_SECONDS]
        self._process = subprocess.Popen(
            [str(argument) for argument in arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C in the terminal is not meant for it
        )
        self._end = weakref.finalize(self, _end, self._process)

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def check(self, grammar: str) -> str:
        """The grammar's error, empty where it compiles; the probe may not outlive it."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        with contextlib.suppress(OSError):  # the answer tells of its end
            stdin.write(json.dumps(grammar).encode() + b"\n")
            stdin.flush()
        answer = stdout.readline()
        if answer:
            return str(json.loads(answer))
        code = self._process.wait()
        self._end()
        if code == -signal.SIGALRM:
            return f"it takes more than {PROBE_SECONDS:g} s; simplify it"
        logger.warning("a grammar ended the process that checks them (exit code %d)", code)
        return "it is nested too deeply or needs too much memory; simplify it"


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and take back what belongs to it."""
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        with contextlib.suppress(OSError):  # what was still to be written is of no use
            pipe.close()
