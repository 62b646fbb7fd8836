"""The offline API, by vLLM's names: the same engine without HTTP, in this process.

Over token ids it needs torch, numpy, safetensors and tokenizers only; what chats need is imported
by ``LLM.chat`` (serving-api 15.2).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeAlias

import torch
from torch import Tensor

from leadline.config import compat
from leadline.config.args import closest, from_values, settings
from leadline.config.engine import EngineConfig
from leadline.core.errors import BadRequest, ConfigError, LeadlineError
from leadline.core.request import (
    EngineRequest,
    FinishReason,
    SamplingParams,
    TokenLogprobs,
    TokenOutput,
)
from leadline.engine.launch import build_engine
from leadline.text.detokenizer import TextOutput
from leadline.text.tokenizer import Tokenizer
from leadline.weights.checkpoint import resolve_checkpoint

if TYPE_CHECKING:
    from leadline.text.encoding import ChatEncoder

Prompt: TypeAlias = str | Sequence[int] | Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Logprob:
    """One entry of ``CompletionOutput.logprobs``."""

    logprob: float
    rank: int
    decoded_token: str | None = None


@dataclass(slots=True)
class CompletionOutput:
    """One answer to a prompt.

    Attributes:
        text: empty where nothing was detokenized.
        token_ids: generated ids, the end or stop token included; up to a stop string.
        cumulative_logprob: their sum; None where no logprobs were asked for.
        logprobs: per token: id -> its log-probability, the sampled one and the most likely.
        finish_reason: ``stop`` or ``length``.
        stop_reason: the stop string or stop token id that ended it, if one did.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None


