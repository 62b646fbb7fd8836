"""Scripted answers for the output parser: what a model writes, and what a client should get."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from leadline.core.request import FinishReason, SamplingParams, TokenOutput
from leadline.text.chat import (
    AnswerStart,
    CallArguments,
    CallStart,
    ChatPrompt,
    Content,
    Delta,
    Reasoning,
    Tool,
    ToolChoice,
)
from leadline.text.output_parser import OutputParser, ParserOptions
from leadline.text.tokenizer import Tokenizer

DSML = "｜DSML｜"
MARKERS = (DSML, "<think>", "</think>")

TOOLS = (
    Tool(
        "run",
        parameters={
            "type": "object",
            "properties": {
                "command": {"type": "string"},
                "count": {"type": "integer"},
                "flag": {"type": "boolean"},
                "items": {"type": "array"},
                "options": {"type": "object"},
                "limit": {"type": ["integer", "null"]},
            },
        },
    ),
    Tool("free"),
)

AUTO = ToolChoice()
DEFAULTS = ParserOptions()


@dataclass
class Answer:
    """All deltas of one answer, joined; and the parser that gave them."""

    parser: OutputParser
    deltas: list[Delta]
    reasoning: str = ""
    content: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)  # (name, JSON arguments)

    def __post_init__(self) -> None:
        for delta in self.deltas:
            if isinstance(delta, Reasoning):
                self.reasoning += delta.text
            elif isinstance(delta, Content):
                self.content += delta.text
            elif isinstance(delta, CallStart):
                assert delta.index == len(self.calls)
                self.calls.append((delta.name, ""))
            else:
                assert delta.index == len(self.calls) - 1
                name, arguments = self.calls[-1]
                self.calls[-1] = (name, arguments + delta.text)

    @property
    def said(self) -> tuple[Any, ...]:
        """What may not depend on how the tokens were cut into steps."""
        parser = self.parser
        counts = (parser.num_tokens, parser.num_reasoning_tokens)
        ending = (parser.finish_reason, parser.stop_reason)
        return self.reasoning, self.content, self.calls, counts, ending

    @property
    def arguments(self) -> list[Any]:
        """The arguments of all calls, parsed; a duplicate key is an error."""
        return [parse_arguments(text) for _, text in self.calls]


def parse_arguments(text: str) -> dict[str, Any]:
    """A JSON object, by a strict reader."""

    def members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        assert len({key for key, _ in pairs}) == len(pairs), f"duplicate keys in {text}"
        return dict(pairs)

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    value = json.loads(text, object_pairs_hook=members, parse_constant=refuse)
    assert isinstance(value, dict)
    return value


def read(
    tokenizer: Tokenizer,
    script: str | Sequence[int],
    *,
    start: AnswerStart = AnswerStart.CONTENT,
    tools: Sequence[Tool] = TOOLS,
    choice: ToolChoice = AUTO,
    reason: FinishReason = FinishReason.STOP,
    sizes: Iterable[int] | None = None,
    options: ParserOptions = DEFAULTS,
    **sampling: Any,
) -> Answer:
    """Parse a script, in steps of ``sizes`` tokens (None: all at once)."""
    ids = tokenizer.encode(script) if isinstance(script, str) else list(script)
    prompt = ChatPrompt((0,), start, True, tools=tuple(tools), tool_choice=choice)
    parser = OutputParser(tokenizer, prompt, SamplingParams(**sampling), options=options)
    deltas: list[Delta] = []
    for step in cut(ids, sizes):
        deltas += parser.push(TokenOutput("r", tuple(step)))
        if parser.finish_reason is not None:
            return Answer(parser, deltas)
    if reason is FinishReason.STOP:
        eos = tokenizer.eos_token_id
        last = TokenOutput("r", (eos,), finish_reason=reason, stop_token_id=eos)
    else:
        last = TokenOutput("r", finish_reason=reason)
    return Answer(parser, deltas + parser.push(last))


def cut(ids: Sequence[int], sizes: Iterable[int] | None) -> Iterator[Sequence[int]]:
    """Consecutive pieces of ``ids``, of the given sizes and then the rest."""
    at = 0
    for size in sizes or ():
        if at >= len(ids):
            return
        yield ids[at : at + size]
        at += size
    yield ids[at:]


def fragments(answer: Answer, index: int = 0) -> list[str]:
    """The pieces in which the arguments of one call came."""
    return [
        delta.text
        for delta in answer.deltas
        if isinstance(delta, CallArguments) and delta.index == index
    ]


def parameter(name: str, value: str, *, string: str | None = "true") -> str:
    """A well-formed parameter."""
    attribute = "" if string is None else f' string="{string}"'
    return f'<{DSML} parameter name="{name}"{attribute}>{value}</{DSML} parameter>\n'


def invoke(*parameters: str, name: str = "run") -> str:
    """A well-formed call."""
    return f'<{DSML} invoke name="{name}">\n{"".join(parameters)}</{DSML} invoke>\n'


def block(*invokes: str) -> str:
    """A well-formed tool block, with the blank line that precedes it."""
    return f"\n\n<{DSML} calls>\n{''.join(invokes)}</{DSML} calls>"


@dataclass(frozen=True)
class Script:
    """What a model writes, and what it means."""

    text: str
    start: AnswerStart
    reasoning: str
    content: str
    calls: list[tuple[str, dict[str, Any]]]


_PROSE = [
    "Let me look.",
    "a < b, c > d\n\nand </b>",
    "List:\n- one\n- two",
    "naïve 漢字 😀",
    "if x<y</think y",
    "",
]
_STRINGS = [
    "echo hi 2>&1",
    "a</b>",
    "</parameter>",
    "cat <",
    "cat </",
    "",
    "\n lead and trail \n",
    "😀 naïve 漢字",
    '"quoted" \\ \t',
    '{"a": 1}',
    "<b>bold</b>" * 9,
    "line\n" * 30,
]
_VALUES: list[tuple[str, str, Any]] = [
    ("count", "3", 3),
    ("flag", "true", True),
    ("items", '[1, "<"]', [1, "<"]),
    ("options", '{"a": {"b": null}}', {"a": {"b": None}}),
    ("limit", "null", None),
    ("other", "1.5e3", 1500.0),
]
_BLOCKS = ["tool_calls", " calls", "calls", "function_calls", "toolcalls", "tool"]


def make_script(rng: random.Random, *, damaged: bool) -> Script:
    """One answer; ``damaged`` draws from the dialects and omissions of serving-api 3.3."""
    start = rng.choice([AnswerStart.REASONING, AnswerStart.CONTENT])
    text = reasoning = ""
    if start is AnswerStart.REASONING:
        reasoning = rng.choice(_PROSE)
        text = f"{_newlines(rng)}{reasoning}{_newlines(rng)}</think>{_newlines(rng)}"
    content = rng.choice(_PROSE)
    text += content
    calls: list[tuple[str, dict[str, Any]]] = []
    if rng.random() < 0.8:
        writer = _DamagedBlock(rng) if damaged else _Block(rng)
        calls = [_make_call(rng) for _ in range(rng.randint(1, 3))]
        text += "\n\n" + writer.write(calls)
    return Script(text, start, reasoning, content, calls)


def _newlines(rng: random.Random) -> str:
    return "\n" * rng.randint(0, 2)


def _make_call(rng: random.Random) -> tuple[str, dict[str, Any]]:
    arguments: dict[str, Any] = {}
    if rng.random() < 0.7:
        arguments["command"] = rng.choice(_STRINGS)
    for name, _, value in rng.sample(_VALUES, rng.randint(0, 3)):
        arguments[name] = value
    return rng.choice(["run", "free", "unknown"]), arguments


class _Block:
    """Writes calls as they should be."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng

    def write(self, calls: list[tuple[str, dict[str, Any]]]) -> str:
        return self.block("".join(self.invoke(*call) for call in calls))

    def block(self, body: str) -> str:
        return f"<{DSML} calls>\n{body}</{DSML} calls>"

    def invoke(self, name: str, arguments: dict[str, Any]) -> str:
        body = "".join(self.parameter(*item) for item in arguments.items())
        return f'<{DSML} invoke name="{name}">\n{body}</{DSML} invoke>\n'

    def parameter(self, name: str, value: Any) -> str:
        if name == "command":
            return parameter(name, value)
        [spelling] = [text for known, text, _ in _VALUES if known == name]
        return parameter(name, spelling, string="false")


