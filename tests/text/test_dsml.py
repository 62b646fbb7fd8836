"""Tags: any dialect is read as what was meant."""

from __future__ import annotations

import pytest

from leadline.text.dsml import Tag, TagKind, TagReader


def read(text: str, *, is_closing: bool = False) -> tuple[Tag, str]:
    """The tag, and the text behind it; the marker that follows closes it."""
    reader = TagReader(is_closing=is_closing)
    return reader.push(text) or reader.close()


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("tool_calls>", TagKind.BLOCK),
        (" calls>", TagKind.BLOCK),
        ("calls >", TagKind.BLOCK),
        ("function_calls>", TagKind.BLOCK),
        ("toolcalls>", TagKind.BLOCK),
        ("tool>", TagKind.BLOCK),
        ("invoke>", TagKind.INVOKE),
        (" invoke>", TagKind.INVOKE),
        ("\n parameter\n>", TagKind.PARAMETER),
        ("parameters>", None),
        (">", None),
    ],
)
def test_c20_every_name_is_known_with_or_without_space(text: str, kind: TagKind | None) -> None:
    assert read(text) == (Tag(kind, False, {}), "")
    assert read(text, is_closing=True) == (Tag(kind, True, {}), "")


@pytest.mark.parametrize(
    "text",
    [
        ' parameter name="a" string="true">rest',
        " parameter name='a' string='true'>rest",
        " parameter string=\"true\" name='a'>rest",
        ' parameter  name = "a"\n string= "true" >rest',
        "parameter name=a string=true>rest",
        ' parameter name="a" string="true>rest',  # a quote is missing, and another tag follows
    ],
)
def test_c20_attributes_in_any_quotes_and_order(text: str) -> None:
    tag, rest = read(text)
    assert (tag.kind, rest) == (TagKind.PARAMETER, "rest")
    assert tag.attributes["name"] == "a"
    assert tag.attributes.get("string", "true") == "true"


def test_bracket_in_quotes_ends_no_tag() -> None:
    tag, rest = read(' parameter name="a > b" string="true">x > y')
    assert tag.attributes == {"name": "a > b", "string": "true"}
    assert rest == "x > y"


def test_open_quote_ends_with_its_line() -> None:
    reader = TagReader(is_closing=False)
    assert reader.push(' invoke name="f>') is None
    tag, rest = reader.push("\n") or pytest.fail("the tag did not end")
    assert (tag.kind, rest) == (TagKind.INVOKE, "\n")


@pytest.mark.parametrize("text", [' invoke name="f"/>', ' invoke name="f" />', "invoke name=f/>"])
def test_c20_empty_invoke(text: str) -> None:
    assert read(text)[0] == Tag(TagKind.INVOKE, False, {"name": "f"}, is_empty=True)


def test_tag_without_a_bracket_ends_at_the_next_marker() -> None:
    assert read(' invoke name="f"\n') == (Tag(TagKind.INVOKE, False, {"name": "f"}), "")


def test_tag_that_never_ends_is_not_waited_for() -> None:
    reader = TagReader(is_closing=False)
    words = 0
    while reader.push(" word") is None:
        words += 1
        assert words < 200


def test_cuts_do_not_change_a_tag() -> None:
    text = " parameter name=\"a>b\" string='true'>rest"
    for at in range(len(text)):
        reader = TagReader(is_closing=False)
        first = reader.push(text[:at])
        tag, rest = first or reader.push(text[at:]) or reader.close()
        assert tag == read(text)[0]
        assert rest + (text[at:] if first else "") == "rest"
