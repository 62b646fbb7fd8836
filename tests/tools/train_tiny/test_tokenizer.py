"""The small tokenizer: reproducible, byte-exact, and complete for DeepSeek's chat format."""

from __future__ import annotations

from pathlib import Path

import deepseek_recipe
import pytest
from deepseek_recipe import Conversation, DeepseekV41Encoding, SpecialToken, UserMessage
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from leadline.tools.train_tiny.tokenizer import (
    CHAT_MARKERS,
    CONTROL_MARKERS,
    train_random_model_tokenizer,
)

ROOT = Path(__file__).parents[3]
FIXTURE = ROOT / "tests/fixtures/random_tiny/tokenizer.json"
TOKENIZER = Tokenizer.from_file(str(FIXTURE))
RECIPE_MARKERS = [
    token.default_str() for token in vars(SpecialToken).values() if isinstance(token, SpecialToken)
]


def test_the_fixture_is_what_its_texts_train(golden: Path, tmp_path: Path) -> None:
    sets = ("engram", "quant", "v41-reference", "v41-tiny")
    texts = [ROOT / "LICENSE", *(golden / name / "README.md" for name in sets)]
    tokenizer = train_random_model_tokenizer([text.read_text() for text in texts], vocab_size=1024)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert (tmp_path / "tokenizer.json").read_bytes() == FIXTURE.read_bytes()


def test_sentence_markers_have_the_released_ids() -> None:
    assert [TOKENIZER.token_to_id(marker) for marker in CONTROL_MARKERS] == [0, 1, 2]


@pytest.mark.parametrize("marker", [*CONTROL_MARKERS, *CHAT_MARKERS, *RECIPE_MARKERS])
def test_marker_is_one_token(marker: str) -> None:
    assert TOKENIZER.encode(f"a{marker}b").tokens == ["a", marker, "b"]


def test_chat_markers_survive_skipping_special_tokens() -> None:
    assert TOKENIZER.decode(TOKENIZER.encode("<think>").ids) == "<think>"


@given(st.text())
def test_any_text_survives_a_round_trip(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(text).ids, skip_special_tokens=False) == text


def test_recipe_tells_typed_markers_from_real_ones() -> None:
    recipe = deepseek_recipe.Tokenizer.from_file(str(FIXTURE))
    encoding = DeepseekV41Encoding().with_tokenizer(recipe)
    ids = encoding.encode(Conversation([UserMessage("<think>")], thinking_mode=False))
    user, assistant, end, start = (
        TOKENIZER.token_to_id(m) for m in ("<｜User｜>", "<｜Assistant｜>", "</think>", "<think>")
    )
    assert ids[:2] == [0, user]
    assert ids[-2:] == [assistant, end]
    assert start not in ids