class _DamagedBlock(_Block):
    """Writes calls in any dialect, and leaves out what can be left out."""

    def block(self, body: str) -> str:
        name = self.rng.choice(_BLOCKS)
        opening = self.rng.choice([f"<{DSML}{name}>", f"<{DSML}{name} >\n\n", ""])
        closing = self.rng.choice([f"</{DSML}{name}>", f"</{DSML}{name}>\nand more", ""])
        return opening + body + closing

    def invoke(self, name: str, arguments: dict[str, Any]) -> str:
        word = self.rng.choice(["invoke", " invoke", "\n invoke"])
        quote = self.rng.choice("'\"")
        if not arguments and self.rng.random() < 0.5:
            return f"<{DSML}{word} name={quote}{name}{quote} />"
        body = "".join(self.parameter(*item) for item in arguments.items())
        closing = self.rng.choice([f"</{DSML}{word}>", f"</{DSML}{word} >\n \n", ""])
        blank = self.rng.choice(["", "\n", " \n\n "])
        return f"<{DSML}{word}  name = {quote}{name}{quote}>{blank}{body}{closing}"

    def parameter(self, name: str, value: Any) -> str:
        if name == "command":
            spelling, string = value, "true"
        else:
            [spelling] = [text for known, text, _ in _VALUES if known == name]
            string = self.rng.choice(["false", ""])
        word = self.rng.choice(["parameter", " parameter"])
        quote = self.rng.choice("'\"")
        attributes = [f"name={quote}{name}{quote}"]
        if string:
            attributes.append(f"string={quote}{string}{quote}")
        self.rng.shuffle(attributes)
        closings = [f"</{DSML}{word}>", f"</{DSML}{word}>\n\n"]
        if not spelling.endswith("\n"):  # else nobody could tell where it ends
            closings += ["", "\n"]
        closing = self.rng.choice(closings)
        return f"<{DSML}{word} {' '.join(attributes)}>{spelling}{closing}"


def make_corpus() -> list[Script]:
    """240 answers, half of them damaged; always the same."""
    rng = random.Random(20)
    return [make_script(rng, damaged=i % 2 == 1) for i in range(240)]
