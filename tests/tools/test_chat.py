from __future__ import annotations

import asyncio
import io
import os
import signal
from collections.abc import Awaitable, Callable, Iterable
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from leadline.config.server import ChatConfig
from leadline.core.errors import BadRequest, ConfigError, EngineDead
from leadline.text.chat import Content, Delta, Reasoning
from leadline.text.encoding import ChatEncoder
from leadline.text.tokenizer import Tokenizer
from leadline.tools.chat import ChatOptions, ChatSession, read_attached, run_chat
from tests.serving.scripted import ScriptedEngine

DIM = "\x1b[2m"


@pytest.fixture(scope="module")
def encoder(tokenizer: Tokenizer) -> ChatEncoder:
    return ChatEncoder(tokenizer)


def scripted(encoder: ChatEncoder, text: str, **changes: Any) -> ScriptedEngine:
    """Answers with ``text``, a token a step."""
    eos = encoder.tokenizer.eos_token_id
    ids = [*encoder.tokenizer.encode(text), eos]
    return ScriptedEngine([[token_id] for token_id in ids], eos, **changes)


def make_session(
    engine: ScriptedEngine,
    encoder: ChatEncoder,
    *,
    defaults: dict[str, Any] | None = None,
    attached: str = "",
    **options: Any,
) -> ChatSession:
    config = ChatConfig(override_generation_config=defaults)
    return ChatSession(engine, encoder, 4096, ChatOptions(**options), config, attached)


async def ask(session: ChatSession, text: str) -> list[Delta]:
    async with aclosing(session.answer(text)) as deltas:
        return [delta async for delta in deltas]


def content_of(deltas: Iterable[Delta]) -> str:
    return "".join(delta.text for delta in deltas if isinstance(delta, Content))


def reasoning_of(deltas: Iterable[Delta]) -> str:
    return "".join(delta.text for delta in deltas if isinstance(delta, Reasoning))


def lines_of(*lines: str | BaseException) -> Callable[[], Awaitable[str]]:
    rest = iter(lines)

    async def read_line() -> str:
        line = next(rest, EOFError())
        if isinstance(line, BaseException):
            raise line
        return line

    return read_line


def make_console() -> tuple[Console, io.StringIO]:
    shown = io.StringIO()
    return Console(file=shown, force_terminal=True, width=80, highlight=False), shown


def test_an_answer_arrives_in_pieces_and_joins_the_next_prompt(encoder: ChatEncoder) -> None:
    engine = scripted(encoder, "let me see</think>The answer")
    session = make_session(engine, encoder)
    deltas = asyncio.run(ask(session, "What is it?"))
    assert len(deltas) > 2
    assert reasoning_of(deltas) == "let me see"
    assert content_of(deltas) == "The answer"
    asyncio.run(ask(session, "Sure?"))
    second = encoder.tokenizer.decode(engine.requests[1].prompt_token_ids)
    assert "What is it?" in second
    assert "The answer" in second
    assert second.index("The answer") < second.index("Sure?")


@pytest.mark.parametrize(("thinking", "tail"), [(True, "<think>"), (False, "</think>")])
def test_options_shape_the_request(encoder: ChatEncoder, thinking: bool, tail: str) -> None:
    engine = scripted(encoder, "x")
    options: dict[str, Any] = {
        "thinking": thinking,
        "temperature": 0.5,
        "top_p": 0.9,
        "max_tokens": 7,
    }
    asyncio.run(ask(make_session(engine, encoder, **options), "hi"))
    [request] = engine.requests
    assert encoder.tokenizer.decode(request.prompt_token_ids).endswith(tail)
    assert request.sampling.temperature == 0.5
    assert request.sampling.top_p == 0.9
    assert request.sampling.max_tokens == 7


def test_without_a_limit_the_models_own_holds(encoder: ChatEncoder) -> None:
    engine = scripted(encoder, "x")
    asyncio.run(ask(make_session(engine, encoder), "hi"))
    [request] = engine.requests
    assert request.sampling.max_tokens == 4096 - len(request.prompt_token_ids)


def test_what_nobody_chose_is_the_models_own(encoder: ChatEncoder) -> None:
    engine = scripted(encoder, "x")
    own = {"temperature": 0.25, "top_p": 0.5, "top_k": 7, "max_new_tokens": 30, "eos_token_id": [9]}
    asyncio.run(ask(make_session(engine, encoder, defaults=own, top_p=0.75), "hi"))
    sampling = engine.requests[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.25, 0.75, 7)
    assert (sampling.max_tokens, sampling.stop_token_ids) == (30, (9,))


def test_an_attached_text_begins_every_conversation(encoder: ChatEncoder) -> None:
    session = make_session(scripted(encoder, "x"), encoder, attached="A note.")
    asyncio.run(ask(session, "one"))
    asyncio.run(ask(session, "two"))
    assert [message["content"] for message in session.messages[::2]] == ["A note.\n\none", "two"]
    session.messages = []
    asyncio.run(ask(session, "three"))
    assert session.messages[0]["content"] == "A note.\n\nthree"


