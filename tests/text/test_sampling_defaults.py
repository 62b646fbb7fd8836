"""Where sampling values come from that a request leaves out: ``--generation-config`` (9.1)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from leadline.config.server import ChatConfig
from leadline.core.errors import ConfigError
from leadline.core.request import SamplingParams
from leadline.text.sampling_defaults import (
    sampling_defaults,
    with_end_tokens,
    with_generation_config,
)

# As released checkpoints have it: not all of it is sampling.
OWN = {
    "_from_model_config": True,
    "bos_token_id": 0,
    "do_sample": True,
    "temperature": 0.6,
    "top_p": 0.95,
    "transformers_version": "4.46.3",
}


def written(folder: Path, content: Any) -> Path:
    folder.mkdir(exist_ok=True)
    text = content if isinstance(content, str) else json.dumps(content)
    (folder / "generation_config.json").write_text(text, encoding="utf-8")
    return folder


def defaults(folder: Path | None, **options: Any) -> dict[str, Any]:
    return sampling_defaults(with_generation_config(ChatConfig(**options), folder))


def test_a_checkpoints_own_values_hold(tmp_path: Path) -> None:
    assert defaults(written(tmp_path, OWN)) == {"temperature": 0.6, "top_p": 0.95}


def test_a_checkpoint_may_have_none(tmp_path: Path) -> None:
    assert defaults(tmp_path) == {}
    assert defaults(None) == {}


def test_overrides_win_key_by_key(tmp_path: Path) -> None:
    given = {"temperature": 0.0, "top_k": 5}
    found = defaults(written(tmp_path, OWN), override_generation_config=given)
    assert found == {"temperature": 0.0, "top_p": 0.95, "top_k": 5}


def test_vllm_reads_no_file(tmp_path: Path) -> None:
    given = {"top_k": 5}
    folder = written(tmp_path, OWN)
    found = defaults(folder, generation_config="vllm", override_generation_config=given)
    assert found == given


def test_another_folder_is_read_in_place_of_the_checkpoint(tmp_path: Path) -> None:
    other = written(tmp_path / "other", {"temperature": 0.1})
    checkpoint = written(tmp_path / "checkpoint", OWN)
    assert defaults(checkpoint, generation_config=str(other)) == {"temperature": 0.1}


@pytest.mark.parametrize("ends", [9, [9], [9, 8]], ids=str)
def test_further_end_tokens_stop_requests_that_heed_ends(tmp_path: Path, ends: Any) -> None:
    options = with_generation_config(ChatConfig(), written(tmp_path, {"eos_token_id": ends}))
    want = (5, 9, 8) if ends == [9, 8] else (5, 9)
    assert with_end_tokens(SamplingParams(stop_token_ids=(5,)), options).stop_token_ids == want
    on = SamplingParams(stop_token_ids=(5,), ignore_eos=True)
    assert with_end_tokens(on, options) is on
    assert with_end_tokens(on, ChatConfig()) is on


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "generation_config.json: not valid JSON"),
        ([1], "generation_config.json: must hold a JSON object, not list"),
        ({"temperature": -1}, "a default of generation_config.json .*temperature is -1"),
        ({"top_p": "much"}, "a default of generation_config.json .*top_p is 'much'"),
        ({"eos_token_id": 1.5}, "a default of generation_config.json .*'float'"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_value_of_no_use_is_named_at_start(tmp_path: Path, content: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        defaults(written(tmp_path, content))


def test_a_named_folder_must_have_the_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"generation_config.json: cannot be read"):
        defaults(None, generation_config=str(tmp_path))
