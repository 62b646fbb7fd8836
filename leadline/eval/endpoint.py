"""The same exercises for any OpenAI server: accuracy alone, since it tells no distributions."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from leadline.core.errors import ConfigError, LeadlineError
from leadline.eval.circumstances import circumstances, progress_bars
from leadline.eval.exercise import Chat
from leadline.eval.measure import Record
from leadline.eval.options import EvalOptions
from leadline.eval.questions import cell_of
from leadline.eval.report import Report
from leadline.eval.scoring import Answer, Call, Expectation
from leadline.eval.suite import choose_parts
from leadline.eval.summary import summarise
from leadline.text.chat import ResponseFormat, Tool

if TYPE_CHECKING:
    from openai import AsyncOpenAI

# A failed request is sent again so often, later each time.
MAX_RETRIES = 4
TIMEOUT_SECONDS = 600.0
# An answer that takes more was not going to be right: the longest here are a few hundred.
MAX_TOKENS = 1024


def evaluate_endpoint(options: EvalOptions, model: str | None, command: str) -> Report:
    """Ask a model that somebody serves at ``options.endpoint``.

    Args:
        options: what is asked; prose is left out.
        model: its name there.
        command: how this was called, for the report.

    Raises:
        ConfigError: the model has no name, or the library is not installed.
        LeadlineError: the server refuses, or fails for good.
    """
    assert options.endpoint is not None
    if model is None:
        raise ConfigError("endpoint needs --model: the name of a model there")
    records = asyncio.run(_ask_all(options, make_client(options.endpoint, options.api_key), model))
    return Report(
        summary=summarise({model: records}),
        arms={model: f"at {options.endpoint}"},
        circumstances={**circumstances(options, command), "model": model},
    )


async def _ask_all(options: EvalOptions, client: AsyncOpenAI, model: str) -> list[Record]:
    records: list[Record] = []
    async with client:
        with progress_bars() as progress:
            for part in choose_parts(options.families):
                if not part.is_chat:
                    continue
                exercises = part.exercises(options.scale, options.suite_seed, options.items)
                turns = judged_turns(e for e in exercises if isinstance(e, Chat))
                bar = progress.add_task(part.family, total=len(turns))
                records += await ask_endpoint(
                    client,
                    model,
                    turns,
                    concurrency=options.concurrency,
                    advance=partial(progress.advance, bar),
                )
    return records


def make_client(url: str, api_key: str | None) -> AsyncOpenAI:
    """A client that tries again where that may help.

    Args:
        url: with its ``/v1``.
        api_key: None for servers that want none.

    Raises:
        ConfigError: the library is not installed.
    """
    if importlib.util.find_spec("openai") is None:
        raise ConfigError("another server is asked with openai; install leadline[eval]")
    from openai import AsyncOpenAI

    return AsyncOpenAI(
        base_url=url,
        api_key=api_key or "none",
        max_retries=MAX_RETRIES,
        timeout=TIMEOUT_SECONDS,
    )


@dataclass(frozen=True, slots=True)
class Turn:
    """An answer that is asked for: the assistant's turn ``place`` of chat ``number``."""

    chat: Chat
    number: int
    place: int
    expectation: Expectation


def judged_turns(chats: Iterable[Chat]) -> list[Turn]:
    """Of every chat those turns whose answers can be wrong."""
    turns = [
        Turn(chat, number, place, Expectation.of_turn(chat, place))
        for number, chat in enumerate(chats)
        for place in range(len(chat.turns()))
    ]
    return [turn for turn in turns if turn.expectation.is_judged]


async def ask_endpoint(
    client: AsyncOpenAI,
    model: str,
    turns: Sequence[Turn],
    *,
    concurrency: int,
    advance: Callable[[], object] = lambda: None,
) -> list[Record]:
    """Records of turns, in their order; what comes before each holds the right answers.

    Args:
        client: of the server.
        model: its name there.
        turns: what is asked.
        concurrency: requests at once.
        advance: called when a turn was answered.

    Raises:
        LeadlineError: the server refuses a request, or fails for good.
    """
    from openai import OpenAIError

    free = asyncio.Semaphore(concurrency)

    async def ask(turn: Turn) -> Record:
        async with free:
            answer = await _answer(client, model, turn.chat, turn.chat.turns()[turn.place])
        advance()
        return Record(
            family=turn.chat.family,
            cell=cell_of(turn.chat, turn.place, turn.expectation),
            dialogue=turn.number,
            correct=turn.expectation.is_met(answer),
            parses=turn.expectation.parses(answer),
        )

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(ask(turn)) for turn in turns]
    except* OpenAIError as errors:
        raise LeadlineError(f"{client.base_url}: {errors.exceptions[0]}") from errors
    return [task.result() for task in tasks]


async def _answer(client: AsyncOpenAI, model: str, chat: Chat, turn: int) -> Answer:
    asked = chat.before(turn)
    fields: dict[str, Any] = {
        "model": model,
        "messages": list(asked.messages),
        "temperature": 0,
        "max_tokens": MAX_TOKENS,
        "extra_body": {"chat_template_kwargs": {"thinking": bool(asked.thinking)}},
    }
    if asked.tools:
        fields["tools"] = [_function(tool) for tool in asked.tools]
    if asked.response_format is not None:
        fields["response_format"] = _format(asked.response_format)
    if asked.reasoning_effort is not None:
        fields["extra_body"]["reasoning_effort"] = asked.reasoning_effort
    completion = await client.chat.completions.create(**fields)
    choice = completion.choices[0]
    calls: Iterable[Any] = choice.message.tool_calls or ()
    return Answer(
        text=choice.message.content or "",
        calls=[Call(call.function.name, call.function.arguments) for call in calls],
        is_cut=choice.finish_reason == "length",
    )


def _function(tool: Tool) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description}
    parameters = {"parameters": tool.parameters} if tool.parameters is not None else {}
    return {"type": "function", "function": {**function, **parameters}}


def _format(form: ResponseFormat) -> dict[str, Any]:
    if form.kind == "json_object":
        return {"type": "json_object"}
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": form.schema}}
