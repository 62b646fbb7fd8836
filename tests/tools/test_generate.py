from __future__ import annotations

import asyncio

import pytest

from leadline.config.server import ChatConfig
from leadline.core.errors import BadRequest
from leadline.text.tokenizer import Tokenizer
from leadline.tools.generate import GenerateOptions, generate_text
from tests.serving.scripted import ScriptedEngine


async def collect(
    engine: ScriptedEngine,
    tokenizer: Tokenizer,
    options: GenerateOptions,
    defaults: ChatConfig | None = None,
) -> list[str]:
    pieces = generate_text(engine, tokenizer, "Once", options, defaults or ChatConfig())
    return [piece async for piece in pieces]


def test_text_comes_in_pieces_and_stops_at_the_end_token(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(" upon a time é")
    eos = tokenizer.eos_token_id
    engine = ScriptedEngine([[token_id] for token_id in [*ids, eos, *ids]], eos)
    pieces = asyncio.run(collect(engine, tokenizer, GenerateOptions()))
    assert "".join(pieces) == " upon a time é"
    assert len(pieces) == len(ids) + 1
    [request] = engine.requests
    assert list(request.prompt_token_ids) == [tokenizer.bos_token_id, *tokenizer.encode("Once")]


def test_options_are_the_requests(tokenizer: Tokenizer) -> None:
    engine = ScriptedEngine([[5]], tokenizer.eos_token_id)
    options = GenerateOptions(max_tokens=9, temperature=0.5, top_p=0.4, ignore_eos=True)
    asyncio.run(collect(engine, tokenizer, options))
    sampling = engine.requests[0].sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p) == (9, 0.5, 0.4)
    assert sampling.ignore_eos


def test_what_nobody_chose_is_the_models_own(tokenizer: Tokenizer) -> None:
    engine = ScriptedEngine([[5]], tokenizer.eos_token_id)
    own = ChatConfig(override_generation_config={"temperature": 0.25, "top_p": 0.5})
    asyncio.run(collect(engine, tokenizer, GenerateOptions(top_p=0.75), own))
    sampling = engine.requests[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.max_tokens) == (0.25, 0.75, 256)


def test_a_value_out_of_range_is_named(tokenizer: Tokenizer) -> None:
    engine = ScriptedEngine([[5]], tokenizer.eos_token_id)
    with pytest.raises(BadRequest, match="temperature is 3"):
        asyncio.run(collect(engine, tokenizer, GenerateOptions(temperature=3)))
