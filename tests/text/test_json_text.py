"""JSON with the spelling of its numbers."""

from __future__ import annotations

import pytest

from leadline.text.json_text import canonical, dumps, loads


@pytest.mark.parametrize(
    "text",
    ['{"a": [1.10, 1e5, -0, 1234567890123456789012345], "é": {"x": null}}', '"\\"\\n"', "[]", "{}"],
)
def test_what_was_parsed_is_written_alike(text: str) -> None:
    assert dumps(loads(text)) == text
    assert dumps(loads(text.replace(" ", ""))) == text


@pytest.mark.parametrize("text", ["", "{", "NaN", "[Infinity]", "[" * 100_000], ids=lambda t: t[:4])
def test_no_json_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError, match=r"Expecting|is no JSON|nested"):
        loads(text)


def test_canonical_form_is_what_a_text_means() -> None:
    assert canonical('{"b": 1.0, "a": "\\u00e9"}') == canonical('{"a":"é","b":1}')
    assert canonical("1") != canonical("true")
    assert canonical("12345678901234567890123") != canonical("12345678901234567890124")
    assert canonical("{bad") == "{bad"
