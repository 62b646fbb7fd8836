"""The offline API for asyncio: answers as they grow, from an engine in a process of its own."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from pathlib import Path
from types import TracebackType
from typing import Any, Self, Unpack

from leadline.core.errors import BadRequest
from leadline.core.request import EngineRequest, SamplingParams
from leadline.core.streams import merge
from leadline.engine.async_engine import AsyncEngine
from leadline.offline.options import checkpoint_folder, load_tokenizer, read_options
from leadline.offline.outputs import Answer, RequestOutput
from leadline.offline.prompts import ChatFields, Prompt, PromptEncoder, Query
from leadline.text.tokenizer import Tokenizer


class AsyncLLM:
    """A model in a process of its own; made by ``start``, belongs to one event loop.

    Leaving ``async with`` ends the process.
    """

    def __init__(
        self, engine: AsyncEngine, tokenizer: Tokenizer | None, prompts: PromptEncoder
    ) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._prompts = prompts
        self._open: dict[str, Answer] = {}

    @classmethod
    async def start(
        cls,
        model: str | Path,
        *,
        tokenizer: str | Path | None = None,
        skip_tokenizer_init: bool = False,
        **options: Any,
    ) -> Self:
        """Start the engine's process and wait until it is ready; arguments and errors of ``LLM``.

        The process imports the main module: a script calls this below ``if __name__ ==
        "__main__"``.

        Raises:
            EngineDead: the process could not start for a reason that is none of ``LLM``'s.
        """
        config, chat_config = read_options(model, options)
        folder = checkpoint_folder(config)
        loaded = None if skip_tokenizer_init else load_tokenizer(tokenizer, folder)
        engine = await AsyncEngine.start(config)
        limit = engine.limits.max_model_len
        prompts = PromptEncoder(loaded, chat_config, limit, folder, preset=config.model)
        return cls(engine, loaded, prompts)

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Complete a prompt: the whole result so far, again and again until it is finished.

        A slow reader misses results, never tokens. Leaving the loop or cancelling its task aborts
        the request.

        Args:
            prompt: one, in any form that ``LLM.generate`` takes.
            sampling_params: of its ``n`` answers; None as in ``LLM``.
            request_id: for ``abort``; None makes one.

        Raises:
            BadRequest: it cannot be served as it stands, or the id is in use.
            EngineDead: the engine's process has ended.
            LeadlineError: the forward pass failed.
        """
        # In a thread, as a long prompt takes long: other answers go on meanwhile.
        query = await asyncio.to_thread(
            self._prompts.completion, prompt, sampling_params, param="prompt"
        )
        async with aclosing(self._run(query, request_id)) as results:
            async for result in results:
                yield result

    async def chat(
        self,
        messages: Sequence[Any],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        **fields: Unpack[ChatFields],
    ) -> AsyncGenerator[RequestOutput, None]:
        """Answer one conversation: the prompt as in ``LLM.chat``, results as in ``generate``."""
        query = await asyncio.to_thread(self._prompts.chat, messages, sampling_params, **fields)
        async with aclosing(self._run(query, request_id)) as results:
            async for result in results:
                yield result

    async def abort(self, request_id: str) -> None:
        """End a request: its result comes with ``finish_reason`` abort. Unknown ids are ignored."""
        if answer := self._open.get(request_id):
            for request in answer.requests:
                await self._engine.abort(request.request_id)

    async def check_health(self) -> None:
        """Return when the engine answers.

        Raises:
            EngineDead: its process has ended.
        """
        await self._engine.health()

    def get_tokenizer(self) -> Tokenizer:
        """The tokenizer, with ``encode`` and ``decode``.

        Raises:
            ConfigError: there is none.
        """
        return self._prompts.tokenizer

    async def reset_prefix_cache(self) -> bool:
        """Forget every cached page that no request holds; False when some stayed."""
        return await self._engine.reset_prefix_cache()

    async def shutdown(self) -> None:
        """End the engine's process; open requests fail with ``EngineDead``. May be called twice."""
        await self._engine.shutdown()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.shutdown()

    async def _run(
        self, query: Query, request_id: str | None
    ) -> AsyncGenerator[RequestOutput, None]:
        request_id = request_id or uuid.uuid4().hex
        if request_id in self._open:
            raise BadRequest(f"request id {request_id!r} is in use", param="request_id")
        answer = self._open[request_id] = Answer(request_id, query, self._tokenizer)
        try:
            choices = [self._read(request, answer) for request in answer.requests]
            async with aclosing(merge(choices)) as steps:
                async for _ in steps:
                    result = answer.output()
                    yield result
                    if result.finished:  # the other choices have nothing more to say
                        return
        finally:
            del self._open[request_id]

    async def _read(self, request: EngineRequest, answer: Answer) -> AsyncGenerator[None, None]:
        """Let the answer grow by what one choice brings; closing it aborts the choice."""
        async with aclosing(self._engine.submit(request)) as outputs:
            async for output in outputs:
                has_ended = answer.push(output)
                yield
                if has_ended:  # by a stop string perhaps, before the engine
                    return
