"""Log-probabilities in the two layouts of the OpenAI API (serving-api 9.3)."""

from __future__ import annotations

import math
from collections.abc import Sequence

from leadline.core.request import SamplingParams, TokenLogprobs, TokenOutput
from leadline.serving.openai.answers import CompletionLogprobs, TokenLogprob, TopLogprob
from leadline.text.detokenizer import shown_token_ids
from leadline.text.tokenizer import Tokenizer

_JSON_MINUS_INFINITY = -9999.0


def shown_entries(
    output: TokenOutput, num_counted: int, sampling: SamplingParams, tokenizer: Tokenizer
) -> Sequence[TokenLogprobs]:
    """Entries of the tokens that the client is shown (C41).

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


def chat_entry(entry: TokenLogprobs, tokenizer: Tokenizer) -> TokenLogprob:
    """One entry of ``choices[].logprobs.content``."""
    token = _token(entry.token_id, entry.logprob, tokenizer)
    return TokenLogprob(
        token=token.token,
        logprob=token.logprob,
        bytes=token.bytes,
        top_logprobs=[_token(token_id, value, tokenizer) for token_id, value in entry.top],
    )


def completion_logprobs(
    entries: Sequence[TokenLogprobs], tokenizer: Tokenizer, *, text_offset: int
) -> CompletionLogprobs:
    """The old layout; ``text_offset`` is where the first token begins in the choice's text."""
    tokens = [tokenizer.decode((entry.token_id,)) for entry in entries]
    offsets = [text_offset]
    for token in tokens[:-1]:
        offsets.append(offsets[-1] + len(token))
    return CompletionLogprobs(
        tokens=tokens,
        token_logprobs=[_finite(entry.logprob) for entry in entries],
        top_logprobs=[
            {tokenizer.decode((token_id,)): _finite(value) for token_id, value in entry.top}
            for entry in entries
        ],
        text_offset=offsets[: len(tokens)],
    )


def _token(token_id: int, logprob: float, tokenizer: Tokenizer) -> TopLogprob:
    raw = tokenizer.token_bytes((token_id,))
    return TopLogprob(raw.decode("utf-8", "replace"), _finite(logprob), list(raw))


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else _JSON_MINUS_INFINITY
