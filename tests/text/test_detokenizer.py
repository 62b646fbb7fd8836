"""Text as it arrives: the cuts never show."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leadline.core.request import FinishReason, SamplingParams, TokenOutput
from leadline.text.detokenizer import Detokenizer, StopStrings, TextOutput
from leadline.text.tokenizer import Tokenizer

IDS = st.lists(st.integers(3, 1023))


@given(ids=IDS, cuts=st.lists(st.integers(1, 4), min_size=1))
def test_joined_pieces_equal_the_whole_for_any_ids(
    tokenizer: Tokenizer, ids: list[int], cuts: list[int]
) -> None:
    detokenizer = Detokenizer(tokenizer)
    pieces, left = [], ids
    for size in [*cuts, len(ids)]:
        pieces.append(detokenizer.push(left[:size]))
        left = left[size:]
    assert "".join([*pieces, detokenizer.finish()]) == tokenizer.decode(ids)


def test_unfinished_character_is_one_replacement_at_the_end(tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(tokenizer)
    assert detokenizer.push(tokenizer.encode("a😀")[:-1]) == "a"
    assert detokenizer.finish() == "\ufffd"


@pytest.mark.parametrize(
    ("skip", "text"), [(True, "a"), (False, "a<｜end▁of▁sentence｜>")], ids=str
)
def test_special_tokens_show_only_on_request(tokenizer: Tokenizer, skip: bool, text: str) -> None:
    ids = [*tokenizer.encode("a"), tokenizer.eos_token_id]
    assert Detokenizer(tokenizer, skip_special_tokens=skip).push(ids) == text


@given(
    text=st.text("ab", max_size=12),
    stop=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
    include=st.booleans(),
)
def test_stop_strings_are_found_the_same_for_any_cut(
    text: str, stop: list[str], include: bool
) -> None:
    whole = StopStrings(stop, include=include)
    want = whole.push(text) + whole.finish()
    pieces = StopStrings(stop, include=include)
    got = "".join(pieces.push(character) for character in text) + pieces.finish()
    assert (got, pieces.matched) == (want, whole.matched)
    assert (whole.matched is not None) == any(s in text for s in stop)
    if not include:
        assert not any(s in got for s in stop)


def outputs(ids: list[int], *, reason: FinishReason, stop: int | None = None) -> list[TokenOutput]:
    plain = [TokenOutput("r", (token_id,)) for token_id in ids[:-1]]
    return [*plain, TokenOutput("r", (ids[-1],), finish_reason=reason, stop_token_id=stop)]


def read(reader: TextOutput, news: list[TokenOutput]) -> str:
    text = ""
    for output in news:
        text += reader.push(output)
        if reader.finish_reason is not None:
            return text
    raise AssertionError("the reader did not finish")


def test_text_ends_where_the_stop_string_begins(tokenizer: Tokenizer) -> None:
    reader = TextOutput(tokenizer, SamplingParams(stop=("STOP",)))
    ids = tokenizer.encode("one STOP two")
    assert read(reader, outputs(ids, reason=FinishReason.LENGTH)) == "one "
    assert (reader.finish_reason, reader.stop_reason) == (FinishReason.STOP, "STOP")
    assert reader.num_tokens == len(tokenizer.encode("one STOP"))


def test_beginning_of_a_stop_string_is_released_at_the_end(tokenizer: Tokenizer) -> None:
    reader = TextOutput(tokenizer, SamplingParams(stop=("STOP",)))
    ids = tokenizer.encode("one STO")
    assert read(reader, outputs(ids, reason=FinishReason.LENGTH)) == "one STO"
    assert reader.stop_reason is None


def test_end_token_is_counted_and_not_shown(tokenizer: Tokenizer) -> None:
    reader = TextOutput(tokenizer, SamplingParams())
    news = outputs([66, 1], reason=FinishReason.STOP, stop=1)
    assert read(reader, news) == tokenizer.decode((66,))
    assert (reader.num_tokens, reader.stop_reason) == (2, None)


def test_stop_strings_may_be_searched_behind_an_id_only(tokenizer: Tokenizer) -> None:
    end = tokenizer.marker_id("</think>")
    said = tokenizer.encode("a stop")
    text = TextOutput(tokenizer, SamplingParams(max_tokens=99, stop=("stop",)), stop_after=end)
    assert text.push(TokenOutput("r", (*said, end, *said))) == "a stop</think>a "
    assert text.stop_reason == "stop"
    assert text.num_tokens == 2 * len(said) + 1
