"""The domains of sampling parameters."""

from __future__ import annotations

from typing import Any

import pytest

from leadline.core.errors import BadRequest
from leadline.core.request import MAX_LISTED, SamplingParams


@pytest.mark.parametrize(
    ("name", "one_too_many"),
    [
        ("logit_bias", dict.fromkeys(range(MAX_LISTED + 1), 1.0)),
        ("allowed_token_ids", range(MAX_LISTED + 1)),
        ("stop_token_ids", range(MAX_LISTED + 1)),
        ("bad_words", ["a"] * (MAX_LISTED + 1)),
    ],
    ids=["logit_bias", "allowed_token_ids", "stop_token_ids", "bad_words"],
)
def test_lists_that_would_slow_every_step_are_refused(name: str, one_too_many: Any) -> None:
    with pytest.raises(BadRequest, match=f"at most {MAX_LISTED}") as caught:
        SamplingParams(**{name: one_too_many})
    assert caught.value.param == name
