"""Encoders of both profiles."""

from __future__ import annotations

import pytest

from leadline.text.encoding import ChatEncoder
from leadline.text.profiles import PROFILES, V4
from leadline.text.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def encoder(request: pytest.FixtureRequest, tokenizer: Tokenizer) -> ChatEncoder:
    """Of V4.1, or of what ``both_profiles`` gives, with the small tokenizer."""
    return ChatEncoder(tokenizer, PROFILES[getattr(request, "param", "v41")])


@pytest.fixture(scope="session")
def v4_encoder(tokenizer: Tokenizer) -> ChatEncoder:
    """Of V4, with the small tokenizer, which has V4.1's markers too."""
    return ChatEncoder(tokenizer, V4)
