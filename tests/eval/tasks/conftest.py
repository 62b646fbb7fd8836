"""The encoder that chats are rendered with."""

from __future__ import annotations

import pytest

from leadline.text.encoding import ChatEncoder
from leadline.text.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def encoder(tokenizer: Tokenizer) -> ChatEncoder:
    return ChatEncoder(tokenizer)
