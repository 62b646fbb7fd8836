"""Ids, text and bytes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leadline.core.errors import ConfigError
from leadline.text.tokenizer import EOS, Tokenizer


def test_markers_are_found_by_their_text(tokenizer: Tokenizer) -> None:
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1)
    assert tokenizer.encode("<think>") == [tokenizer.marker_id("<think>")]
    with pytest.raises(ConfigError, match="no token <nothing>"):
        tokenizer.marker_id("<nothing>")


@given(text=st.text())
def test_any_text_survives_the_round_trip(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_every_byte_has_an_id(tokenizer: Tokenizer) -> None:
    single = {tokenizer.token_bytes((token_id,)) for token_id in range(tokenizer.vocab_size)}
    assert {bytes((byte,)) for byte in range(256)} <= single


def test_id_without_a_text_has_no_bytes(tokenizer: Tokenizer) -> None:
    assert tokenizer.token_bytes((10**6,)) == b""


def test_unreadable_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps({"version": EOS}))
    with pytest.raises(ConfigError, match=r"tokenizer\.json: not a readable"):
        Tokenizer(path)


def test_c51_half_a_surrogate_pair_is_a_replacement_character(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("a\ud83d") == tokenizer.encode("a\ufffd")
    assert tokenizer.encode_texts(["\udc12"]) == tokenizer.encode_texts(["\ufffd"])