def test_a_file_is_attached_as_text_or_named(tmp_path: Path) -> None:
    file = tmp_path / "note.txt"
    file.write_text("Berth 7 \N{EM DASH} free.\n", encoding="utf-8")
    assert read_attached(ChatOptions(file=str(file))) == "Berth 7 \N{EM DASH} free."
    assert read_attached(ChatOptions()) == ""
    file.write_bytes(b"\xff")
    for name in (file, tmp_path, tmp_path / "nowhere"):
        with pytest.raises(ConfigError, match=f"file is '{name}', which cannot be read as text"):
            read_attached(ChatOptions(file=str(name)))


def test_an_answer_that_is_left_early_is_remembered_as_far_as_it_came(
    encoder: ChatEncoder,
) -> None:
    engine = scripted(encoder, "one two three")
    session = make_session(engine, encoder, thinking=False)

    async def leave_after_the_first() -> str:
        async with aclosing(session.answer("count")) as deltas:
            async for delta in deltas:
                return content_of([delta])
        raise AssertionError("no delta came")

    first = asyncio.run(leave_after_the_first())
    assert session.messages[-1]["content"] == first
    assert engine.aborted == [engine.requests[0].request_id]


def test_a_refused_message_is_not_part_of_the_conversation(encoder: ChatEncoder) -> None:
    session = make_session(scripted(encoder, "x", refuse=BadRequest("too long")), encoder)
    with pytest.raises(BadRequest, match="too long"):
        asyncio.run(ask(session, "hi"))
    assert session.messages == []


def test_the_terminal_dims_reasoning_and_leaves_markup_alone(encoder: ChatEncoder) -> None:
    engine = scripted(encoder, "hmm</think>[bold]1 + 1[/bold]")
    console, shown = make_console()
    asyncio.run(run_chat(make_session(engine, encoder), console, lines_of("hi", "/exit")))
    reasoning, _, content = shown.getvalue().rpartition(DIM)[2].partition("\n\n")
    assert "m" in reasoning
    assert "[bold]1 + 1[/bold]" in content


def test_reset_forgets_and_exit_and_the_end_of_input_leave(encoder: ChatEncoder) -> None:
    engine = scripted(encoder, "x")
    session = make_session(engine, encoder)
    console, _ = make_console()
    asyncio.run(run_chat(session, console, lines_of("one", "/reset", "two", "", "/exit", "three")))
    assert len(engine.requests) == 2
    assert [message["content"] for message in session.messages][:1] == ["two"]
    asyncio.run(run_chat(session, console, lines_of()))


def test_ctrl_c_at_the_prompt_asks_again(encoder: ChatEncoder) -> None:
    engine = scripted(encoder, "x")
    console, _ = make_console()
    lines = lines_of(KeyboardInterrupt(), "hi")
    asyncio.run(run_chat(make_session(engine, encoder), console, lines))
    assert len(engine.requests) == 1


def test_ctrl_c_stops_the_answer_and_not_the_program(encoder: ChatEncoder) -> None:
    tokenizer = encoder.tokenizer
    words = [tokenizer.encode("one two three"), tokenizer.encode(" four")]
    engine = ScriptedEngine(words, tokenizer.eos_token_id, gate=asyncio.Event())  # never set
    session = make_session(engine, encoder, thinking=False)
    console, shown = make_console()

    async def scenario() -> None:
        chat = asyncio.create_task(run_chat(session, console, lines_of("count", "again")))
        for number in (1, 2):
            while shown.getvalue().count("one two") < number:
                await asyncio.sleep(0)
            os.kill(os.getpid(), signal.SIGINT)
            while shown.getvalue().count("(stopped)") < number:
                await asyncio.sleep(0)
        await chat

    asyncio.run(asyncio.wait_for(scenario(), timeout=5))
    assert engine.aborted == [request.request_id for request in engine.requests]
    assert [message["role"] for message in session.messages] == ["user", "assistant"] * 2


def test_errors_are_shown_and_the_chat_goes_on(encoder: ChatEncoder) -> None:
    engine = scripted(encoder, "x", refuse=BadRequest("the prompt is [too] long"))
    console, shown = make_console()
    asyncio.run(run_chat(make_session(engine, encoder), console, lines_of("a", "b")))
    assert shown.getvalue().count("error: the prompt is [too] long") == 2


def test_a_dead_engine_ends_the_chat(encoder: ChatEncoder) -> None:
    engine = scripted(encoder, "x", refuse=EngineDead("the engine process ended"))
    console, _ = make_console()
    with pytest.raises(EngineDead):
        asyncio.run(run_chat(make_session(engine, encoder), console, lines_of("a", "b")))
