"""The offline API, by vLLM's names: the same engine without HTTP, in this process.

Over token ids it needs torch, numpy, safetensors and tokenizers only (serving-api 15.2).
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, Unpack

import torch
from torch import Tensor

from leadline.core.errors import BadRequest
from leadline.core.request import SamplingParams
from leadline.engine.launch import build_engine
from leadline.offline.options import checkpoint_folder, load_tokenizer, read_options
from leadline.offline.outputs import Answer, RequestOutput
from leadline.offline.prompts import ChatFields, Prompt, PromptEncoder, Query
from leadline.text.tokenizer import Tokenizer


class LLM:
    """A model in this process.

    Args:
        model: a checkpoint folder, a hub id, or a preset's name with ``load_format="dummy"``.
        tokenizer: a folder or file to take ``tokenizer.json`` from; None is the model's.
        skip_tokenizer_init: load no tokenizer; prompts and answers are ids only.
        **options: the server's flags by their own names: every field of ``EngineConfig`` and its
            parts (``dtype``, ``kv_cache_dtype``, ``max_model_len``, ``seed`` ...), and of
            ``ChatConfig`` those that decide prompts (``default_chat_template_kwargs`` ...).

    Raises:
        TypeError: an option of an unknown name.
        ConfigError: a value that cannot be used.
        CheckpointError: a checkpoint that does not hold what its configuration promises.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        tokenizer: str | Path | None = None,
        skip_tokenizer_init: bool = False,
        **options: Any,
    ) -> None:
        self.config, chat_config = read_options(model, options)
        folder = checkpoint_folder(self.config)
        self._tokenizer = None if skip_tokenizer_init else load_tokenizer(tokenizer, folder)
        self._engine = build_engine(self.config)
        self._prompts = PromptEncoder(
            self._tokenizer,
            chat_config,
            self._engine.limits.max_model_len,
            folder,
            preset=self.config.model,
        )
        self._ids = itertools.count()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Complete prompts, all of them together.

        Args:
            prompts: a string, ids, ``{"prompt": str}`` or ``{"prompt_token_ids": ids}``, the last
                two also with a ``"cache_salt"``, or a list of these. Strings get a BOS token
                unless they begin with one.
            sampling_params: one for all, or one for each; None is what a request over HTTP gets
                that says nothing of it: at most 16 tokens.
            use_tqdm: show progress, where tqdm is installed.

        Returns:
            In the order of the prompts.

        Raises:
            BadRequest: any prompt or parameter cannot be served; nothing has run then.
            LeadlineError: the forward pass failed.
        """
        named = _named(prompts)
        queries = [
            self._prompts.completion(prompt, sampling, param=param)
            for (param, prompt), sampling in zip(
                named, _one_each(sampling_params, len(named)), strict=True
            )
        ]
        return self._run(queries, use_tqdm)

    def chat(
        self,
        messages: Sequence[Any],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        **fields: Unpack[ChatFields],
    ) -> list[RequestOutput]:
        """Answer a conversation, or a list of them; the prompt is the server's, id by id.

        Args:
            messages: OpenAI chat messages, or a list of conversations.
            sampling_params: None goes on to the model's own limit. Stop strings are searched
                behind the reasoning.
            use_tqdm: as in ``generate``.
            **fields: of every conversation: ``tools``, ``tool_choice``, ``chat_template_kwargs``,
                ``continue_final_message`` ... (``PromptEncoder.chat`` explains them).

        Returns:
            As ``generate``; the text is the model's own, reasoning and markup included.

        Raises:
            BadRequest: any conversation or parameter cannot be served; nothing has run then.
            LeadlineError: the forward pass failed.
        """
        many = bool(messages) and not isinstance(messages[0], Mapping)
        conversations = messages if many else [messages]
        queries = [
            self._prompts.chat(conversation, sampling, **fields)
            for conversation, sampling in zip(
                conversations, _one_each(sampling_params, len(conversations)), strict=True
            )
        ]
        return self._run(queries, use_tqdm)

    def prompt_logits(self, token_ids: Sequence[int]) -> Tensor:
        """Logits of every position of a prompt, exact full forward: float32 ``[T, V]``."""
        return torch.from_numpy(self._engine.prompt_logits(token_ids))

    def get_tokenizer(self) -> Tokenizer:
        """The tokenizer, with ``encode`` and ``decode``.

        Raises:
            ConfigError: there is none.
        """
        return self._prompts.tokenizer

    def reset_prefix_cache(self) -> bool:
        """Forget every cached page that no request holds; False when some stayed."""
        return self._engine.reset_prefix_cache()

    def shutdown(self) -> None:
        """Let go of weights and cache; the object is of no use afterwards."""
        del self._engine

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.shutdown()

    def _run(self, queries: Iterable[Query], use_tqdm: bool) -> list[RequestOutput]:
        """Queue everything, step until all have ended, collect."""
        answers = [Answer(str(next(self._ids)), query, self._tokenizer) for query in queries]
        running = {request.request_id: answer for answer in answers for request in answer.requests}
        try:
            self._add(running, answers)
            with _progress(len(running), use_tqdm) as advance:
                while running:
                    self._engine.wait()
                    self._step(running, advance)
        finally:
            # Empty unless something was raised: an error, or Ctrl-C.
            for name in running:
                self._engine.abort(name)
        return [answer.output() for answer in answers]

    def _add(self, running: dict[str, Answer], answers: Iterable[Answer]) -> None:
        """Add all requests; none runs before every grammar is known to be good."""
        self._engine.pause(True)
        try:
            for answer in answers:
                for request in answer.requests:
                    self._engine.add(request)
            while self._engine.stats().num_deferred:
                self._engine.wait()
                self._step(running, lambda: None)
        finally:
            self._engine.pause(False)

    def _step(self, running: dict[str, Answer], advance: Callable[[], object]) -> None:
        for output in self._engine.step():
            answer = running.get(output.request_id)
            if answer is None:  # the last word of a request that was aborted
                continue
            if answer.push(output):
                del running[output.request_id]
                advance()
                if output.finish_reason is None:  # a stop string: the engine goes on
                    self._engine.abort(output.request_id)


def _named(prompts: Prompt | Sequence[Prompt]) -> list[tuple[str, Prompt]]:
    """Prompts and what errors call them; a list of ids is a single prompt."""
    if isinstance(prompts, (str, Mapping)) or (len(prompts) and hasattr(prompts[0], "__index__")):
        return [("prompt", prompts)]  # type: ignore[list-item]
    return [(f"prompts[{i}]", prompt) for i, prompt in enumerate(prompts)]  # type: ignore[misc]


def _one_each(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> Sequence[SamplingParams | None]:
    if params is None or isinstance(params, SamplingParams):
        return [params] * count
    if len(params) != count:
        raise BadRequest(
            f"sampling_params has {len(params)} entries for {count} prompts; give one or {count}",
            param="sampling_params",
        )
    return params


@contextlib.contextmanager
def _progress(total: int, wanted: bool) -> Iterator[Callable[[], object]]:
    """A function to call once per finished answer."""
    try:
        from tqdm import tqdm
    except ImportError:  # a nicety that token ids must not depend on
        wanted = False
    if not wanted:
        yield lambda: None
        return
    with tqdm(total=total, desc="Answers", dynamic_ncols=True) as bar:
        yield bar.update
