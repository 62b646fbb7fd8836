"""Spans -> ids: texts join, markers part."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leadline.text.spans import Marker, Span, encode_spans
from leadline.text.tokenizer import Tokenizer

THINK = Marker("<think>")


def test_neighbouring_texts_are_encoded_as_one(v4_tokenizer: Tokenizer) -> None:
    joined = encode_spans(v4_tokenizer, ["go", "od morn", "ing"])
    assert joined == encode_spans(v4_tokenizer, ["good morning"])
    assert len(joined) == 2
    assert len(encode_spans(v4_tokenizer, ["good morn", THINK, "ing"])) == 4


def test_ids_are_taken_as_they_are(v4_tokenizer: Tokenizer) -> None:
    assert encode_spans(v4_tokenizer, [array("I", [5, 0, 7])]) == [5, 0, 7]
    assert encode_spans(v4_tokenizer, ["", THINK, ""]) == [128821]


def test_c51_half_a_surrogate_pair_is_the_replacement_character(v4_tokenizer: Tokenizer) -> None:
    ids = encode_spans(v4_tokenizer, ["a\ud83d", "b"])
    assert ids == encode_spans(v4_tokenizer, ["a\ufffdb"])


@given(texts=st.lists(st.one_of(st.text(), st.sampled_from(["<think>", "｜DSML｜"]))))
def test_c1_no_text_gives_a_control_id(v4_tokenizer: Tokenizer, texts: list[str]) -> None:
    spans: list[Span] = [*texts]
    ids = encode_spans(v4_tokenizer, spans)
    assert v4_tokenizer.decode(ids) == "".join(texts)
    assert all(3 <= token_id < 128000 for token_id in ids)


@pytest.mark.parametrize("marker", ["<think>", "｜DSML｜", "<｜title｜>"])
def test_markers_are_one_id(v4_tokenizer: Tokenizer, marker: str) -> None:
    assert encode_spans(v4_tokenizer, [Marker(marker)]) == [v4_tokenizer.marker_id(marker)]
