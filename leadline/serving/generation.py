"""From a prompt to the outputs of its choices, whatever the dialect of the answer."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from dataclasses import replace
from typing import Generic, NamedTuple, Protocol, TypeVar

from leadline.core.errors import BadRequest, EngineDead, EngineOverloaded, RequestTimeout
from leadline.core.request import (
    EngineRequest,
    FinishReason,
    SamplingParams,
    TokenLogprobs,
    TokenOutput,
)
from leadline.serving.admission import charge
from leadline.serving.context import Server
from leadline.serving.errors import GenerationFailed
from leadline.text.detokenizer import shown_token_ids
from leadline.text.tokenizer import Tokenizer

T = TypeVar("T")
Piece = TypeVar("Piece", covariant=True)


class Step(NamedTuple, Generic[Piece]):
    """One output of the engine as its reader saw it.

    Attributes:
        piece: what the reader made of it.
        num_tokens: how many of its tokens count: those up to a stop string's end.
        finish_reason: set with the last step of a choice.
    """

    output: TokenOutput
    piece: Piece
    num_tokens: int
    finish_reason: str | None


class OutputReader(Protocol[Piece]):
    """Turns engine outputs of one choice into pieces: ``TextOutput`` or ``OutputParser``."""

    num_tokens: int

    @property
    def finish_reason(self) -> str | None: ...

    def push(self, output: TokenOutput) -> Piece: ...


async def read_choice(
    server: Server, request: EngineRequest, reader: OutputReader[Piece], log_id: str
) -> AsyncGenerator[Step[Piece], None]:
    """Submit ``request`` and read its outputs, step by step.

    Ends with the reader, which may be before the engine; closing it aborts the request.

    Raises:
        GenerationFailed: the engine ended the request with an error.
        LeadlineError: whatever ``EngineClient.submit`` raises.
    """
    record = server.record(request, log_id)
    reason: str | None = "abort"
    try:
        async with aclosing(server.client.submit(request)) as outputs:
            async for output in outputs:
                record.observe(output)
                if output.finish_reason is FinishReason.TIMEOUT:
                    raise RequestTimeout(output.error or "the request took too long")
                if output.finish_reason in (FinishReason.ERROR, FinishReason.ABORT):
                    raise GenerationFailed(output.error or "the server ended this request")
                for part in (output,) if len(output.logprobs) < 2 else _by_token(output):
                    num_before = reader.num_tokens
                    piece = reader.push(part)
                    finished = reader.finish_reason
                    if finished is not None:
                        reason = "length" if finished == FinishReason.LENGTH else "stop"
                    yield Step(part, piece, reader.num_tokens - num_before, finished)
                    if finished is not None:
                        return
            raise EngineDead("the engine ended in the middle of this request")
    except (BadRequest, EngineOverloaded):
        reason = None  # never accepted
        raise
    except Exception:
        reason = "error"
        raise
    finally:
        if reason is not None:
            charge(reader.num_tokens)
            record.finish(reason, reader.num_tokens)


def shown_entries(
    output: TokenOutput, num_counted: int, sampling: SamplingParams, tokenizer: Tokenizer
) -> list[TokenLogprobs]:
    """Log-probabilities of the tokens that the client is shown (C41).

    Args:
        output: one output of the engine.
        num_counted: its tokens up to a stop string's end.
        sampling: the choice's parameters.
        tokenizer: says which ids are hidden.
    """
    eos = tokenizer.eos_token_id
    num_shown = min(num_counted, len(shown_token_ids(output, sampling, eos=eos)))
    hidden = tokenizer.special_ids if sampling.skip_special_tokens else ()
    return [entry for entry in output.logprobs[:num_shown] if entry.token_id not in hidden]


def _by_token(output: TokenOutput) -> Iterator[TokenOutput]:
    """An output in parts of one token: log-probabilities go with what their own token says."""
    *firsts, last = zip(output.token_ids, output.logprobs, strict=True)
    prompt_logprobs = output.prompt_logprobs
    for token_id, entry in firsts:
        yield replace(
            output,
            token_ids=(token_id,),
            logprobs=(entry,),
            finish_reason=None,
            stop_token_id=None,
            prompt_logprobs=prompt_logprobs,
        )
        prompt_logprobs = ()
    yield replace(output, token_ids=last[:1], logprobs=last[1:], prompt_logprobs=prompt_logprobs)
