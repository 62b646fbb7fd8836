"""``leadline chat``: a conversation in the terminal, streamed as the server would stream it."""

from __future__ import annotations

import asyncio
import signal
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass

from rich.console import Console

from leadline.core.client import EngineClient
from leadline.core.errors import EngineDead, LeadlineError
from leadline.core.request import EngineRequest, SamplingParams
from leadline.text.encoding import ChatEncoder
from leadline.text.output_parser import Delta, OutputParser

GREETING = "Ctrl-C stops an answer. /reset begins anew, /exit ends."


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOptions:
    """How answers are made.

    Attributes:
        thinking: let the model reason before it answers.
        temperature: 0 is greedy.
        top_p: share of the probability that tokens are drawn from.
        max_tokens: longest answer, reasoning included; auto is the model's own limit.
    """

    thinking: bool = True
    temperature: float = 1.0
    top_p: float = 1.0
    max_tokens: int | None = None


class ChatSession:
    """A conversation with an engine.

    Attributes:
        messages: what was said so far, as OpenAI chat messages.
    """

    def __init__(
        self, client: EngineClient, encoder: ChatEncoder, max_model_len: int, options: ChatOptions
    ) -> None:
        self.messages: list[dict[str, str]] = []
        self._client = client
        self._encoder = encoder
        self._max_model_len = max_model_len
        self._options = options

    async def answer(self, text: str) -> AsyncGenerator[Delta, None]:
        """Say ``text`` and yield the answer; what was yielded is part of the conversation.

        Raises:
            LeadlineError: the request cannot be served, and nothing was said.
        """
        asked = [*self.messages, {"role": "user", "content": text}]
        prompt = self._encoder.encode(asked, thinking=self._options.thinking)
        limit = self._options.max_tokens or prompt.default_max_tokens(self._max_model_len)
        sampling = SamplingParams(
            temperature=self._options.temperature, top_p=self._options.top_p, max_tokens=limit
        )
        parser = OutputParser(self._encoder, prompt, sampling)
        request = EngineRequest(uuid.uuid4().hex, prompt.token_ids, sampling)
        reply = {"role": "assistant", "content": "", "reasoning_content": ""}
        try:
            async with aclosing(self._client.submit(request)) as outputs:
                async for output in outputs:
                    if output.error:
                        raise LeadlineError(output.error)
                    for delta in parser.push(output):
                        reply["content"] += delta.content or ""
                        reply["reasoning_content"] += delta.reasoning_content or ""
                        yield delta
        finally:
            # Also when the reader stopped in the middle: it knows this much of the answer.
            if reply["content"] or reply["reasoning_content"]:
                self.messages = [*asked, reply]


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
            if is_reasoning and delta.reasoning_content is None:
                console.print("\n")
            is_reasoning = delta.reasoning_content is not None
            console.print(
                delta.reasoning_content or delta.content or "",
                style="dim" if is_reasoning else None,
                end="",
                markup=False,
                soft_wrap=True,
            )
    console.print()
