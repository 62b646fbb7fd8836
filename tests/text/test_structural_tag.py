"""Structural tags in both spellings: free text around, a grammar inside."""

from __future__ import annotations

import json
from typing import Any

import pytest

from leadline.core.errors import BadRequest
from leadline.text.structural_tag import structural_tag_grammar
from leadline.text.tokenizer import Tokenizer
from tests.text.grammars import Grammars

NUMBER: Any = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}


@pytest.fixture(scope="module")
def tiny(tokenizer: Tokenizer) -> Grammars:
    return Grammars(tokenizer)


def tag(begin: str, content: Any, end: str) -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


TAGS = [
    tag("<f=get>", {"type": "json_schema", "json_schema": NUMBER}, "</f>"),
    tag("<f=text>", {"type": "any_text"}, "</f>"),
]
OLD = {
    "type": "structural_tag",
    "structures": [
        {"begin": "<f=get>", "schema": NUMBER, "end": "</f>"},
        {"begin": "<f=any>", "end": "</f>"},
    ],
    "triggers": ["<f="],
}


def new(form: Any) -> dict[str, Any]:
    return {"type": "structural_tag", "format": form}


TRIGGERED = {"type": "triggered_tags", "triggers": ["<f="], "tags": TAGS}
SEPARATED = {"type": "tags_with_separator", "tags": TAGS, "separator": ", "}


@pytest.mark.parametrize(
    ("given", "good", "bad"),
    [
        pytest.param(
            OLD,
            ["", "no tag <f at all", 'a <f=get>{"n": 1}</f> b', "<f=any>[1]</f><f=any>2</f>"],
            ["<f=get>x", "<f=put>", '<f=get>{"n": 1}</g>'],
            id="structures",
        ),
        pytest.param(
            new(TRIGGERED),
            ["", "text", 'a <f=get>{"n":1}</f> b', "<f=text>x < </f <b></f> and"],
            ["<f=get>x", "<f=other>"],
            id="triggered_tags",
        ),
        pytest.param(
            new({**TRIGGERED, "at_least_one": True}),
            ['<f=get>{"n":1}</f>', "a <f=text>b</f> c <f=text>d</f>"],
            ["<f=get>x"],
            id="at_least_one",
        ),
        pytest.param(
            new({**TRIGGERED, "at_least_one": True, "stop_after_first": True}),
            ["a <f=text>b</f>"],
            ["a <f=text>b</f> "],
            id="stop_after_first",
        ),
        pytest.param(
            new(SEPARATED),
            ["", "<f=text>a</f>", '<f=text>a</f>, <f=get>{"n": 2}</f>'],
            ["<f=text>a</f>;", "x"],
            id="tags_with_separator",
        ),
        pytest.param(
            new(
                {
                    "type": "sequence",
                    "elements": [
                        {"type": "const_string", "value": "Answer: "},
                        {
                            "type": "or",
                            "elements": [
                                {"type": "regex", "pattern": "[0-9]+"},
                                {"type": "json_schema", "json_schema": True},
                            ],
                        },
                    ],
                }
            ),
            ["Answer: 42", 'Answer: {"a": null}'],
            ["42", "Answer: x"],
            id="sequence",
        ),
    ],
)
def test_structural_tag_takes_its_texts_and_no_others(
    tiny: Grammars, given: dict[str, Any], good: list[str], bad: list[str]
) -> None:
    for spelled in (given, json.dumps(given)):
        grammar = structural_tag_grammar(spelled, param="tag")
        for text in good:
            assert tiny.accepts(grammar, text)
        for text in bad:
            assert not tiny.allows(grammar, text)


def test_at_least_one_tag_is_needed(tiny: Grammars) -> None:
    triggered = structural_tag_grammar(new({**TRIGGERED, "at_least_one": True}), param="tag")
    separated = structural_tag_grammar(new({**SEPARATED, "at_least_one": True}), param="tag")
    assert not tiny.accepts(triggered, "text")
    assert not tiny.accepts(separated, "")


def nested(depth: int) -> Any:
    form: Any = {"type": "any_text"}
    for _ in range(depth):
        form = {"type": "sequence", "elements": [form]}
    return form


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ("{", "tag"),
        ("[]", "tag"),
        ({}, "tag.format"),
        (new({"type": "poem"}), "tag.format.type"),
        (new({"type": ["regex"]}), "tag.format.type"),
        (new({"type": "sequence", "elements": []}), "tag.format.elements"),
        (new({"type": "sequence", "elements": [3]}), "tag.format.elements[0].type"),
        (new({"type": "regex"}), "tag.format.pattern"),
        (new({**TRIGGERED, "triggers": ["<g"]}), "tag.format.tags[0]"),
        (new({**TRIGGERED, "tags": []}), "tag.format"),
        (new(tag("<a>", {"type": "poem"}, "</a>")), "tag.format.content.type"),
        ({**OLD, "triggers": None}, "tag.triggers"),
        ({**OLD, "structures": [3]}, "tag.structures[0]"),
        (new(nested(20)), "tag.format" + ".elements[0]" * 16),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_c43_wrong_structural_tag_is_named(given: Any, param: str) -> None:
    with pytest.raises(BadRequest) as error:
        structural_tag_grammar(given, param="tag")
    assert (error.value.param, error.value.code) == (param, "invalid_schema")
