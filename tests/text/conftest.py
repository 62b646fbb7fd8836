"""Encoders of both profiles."""

from __future__ import annotations

import pytest

from leadline.text.encoding import ChatEncoder
from leadline.text.profiles import V4
from leadline.text.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def encoder(tokenizer: Tokenizer) -> ChatEncoder:
    """Of V4.1, with the small tokenizer."""
    return ChatEncoder(tokenizer)


@pytest.fixture(scope="session")
def v4_encoder(tokenizer: Tokenizer) -> ChatEncoder:
    """Of V4, with the small tokenizer, which has V4.1's markers too."""
    return ChatEncoder(tokenizer, V4)
