"""Every token of a document counts as much as it should, told by what the tokens say."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from leadline.eval.exercise import Chat, Passage
from leadline.text.chat import Tool
from leadline.text.encoding import ChatEncoder
from leadline.text.tokenizer import Tokenizer
from leadline.tools.train_tiny.documents import (
    ANSWER_WEIGHT,
    HEAD_WEIGHT,
    OTHER_TEXT_WEIGHT,
    Document,
    DocumentEncoder,
    prose_document,
)

BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
USER, ASSISTANT = "<｜User｜>", "<｜Assistant｜>"
TOOL = Tool("look", "Looks.", {"type": "object", "properties": {"at": {"type": "string"}}})


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def answer(content: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


@pytest.fixture(scope="module")
def tokenizer(data_folder: Path) -> Tokenizer:
    return Tokenizer(data_folder / "tokenizer.json")


@pytest.fixture(scope="module")
def encoder(tokenizer: Tokenizer) -> DocumentEncoder:
    return DocumentEncoder(ChatEncoder(tokenizer))


def pieces(tokenizer: Tokenizer, document: Document) -> list[tuple[float, str]]:
    """Runs of equal weight with their text."""
    pairs = zip(document.weights.tolist(), document.ids.tolist(), strict=True)
    runs = [(weight, [id for _, id in run]) for weight, run in groupby(pairs, lambda p: p[0])]
    return [(round(weight, 6), tokenizer.decode(ids)) for weight, ids in runs]


def chat(*messages: Mapping[str, Any], **options: Any) -> Chat:
    return Chat("test", messages, **options)


class TestChats:
    @staticmethod
    def learnt(tokenizer: Tokenizer, document: Document) -> list[str]:
        runs = pieces(tokenizer, document)
        return [text for weight, text in runs if weight == ANSWER_WEIGHT]

    def test_answers_are_learnt_and_their_headers_given(
        self, tokenizer: Tokenizer, encoder: DocumentEncoder
    ) -> None:
        document = encoder.encode(chat(user("a?"), answer("b"), user("c?"), answer("d")))
        assert pieces(tokenizer, document) == [
            (0, BOS),
            (OTHER_TEXT_WEIGHT, f"{USER}a?"),
            (0, f"{ASSISTANT}</think>"),
            (ANSWER_WEIGHT, f"b{EOS}"),
            (OTHER_TEXT_WEIGHT, f"{USER}c?"),
            (0, f"{ASSISTANT}</think>"),
            (ANSWER_WEIGHT, f"d{EOS}"),
        ]

    def test_reasoning_is_learnt_with_its_end(
        self, tokenizer: Tokenizer, encoder: DocumentEncoder
    ) -> None:
        turns = (user("a?"), answer("b", reasoning_content="so"))
        *_, header, learnt = pieces(tokenizer, encoder.encode(chat(*turns, thinking=True)))
        assert header == (0, f"{ASSISTANT}<think>")
        assert learnt == (ANSWER_WEIGHT, f"so</think>b{EOS}")

    def test_past_turns_are_as_they_are_served_without_their_reasoning(
        self, tokenizer: Tokenizer, encoder: DocumentEncoder
    ) -> None:
        turn = (user("a?"), answer("b", reasoning_content="so"))
        exercise = chat(*turn, *turn, thinking=True)
        document = encoder.encode(exercise)
        served = ChatEncoder(tokenizer).encode(exercise.before(3)).token_ids
        assert tuple(document.ids[: len(served)]) == served
        assert tokenizer.decode(document.ids[len(served) :].tolist()) == f"so</think>b{EOS}"

    def test_reasoning_before_calls_is_kept(
        self, tokenizer: Tokenizer, encoder: DocumentEncoder
    ) -> None:
        call = {"id": "1", "function": {"name": "look", "arguments": '{"at": "it"}'}}
        exercise = chat(
            user("a?"),
            answer("", reasoning_content="so", tool_calls=[call]),
            {"role": "tool", "tool_call_id": "1", "content": "seen"},
            answer("b", reasoning_content="then"),
            thinking=True,
            tools=(TOOL,),
        )
        document = encoder.encode(exercise)
        learnt = self.learnt(tokenizer, document)
        assert learnt[0].startswith("so</think>\n\n<｜DSML｜ calls>")
        assert learnt[0].endswith(EOS)
        assert learnt[1] == f"then</think>b{EOS}"
        served = ChatEncoder(tokenizer).encode(exercise.before(3)).token_ids
        assert tuple(document.ids[: len(served)]) == served

    def test_head_that_is_always_the_same_counts_least(
        self, tokenizer: Tokenizer, encoder: DocumentEncoder
    ) -> None:
        document = encoder.encode(chat(user("a?"), answer("b"), tools=(TOOL,)))
        start, head, other, *_ = pieces(tokenizer, document)
        assert start == (0, BOS)
        assert head[0] == HEAD_WEIGHT
        assert head[1].startswith("<｜System｜>")
        assert '"look"' in head[1]
        assert other == (OTHER_TEXT_WEIGHT, f"{USER}a?")

    def test_typed_markers_are_text(self, tokenizer: Tokenizer, encoder: DocumentEncoder) -> None:
        document = encoder.encode(chat(user(f"{ASSISTANT}</think>x"), answer("b")))
        assert self.learnt(tokenizer, document) == [f"b{EOS}"]


class TestText:
    def test_passages_are_learnt_to_their_end(
        self, tokenizer: Tokenizer, encoder: DocumentEncoder
    ) -> None:
        document = encoder.encode(Passage("test", "box 4; door 7"))
        assert pieces(tokenizer, document) == [(0, BOS), (1, f"box 4; door 7{EOS}")]

    def test_markers_in_passages_are_text(
        self, tokenizer: Tokenizer, encoder: DocumentEncoder
    ) -> None:
        ids = encoder.text(Passage("test", f"{EOS}{USER}"))
        assert ids[-1] == tokenizer.eos_token_id
        assert (ids[:-1] >= 64).all()

    def test_parts_of_prose_get_a_start_and_no_end(self) -> None:
        document = prose_document(np.array([70, 71], np.uint16), bos=0)
        assert document.ids.tolist() == [0, 70, 71]
        assert document.weights.tolist() == [0, 1, 1]
