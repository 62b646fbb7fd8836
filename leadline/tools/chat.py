"""``leadline chat``: a conversation in the terminal, streamed as the server would stream it."""

from __future__ import annotations

import asyncio
import signal
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from leadline.config.server import ChatConfig
from leadline.core.client import EngineClient
from leadline.core.errors import ConfigError, EngineDead, LeadlineError
from leadline.core.request import EngineRequest, SamplingParams
from leadline.text.chat import ChatInput, ChatPrompt, Content, Delta, Reasoning
from leadline.text.encoding import ChatEncoder
from leadline.text.output_parser import OutputParser
from leadline.text.sampling_defaults import (
    default_chat_limit,
    sampling_defaults,
    thinking_policy,
    with_end_tokens,
)

GREETING = "Ctrl-C stops an answer. /reset begins anew, /exit ends."


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOptions:
    """How answers are made.

    Attributes:
        file: a text that every conversation begins with, such as a note to ask about.
        thinking: let the model reason before it answers.
        temperature: 0 is greedy; auto is the model's own.
        top_p: share of the probability that tokens are drawn from; auto is the model's own.
        max_tokens: longest answer, reasoning included; auto is the model's own limit.
    """

    file: str | None = None
    thinking: bool = True
    temperature: float | None = None
    top_p: float | None = None
    max_tokens: int | None = None


class ChatSession:
    """A conversation with an engine.

    Args:
        client: the engine.
        encoder: of the model.
        max_model_len: tokens of the conversation and its answer.
        options: what the user chose.
        defaults: what holds where they chose nothing.
        attached: a text that the first message begins with.

    Attributes:
        messages: what was said so far, as OpenAI chat messages.
    """

    def __init__(
        self,
        client: EngineClient,
        encoder: ChatEncoder,
        max_model_len: int,
        options: ChatOptions,
        defaults: ChatConfig,
        attached: str = "",
    ) -> None:
        self.messages: list[dict[str, str]] = []
        self._client = client
        self._encoder = encoder
        self._max_model_len = max_model_len
        self._options = options
        self._defaults = defaults
        self._attached = attached

    async def answer(self, text: str) -> AsyncGenerator[Delta, None]:
        """Say ``text`` and yield the answer; what was yielded is part of the conversation.

        Raises:
            LeadlineError: the request cannot be served, and nothing was said.
        """
        if self._attached and not self.messages:
            text = f"{self._attached}\n\n{text}"
        asked = [*self.messages, {"role": "user", "content": text}]
        prompt = self._encoder.encode(ChatInput(asked, thinking=self._options.thinking))
        sampling = self._sampling(prompt)
        parser = OutputParser(self._encoder.tokenizer, prompt, sampling)
        request = EngineRequest(uuid.uuid4().hex, prompt.token_ids, sampling)
        reply = {"role": "assistant", "content": "", "reasoning_content": ""}
        try:
            async with aclosing(self._client.submit(request)) as outputs:
                async for output in outputs:
                    if output.error:
                        raise LeadlineError(output.error)
                    for delta in parser.push(output):
                        if isinstance(delta, Content):
                            reply["content"] += delta.text
                        elif isinstance(delta, Reasoning):
                            reply["reasoning_content"] += delta.text
                        yield delta
        finally:
            # Also when the reader stopped in the middle: it knows this much of the answer.
            if reply["content"] or reply["reasoning_content"]:
                self.messages = [*asked, reply]

    def _sampling(self, prompt: ChatPrompt) -> SamplingParams:
        options, defaults = self._options, self._defaults
        chosen = {"temperature": options.temperature, "top_p": options.top_p}
        given = thinking_policy(
            {name: value for name, value in chosen.items() if value is not None},
            prompt,
            defaults,
            is_v4=not self._encoder.profile.has_system_marker,
        )
        limit = options.max_tokens or default_chat_limit(prompt, defaults, self._max_model_len)
        params = {**sampling_defaults(defaults), **given, "max_tokens": limit}
        return with_end_tokens(SamplingParams(**params), defaults)


def read_attached(options: ChatOptions) -> str:
    """The text of the options' file, empty without one.

    Raises:
        ConfigError: it cannot be read as text.
    """
    file = options.file
    if file is None:
        return ""
    try:
        return Path(file).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"file is {file!r}, which cannot be read as text ({error})") from error


async def run_chat(
    session: ChatSession, console: Console, read_line: Callable[[], Awaitable[str]]
) -> None:
    """Read lines and show answers until ``/exit`` or the end of the input.

    Args:
        session: the conversation.
        console: where answers are shown.
        read_line: the next line; ``EOFError`` at the end, ``KeyboardInterrupt`` for Ctrl-C.

    Raises:
        EngineDead: the engine has ended.
    """
    console.print(GREETING, style="dim")
    while True:
        try:
            text = (await read_line()).strip()
        except KeyboardInterrupt:
            continue
        except EOFError:
            return
        if text == "/exit":
            return
        if text == "/reset":
            session.messages = []
            console.print("A new conversation.", style="dim")
        elif text:
            await _show_until_interrupted(session, text, console)


async def _show_until_interrupted(session: ChatSession, text: str, console: Console) -> None:
    """Show one answer; Ctrl-C ends it and nothing else."""
    answer = asyncio.create_task(_show(session, text, console))
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, answer.cancel)
    try:
        await answer
    except asyncio.CancelledError:
        console.print("\n(stopped)", style="dim")
    except EngineDead:
        raise
    except LeadlineError as error:
        console.print(f"error: {error}", style="red", markup=False)
    finally:
        loop.remove_signal_handler(signal.SIGINT)


async def _show(session: ChatSession, text: str, console: Console) -> None:
    is_reasoning = False
    async with aclosing(session.answer(text)) as deltas:
        async for delta in deltas:
            if not isinstance(delta, Reasoning | Content):  # no tools, no calls
                continue
            if is_reasoning and isinstance(delta, Content):
                console.print("\n")
            is_reasoning = isinstance(delta, Reasoning)
            console.print(
                delta.text,
                style="dim" if is_reasoning else None,
                end="",
                markup=False,
                soft_wrap=True,
            )
    console.print()