@dataclass(slots=True)
class RequestOutput:
    """A prompt and its ``n`` answers.

    Attributes:
        prompt: the text, or None where the prompt came as ids.
        num_cached_tokens: prompt tokens whose KV came from the prefix cache.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = False
    num_cached_tokens: int = 0


class LLM:
    """A model in this process.

    Args:
        model: a checkpoint folder, a hub id, or a preset's name with ``load_format="dummy"``.
        tokenizer: a folder or file to take ``tokenizer.json`` from; None is the model's.
        skip_tokenizer_init: load no tokenizer; prompts and answers are ids only.
        **options: every field of ``EngineConfig`` and its parts by name (``dtype``,
            ``kv_cache_dtype``, ``max_model_len``, ``max_num_seqs``, ``seed`` ...).

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
        known = {setting.name for setting in settings(EngineConfig)}
        for name in options:
            if name not in known and name not in compat.NAMES:
                hint = closest(name, [*known, "tokenizer", "skip_tokenizer_init"])
                raise TypeError(f"LLM() got an unexpected keyword argument {name!r}{hint}")
        values = {"model": str(model), **compat.settle(options)}
        self.config = from_values(EngineConfig, values)
        self._tokenizer: Tokenizer | None = None
        if not skip_tokenizer_init and (tokenizer or self.config.load_format != "dummy"):
            self._tokenizer = _load_tokenizer(tokenizer, self.config)
        self._chat_encoder: ChatEncoder | None = None
        self._engine = build_engine(self.config)
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
            prompts: a string, ids, ``{"prompt": str}`` or ``{"prompt_token_ids": ids}``, or a
                list of these. Strings get a BOS token unless they begin with one.
            sampling_params: one for all, or one for each.
            use_tqdm: show progress, where tqdm is installed.

        Returns:
            In the order of the prompts.

        Raises:
            BadRequest: any prompt or parameter cannot be served; nothing has run then.
            LeadlineError: the forward pass failed.
        """
        batch = _as_list(prompts)
        inputs = [self._tokenize(prompt, f"prompts[{i}]") for i, prompt in enumerate(batch)]
        return self._run(inputs, _one_each(sampling_params, len(inputs)), use_tqdm)

    def chat(
        self,
        messages: Sequence[Any],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> list[RequestOutput]:
        """Answer a conversation, or a list of them; the prompt is the server's, id by id.

        Args:
            messages: OpenAI chat messages.
            sampling_params: None samples at temperature 1 up to the model's own limit.
            use_tqdm: as in ``generate``.
            tools: OpenAI function tools.
            chat_template_kwargs: ``thinking`` and ``reasoning_effort``.
            add_generation_prompt: False only together with ``continue_final_message``.
            continue_final_message: the last message is the assistant's, and goes on.

        Returns:
            As ``generate``; the text is the model's own, reasoning and markup included.
        """
        if add_generation_prompt == continue_final_message:
            raise BadRequest(
                f"add_generation_prompt is {add_generation_prompt} and continue_final_message is "
                f"{continue_final_message}; exactly one of them must hold",
                param="continue_final_message",
            )
        many = bool(messages) and not isinstance(messages[0], Mapping)
        conversations = messages if many else [messages]
        encoder = self._require_chat_encoder()
        chats = [
            encoder.encode(
                conversation,
                tools=tools,
                chat_template_kwargs=chat_template_kwargs,
                continue_final_message=continue_final_message,
            )
            for conversation in conversations
        ]
        params: Sequence[SamplingParams]
        if sampling_params is None:
            longest = self._engine.stats().max_model_len
            params = [SamplingParams(max_tokens=c.default_max_tokens(longest)) for c in chats]
        else:
            params = _one_each(sampling_params, len(chats))
        inputs = [(encoder.tokenizer.decode(c.token_ids), c.token_ids) for c in chats]
        return self._run(inputs, params, use_tqdm)

    def prompt_logits(self, token_ids: Sequence[int]) -> Tensor:
        """Logits of every position of a prompt, exact full forward: float32 ``[T, V]``."""
        return torch.from_numpy(self._engine.prompt_logits(token_ids))

    def get_tokenizer(self) -> Tokenizer:
        """The tokenizer, with ``encode`` and ``decode``.

        Raises:
            ConfigError: there is none.
        """
        if self._tokenizer is None:
            raise ConfigError("this LLM has no tokenizer: pass ids, or name one by tokenizer=")
        return self._tokenizer

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

    def _tokenize(self, prompt: Prompt, param: str) -> tuple[str | None, Sequence[int]]:
        """The text, where there is one, and the ids."""
        if isinstance(prompt, Mapping):
            if prompt.keys() not in ({"prompt"}, {"prompt_token_ids"}):
                raise BadRequest(
                    f"{param} has the keys {sorted(prompt)}; it must have one, prompt or "
                    "prompt_token_ids",
                    param=param,
                )
            prompt = next(iter(prompt.values()))
        if not isinstance(prompt, str):
            return None, prompt
        tokenizer = self.get_tokenizer()
        ids = tokenizer.encode(prompt)
        bos = tokenizer.bos_token_id
        return prompt, ids if ids[:1] == [bos] else [bos, *ids]

    def _require_chat_encoder(self) -> ChatEncoder:
        if self._chat_encoder is None:
            from leadline.text.encoding import ChatEncoder  # needs deepseek-recipe

            self._chat_encoder = ChatEncoder(self.get_tokenizer())
        return self._chat_encoder

    def _run(
        self,
        inputs: Sequence[tuple[str | None, Sequence[int]]],
        params: Sequence[SamplingParams],
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        """Queue everything, step until all have ended, collect."""
        results: list[RequestOutput] = []
        running: dict[str, _Choice] = {}
        try:
            for (text, ids), sampling in zip(inputs, params, strict=True):
                request_id = str(next(self._ids))
                result = RequestOutput(request_id, text, list(ids), [])
                results.append(result)
                for index in range(sampling.n):
                    name = f"{request_id}-{index}"
                    choice = _Choice(result, index, _sampling_of_choice(sampling, index), self._tokenizer)
                    self._engine.add(EngineRequest(name, tuple(ids), choice.sampling))
                    running[name] = choice
            self._step_until_done(running, use_tqdm)
        finally:
            # Empty unless something was raised: an error, or Ctrl-C.
            for name in running:
                self._engine.abort(name)
        for result in results:
            result.finished = True
        return results

    def _step_until_done(self, running: dict[str, _Choice], use_tqdm: bool) -> None:
        with _progress(len(running), use_tqdm) as advance:
            while running:
                for output in self._engine.step():
                    choice = running.get(output.request_id)
                    if choice is None:  # the last word of a request that was aborted
                        continue
                    choice.push(output)
                    if choice.has_ended:
                        del running[output.request_id]
                        advance()
                        if output.finish_reason is None:  # a stop string: the engine goes on
                            self._engine.abort(output.request_id)
