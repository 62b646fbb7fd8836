"""``leadline generate``: complete one raw prompt and stream its text."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass

from leadline.core.client import EngineClient
from leadline.core.errors import LeadlineError
from leadline.core.request import EngineRequest, SamplingParams
from leadline.text.detokenizer import TextOutput
from leadline.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateOptions:
    """How the text goes on.

    Attributes:
        max_tokens: tokens to generate at most.
        temperature: 0 is greedy.
        top_p: share of the probability that tokens are drawn from.
        ignore_eos: go on behind the model's end token.
    """

    max_tokens: int = 256
    temperature: float = 1.0
    top_p: float = 1.0
    ignore_eos: bool = False


async def generate_text(
    client: EngineClient, tokenizer: Tokenizer, prompt: str, options: GenerateOptions
) -> AsyncGenerator[str, None]:
    """Yield the text that follows ``prompt``, as it comes.

    Raises:
        LeadlineError: the request cannot be served, or failed.
    """
    sampling = SamplingParams(
        max_tokens=options.max_tokens,
        temperature=options.temperature,
        top_p=options.top_p,
        ignore_eos=options.ignore_eos,
    )
    text = TextOutput(tokenizer, sampling)
    request = EngineRequest("generate", tuple(tokenizer.encode_prompt(prompt)), sampling)
    async with aclosing(client.submit(request)) as outputs:
        async for output in outputs:
            if output.error:
                raise LeadlineError(output.error)
            yield text.push(output)
