"""An application over a scripted engine, and how to talk to it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from importlib.resources import files
from typing import Any

import httpx
import pytest

from leadline.config.server import ServerConfig
from leadline.serving.app import build_app
from leadline.serving.context import ModelInfo
from leadline.text.tokenizer import Tokenizer
from tests.serving.scripted import ScriptedEngine, Step

MODEL = "house/tiny"
EOS = "<｜end▁of▁sentence｜>"
MAX_MODEL_LEN = 8192


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer(str(files("leadline") / "data/tiny/tokenizer.json"))
