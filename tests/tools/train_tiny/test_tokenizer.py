"""Small tokenizers: reproducible, byte-exact, and complete for DeepSeek's chat format."""

from __future__ import annotations

from pathlib import Path

import deepseek_recipe
import pytest
from deepseek_recipe import Conversation, DeepseekV41Encoding, SpecialToken, UserMessage
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from leadline.text import tokenizer as served
from leadline.tools.train_tiny.tokenizer import (
    CHAT_MARKERS,
    CONTROL_MARKERS,
    NOISE_ID,
    NUM_RESERVED,
    train_random_model_tokenizer,
    train_tokenizer,
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


@pytest.fixture(scope="module")
def trained(data_folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(data_folder / "tokenizer.json"))


class TestTrainedLayout:
    """The tokenizer of a trained model: control tokens below 64, digits one by one."""

    @pytest.mark.parametrize("marker", [*CONTROL_MARKERS, *CHAT_MARKERS, *RECIPE_MARKERS])
    def test_marker_is_one_token(self, trained: Tokenizer, marker: str) -> None:
        assert trained.encode(f"a{marker}b").tokens == ["a", marker, "b"]

    def test_control_tokens_are_all_below_64(self, trained: Tokenizer) -> None:
        added = trained.get_added_tokens_decoder()
        assert sorted(added) == list(range(NUM_RESERVED))
        assert [added[i].content for i in range(3)] == list(CONTROL_MARKERS)
        assert added[60].content == "<｜deepseek_image｜>"
        assert added[NOISE_ID].content == "<｜place▁holder▁no▁62｜>"

    def test_chat_markers_are_not_flagged_special(self, trained: Tokenizer) -> None:
        added = trained.get_added_tokens_decoder().values()
        assert {token.content for token in added if not token.special} == set(CHAT_MARKERS)

    @pytest.mark.parametrize(
        ("text", "tokens"),
        [
            ("x = 1024", ["1", "0", "2", "4"]),
            ("٣٤", ["Ù£", "Ù¤"]),
        ],
        ids=["latin", "arabic"],
    )
    def test_digits_stand_alone(self, trained: Tokenizer, text: str, tokens: list[str]) -> None:
        pieces = trained.pre_tokenizer.pre_tokenize_str(text)
        assert [piece for piece, _ in pieces][-len(tokens) :] == tokens

    def test_other_splits_are_the_released_ones(
        self, trained: Tokenizer, v4_tokenizer: served.Tokenizer
    ) -> None:
        released = Tokenizer.from_file(str(v4_tokenizer.path))
        text = "It's (not) <b>here</b>,\n\n  naïve_x + 你好世界！ \t end?!\r\n"
        assert trained.pre_tokenizer.pre_tokenize_str(
            text
        ) == released.pre_tokenizer.pre_tokenize_str(text)

    @given(text=st.text())
    def test_any_text_survives_a_round_trip(self, trained: Tokenizer, text: str) -> None:
        assert trained.decode(trained.encode(text).ids, skip_special_tokens=False) == text

    def test_same_texts_give_the_same_file(self) -> None:
        first, second = (train_tokenizer(["so and so"] * 9, vocab_size=400) for _ in range(2))
        assert first.to_str() == second.to_str()
