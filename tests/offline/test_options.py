from __future__ import annotations

from typing import Any

import pytest

from leadline.core.errors import ConfigError
from leadline.offline.options import read_options


def test_flags_of_engine_and_chats_are_options() -> None:
    engine, chat = read_options(
        "m", {"block_size": 128, "max_num_seqs": 3, "tool_strict_level": "function"}
    )
    assert (engine.model, engine.cache.block_size, engine.scheduler.max_num_seqs) == ("m", 128, 3)
    assert chat.tool_strict_level == "function"


def test_lists_of_any_length_are_taken_unless_a_bound_is_set() -> None:
    assert read_options("m", {})[0].scheduler.max_num_queued_reqs == 0
    bounded, _ = read_options("m", {"max_num_queued_reqs": 5})
    assert bounded.scheduler.max_num_queued_reqs == 5


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"tool_strict_levle": "auto"}, TypeError, "did you mean tool_strict_level"),
        ({"port": 80}, TypeError, "unexpected keyword argument 'port'"),
        ({"reasoning_field": "both"}, TypeError, "unexpected keyword argument 'reasoning_field'"),
        ({"tool_strict_level": "very"}, ConfigError, "tool_strict_level is 'very'; choose one of"),
    ],
    ids=["misspelt", "of the server", "of answers over HTTP", "value"],
)
def test_other_options_are_named(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        read_options("m", options)
