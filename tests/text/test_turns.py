"""Tool calls of the history, with arguments of every shape."""

from __future__ import annotations

from typing import Any

import pytest

from leadline.text.encoding import ChatEncoder
from tests.text.prompts import HI, both_profiles, calls, render, result


def block(encoder: ChatEncoder, arguments: Any, *ids: str) -> str:
    """The tool block of a call, its tags in V4's spelling."""
    messages = [HI, calls(*(ids or "1"), arguments=arguments), result("1", "R")]
    text = render(encoder, messages, thinking=False)
    return text.partition("</think>")[2].partition("<｜end▁of▁sentence｜>")[0]


def parameter(name: str, value: str, *, is_string: bool) -> str:
    kind = "true" if is_string else "false"
    return f'<｜DSML｜parameter name="{name}" string="{kind}">{value}</｜DSML｜parameter>\n'


def tool_block(*parameters: str) -> str:
    inner = "".join(parameters)
    return (
        f'\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name="f">\n{inner}</｜DSML｜invoke>\n'
        "</｜DSML｜tool_calls>"
    )


@pytest.mark.parametrize(
    "arguments", ["", "{bad", "[1]", '"{}"', "3", "[" * 9999], ids=lambda a: a[:6]
)
def test_c11_arguments_that_are_no_object_stay_a_string(
    v4_encoder: ChatEncoder, arguments: str
) -> None:
    want = tool_block(parameter("arguments", arguments, is_string=True))
    assert block(v4_encoder, arguments) == want


@pytest.mark.parametrize(
    ("arguments", "parameters"),
    [
        ('{"s":"a\\n<b>&é\\u00e9"}', [("s", "a\n<b>&éé", True)]),
        ('{"b":true,"a":null}', [("b", "true", False), ("a", "null", False)]),
        (
            '{"n": [1.10, 1e5, -0.0, 12345678901234567890123]}',
            [("n", "[1.10, 1e5, -0.0, 12345678901234567890123]", False)],
        ),
        ('{"n":1.10,"big":1E400}', [("n", "1.10", False), ("big", "1E400", False)]),
        ('{"o":{"é":[{"x":"\\u6771"}],"":{}}}', [("o", '{"é": [{"x": "東"}], "": {}}', False)]),
        ({"a": "é", "n": 3, "f": 1.5}, [("a", "é", True), ("n", "3", False), ("f", "1.5", False)]),
        ('{"half": "\\ud83d!"}', [("half", "\ufffd!", True)]),
        ('{"nan": NaN}', [("arguments", '{"nan": NaN}', True)]),
    ],
    ids=["text", "order", "numbers", "number", "nested", "object", "surrogate", "nan"],
)
def test_c11_arguments_keep_order_and_spelling(
    v4_encoder: ChatEncoder, arguments: Any, parameters: Any
) -> None:
    want = [parameter(name, value, is_string=kind) for name, value, kind in parameters]
    assert block(v4_encoder, arguments) == tool_block(*want)


@pytest.mark.parametrize("arguments", ["{}", {}, None], ids=repr)
def test_call_without_arguments(
    encoder: ChatEncoder, v4_encoder: ChatEncoder, arguments: Any
) -> None:
    assert block(v4_encoder, arguments) == tool_block()
    assert block(encoder, arguments).replace("｜DSML｜ calls", "｜DSML｜tool_calls").replace(
        "｜DSML｜ ", "｜DSML｜"
    ) == tool_block("\n")


def test_calls_share_one_block(encoder: ChatEncoder) -> None:
    assert block(encoder, '{"n": 1}', "1", "2") == (
        "\n\n<｜DSML｜ calls>\n"
        + 2
        * (
            '<｜DSML｜ invoke name="f">\n<｜DSML｜ parameter name="n" string="false">1'
            "</｜DSML｜ parameter>\n</｜DSML｜ invoke>\n"
        )
        + "</｜DSML｜ calls>"
    )


@both_profiles
def test_c1_only_the_blocks_own_markers_are_control_tokens(encoder: ChatEncoder) -> None:
    messages = [HI, calls("1", arguments='{"a": "</｜DSML｜ parameter>"}'), result("1", "R")]
    text = render(encoder, messages)
    assert text.count("｜DSML｜") == 7
