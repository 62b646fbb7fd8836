"""The offline API, by vLLM's names: the same engine without HTTP, in this process.

Over token ids it needs torch, numpy, safetensors and tokenizers only; what chats need is imported
by ``LLM.chat`` (serving-api 15.2).
"""

from __future__ import annotations

import contextlib
import itertools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypeAlias

import torch
from torch import Tensor

from leadline.config import compat
from leadline.config.args import closest, from_values, settings
from leadline.config.engine import EngineConfig
from leadline.config.presets import PRESETS
from leadline.core.errors import BadRequest, ConfigError, LeadlineError
from leadline.core.request import (
    EngineRequest,
    FinishReason,
    SamplingParams,
    TokenLogprobs,
    TokenOutput,
)
from leadline.engine.launch import build_engine
from leadline.text.chat import ChatInput
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
        # Nobody else asks this engine, so a list of prompts may be as long as it is.
        values = {"model": str(model), "max_num_queued_reqs": 0, **compat.settle(options)}
        self.config = from_values(EngineConfig, values)
        self._tokenizer = None if skip_tokenizer_init else _load_tokenizer(tokenizer, self.config)
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
            prompts: a string, ids, ``{"prompt": str}`` or ``{"prompt_token_ids": ids}``, the last
                two also with a ``"cache_salt"``, or a list of these. Strings get a BOS token
                unless they begin with one.
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
            chat_template_kwargs: ``thinking``, ``reasoning_effort`` and ``drop_thinking``.
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
        # These need deepseek-recipe, which token ids can do without.
        from leadline.text.thinking import drop_thinking_of, effort_of, thinking_of
        from leadline.text.tools_schema import function_tools

        many = bool(messages) and not isinstance(messages[0], Mapping)
        conversations = messages if many else [messages]
        encoder = self._require_chat_encoder()
        chats = [
            encoder.encode(
                ChatInput(
                    messages=conversation,
                    tools=function_tools(tools or ()),
                    thinking=thinking_of(chat_template_kwargs, None),
                    reasoning_effort=effort_of(chat_template_kwargs),
                    drop_thinking=drop_thinking_of(chat_template_kwargs),
                    continue_final_message=continue_final_message,
                    add_generation_prompt=add_generation_prompt,
                )
            )
            for conversation in conversations
        ]
        params: Sequence[SamplingParams]
        if sampling_params is None:
            longest = self._engine.stats().max_model_len
            params = [SamplingParams(max_tokens=c.default_max_tokens(longest)) for c in chats]
        else:
            params = _one_each(sampling_params, len(chats))
        inputs = [_Input(encoder.tokenizer.decode(c.token_ids), c.token_ids) for c in chats]
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

    def _tokenize(self, prompt: Prompt, param: str) -> _Input:
        value: Any = prompt
        salt: str | None = None
        if isinstance(prompt, Mapping):
            if prompt.keys() - {"cache_salt"} not in ({"prompt"}, {"prompt_token_ids"}):
                raise BadRequest(
                    f"{param} has the keys {sorted(prompt)}; it must have one, prompt or "
                    "prompt_token_ids, and may have cache_salt",
                    param=param,
                )
            salt = prompt.get("cache_salt")
            value = prompt["prompt"] if "prompt" in prompt else prompt["prompt_token_ids"]
        if isinstance(value, str):
            return _Input(value, self.get_tokenizer().encode_prompt(value), salt)
        try:
            return _Input(None, [operator.index(token_id) for token_id in value], salt)
        except TypeError:
            raise BadRequest(
                f"{param} is {value!r}; it must be a string or a list of token ids", param=param
            ) from None

    def _require_chat_encoder(self) -> ChatEncoder:
        if self._chat_encoder is None:
            from leadline.text.encoding import ChatEncoder  # needs deepseek-recipe

            self._chat_encoder = ChatEncoder(self.get_tokenizer())
        return self._chat_encoder

    def _run(
        self,
        inputs: Sequence[_Input],
        params: Sequence[SamplingParams],
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        """Queue everything, step until all have ended, collect."""
        results: list[RequestOutput] = []
        running: dict[str, _Choice] = {}
        try:
            for (text, ids, salt), sampling in zip(inputs, params, strict=True):
                request_id = str(next(self._ids))
                result = RequestOutput(request_id, text, list(ids), [])
                results.append(result)
                for index in range(sampling.n):
                    name = f"{request_id}-{index}"
                    choice = _Choice(result, index, sampling, self._tokenizer)
                    request = EngineRequest(name, tuple(ids), choice.sampling, cache_salt=salt)
                    self._engine.add(request)
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
                self._engine.wait()
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


class _Input(NamedTuple):
    """A prompt: its text, where there is one, its ids, and whose cached prefixes it may share."""

    text: str | None
    ids: Sequence[int]
    cache_salt: str | None = None


class _Choice:
    """One answer while it is being generated: engine outputs in, ``CompletionOutput`` out.

    Attributes:
        sampling: the engine's parameters of this choice alone.
        has_ended: by the engine or by a stop string.
    """

    def __init__(
        self,
        result: RequestOutput,
        index: int,
        sampling: SamplingParams,
        tokenizer: Tokenizer | None,
    ) -> None:
        self.sampling = sampling.choice(index)
        self.has_ended = False
        self._result = result
        self._tokenizer = tokenizer
        self._output = CompletionOutput(index)
        self._logprobs: list[TokenLogprobs] = []
        result.outputs.append(self._output)
        self._text: TextOutput | None = None
        if tokenizer is not None and sampling.detokenize:
            self._text = TextOutput(tokenizer, self.sampling)
        elif sampling.stop:
            raise BadRequest("stop strings need a tokenizer and detokenize", param="stop")

    def push(self, news: TokenOutput) -> None:
        """Take a step's tokens.

        Raises:
            LeadlineError: the request failed.
        """
        if news.refusal is not None:
            raise news.refusal
        if news.finish_reason is FinishReason.ERROR:
            raise LeadlineError(f"request {self._result.request_id} failed: {news.error}")
        output = self._output
        output.token_ids += news.token_ids
        self._logprobs += news.logprobs
        self._result.num_cached_tokens = max(self._result.num_cached_tokens, news.num_cached_tokens)
        reason: FinishReason | None
        if self._text is None:
            reason = news.finish_reason
            if news.stop_token_id in self.sampling.stop_token_ids:
                output.stop_reason = news.stop_token_id
        else:
            output.text += self._text.push(news)
            reason, output.stop_reason = self._text.finish_reason, self._text.stop_reason
        if reason is not None:
            output.finish_reason = reason.value
            self._finish()

    def _finish(self) -> None:
        self.has_ended = True
        if self._text is not None:  # tokens of the last step behind a stop string
            del self._output.token_ids[self._text.num_tokens :]
        if self.sampling.logprobs is not None:
            kept = self._logprobs[: len(self._output.token_ids)]
            self._output.cumulative_logprob = sum(entry.logprob for entry in kept)
            self._output.logprobs = [self._entry(token) for token in kept]

    def _entry(self, token: TokenLogprobs) -> dict[int, Logprob]:
        ranked = [(id, logprob, rank) for rank, (id, logprob) in enumerate(token.top, start=1)]
        decode = self._tokenizer.decode if self._tokenizer else None
        return {
            id: Logprob(logprob, rank, decode([id]) if decode else None)
            for id, logprob, rank in [*ranked, (token.token_id, token.logprob, token.rank)]
        }


def _load_tokenizer(tokenizer: str | Path | None, config: EngineConfig) -> Tokenizer | None:
    """The named one, else the model's; a preset has none."""
    if tokenizer is None and config.load_format == "dummy" and config.model in PRESETS:
        return None
    path = Path(tokenizer) if tokenizer else resolve_checkpoint(config.model, config.revision)
    return Tokenizer(path / "tokenizer.json" if path.is_dir() else path)


def _as_list(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    """A single prompt as a list of one; a list of ids is a single prompt."""
    if isinstance(prompts, (str, Mapping)) or (len(prompts) and hasattr(prompts[0], "__index__")):
        return [prompts]  # type: ignore[list-item]
    return prompts  # type: ignore[return-value]


def _one_each(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> Sequence[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
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
