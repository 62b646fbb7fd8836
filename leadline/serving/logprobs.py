"""Which log-probabilities a client is shown, and what of them JSON can hold (serving-api 9.3)."""

from __future__ import annotations

import math
from collections.abc import Sequence

from leadline.core.request import SamplingParams, TokenLogprobs, TokenOutput
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


def finite(logprob: float) -> float:
    """``logprob``, or what stands for minus infinity in JSON."""
    return logprob if math.isfinite(logprob) else _JSON_MINUS_INFINITY
