"""``leadline generate``: complete one raw prompt and stream its text."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import asdict, dataclass

from leadline.config.server import ChatConfig
from leadline.core.client import EngineClient
from leadline.core.errors import LeadlineError
from leadline.core.request import EngineRequest, SamplingParams
from leadline.text.detokenizer import TextOutput
from leadline.text.sampling_defaults import sampling_defaults, with_end_tokens
from leadline.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateOptions:
    """How the text goes on.

    Attributes:
        max_tokens: tokens to generate at most.
        temperature: 0 is greedy; auto is the model's own.
        top_p: share of the probability that tokens are drawn from; auto is the model's own.
        ignore_eos: go on behind the model's end token.
    """

    max_tokens: int = 256
    temperature: float | None = None
    top_p: float | None = None
    ignore_eos: bool = False


async def generate_text(
    client: EngineClient,
    tokenizer: Tokenizer,
    prompt: str,
    options: GenerateOptions,
    defaults: ChatConfig,
) -> AsyncGenerator[str, None]:
    """Yield the text that follows ``prompt``, as it comes.

    Args:
        client: the engine.
        tokenizer: of the model.
        prompt: the text before.
        options: what the user chose.
        defaults: what holds where they chose nothing.

    Raises:
        LeadlineError: the request cannot be served, or failed.
    """
    chosen = {name: value for name, value in asdict(options).items() if value is not None}
    params = {**sampling_defaults(defaults), **chosen}
    sampling = with_end_tokens(SamplingParams(**params), defaults)
    text = TextOutput(tokenizer, sampling)
    request = EngineRequest("generate", tuple(tokenizer.encode_prompt(prompt)), sampling)
    async with aclosing(client.submit(request)) as outputs:
        async for output in outputs:
            if output.error:
                raise LeadlineError(output.error)
            yield text.push(output)
