"""Our prompts against those of ``deepseek-recipe`` with a tokenizer of its own, id by id."""

from __future__ import annotations

from typing import Any

import deepseek_recipe as recipe
import pytest

from leadline.text.chat import ChatInput, ResponseFormat, ToolChoice
from leadline.text.encoding import ChatEncoder
from leadline.text.markers import SPECIAL_TOKENS
from leadline.text.profiles import V4, V41
from leadline.text.thinking import thinking_of
from leadline.text.tokenizer import Tokenizer
from leadline.text.tools_schema import function_tools
from tests.text.conversations import Conversations, encoded

_MODELS = {"v4": "DeepSeek-V4-Pro", "v41": "DeepSeek-V4.1-Flash"}


def chat_input(body: dict[str, Any]) -> ChatInput:
    form = None
    if given := body.get("response_format"):
        form = ResponseFormat(given["type"], given.get("json_schema", {}).get("schema"))
    return ChatInput(
        body["messages"],
        tools=function_tools(body.get("tools", ())),
        thinking=thinking_of(None, body.get("thinking")),
        reasoning_effort=body.get("reasoning_effort"),
        tool_choice=ToolChoice(body.get("tool_choice", "auto")),
        response_format=form,
    )


class Reference:
    """The library from request to ids."""

    def __init__(self, tokenizer: Tokenizer, name: str) -> None:
        encoding = recipe.DeepseekV4Encoding() if name == "v4" else recipe.DeepseekV41Encoding()
        self._model = _MODELS[name]
        self._options = recipe.ConversionOptions().with_special_tokens(SPECIAL_TOKENS)
        self._encoding = encoding.with_special_tokens(SPECIAL_TOKENS).with_tokenizer(
            recipe.Tokenizer.from_file(str(tokenizer.path))
        )

    def encode(self, body: dict[str, Any]) -> list[int]:
        request = recipe.ChatCompletionRequest(encoded(body, self._model)).convert(self._options)
        return self._encoding.encode(request.conversation)


@pytest.mark.parametrize("name", ["v4", "v41"])
def test_200_generated_conversations_agree(
    v4_tokenizer: Tokenizer, v41_tokenizer: Tokenizer, name: str
) -> None:
    tokenizer = v4_tokenizer if name == "v4" else v41_tokenizer
    encoder = ChatEncoder(tokenizer, V4 if name == "v4" else V41)
    reference = Reference(tokenizer, name)
    conversations = Conversations(seed=20)
    for number in range(200):
        body = conversations.body()
        ours = encoder.encode(chat_input(body)).token_ids
        theirs = reference.encode(body)
        assert tokenizer.decode(ours) == tokenizer.decode(theirs), f"conversation {number}"
        assert list(ours) == theirs, f"conversation {number}"
