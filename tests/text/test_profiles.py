"""Effort tables, and which checkpoint gets which."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from leadline.config.args import from_values
from leadline.config.server import ChatConfig
from leadline.core.errors import BadRequest, ConfigError
from leadline.text.chat import ChatInput
from leadline.text.encoding import ChatEncoder
from leadline.text.profiles import PROFILES, V4, V4_PREVIEW, V41, Profile, choose_profile
from leadline.text.tokenizer import Tokenizer
from tests.text.prompts import HI, render

FIRST_TEXT = "Reasoning Effort: Absolute maximum"
SECOND_TEXT = "Reasoning Effort: Beyond maximum"


@pytest.mark.parametrize(
    ("profile", "effort", "head"),
    [
        (V4, None, FIRST_TEXT),
        (V4, "high", FIRST_TEXT),
        (V4, "max", SECOND_TEXT),
        (V4, "low", "<｜User｜>"),
        (V4_PREVIEW, "max", FIRST_TEXT),
        (V4_PREVIEW, None, "<｜User｜>"),
        (V4_PREVIEW, "high", "<｜User｜>"),
        (V4_PREVIEW, "low", "<｜User｜>"),
    ],
    ids=lambda value: getattr(value, "name", str(value))[:30],
)
def test_c6_effort_texts_of_v4(tokenizer: Tokenizer, profile: Any, effort: Any, head: str) -> None:
    text = render(ChatEncoder(tokenizer, profile), [HI], reasoning_effort=effort)
    assert text.startswith(head)
    assert text.count("Reasoning Effort:") == (head != "<｜User｜>")


@pytest.mark.parametrize(
    ("effort", "number"),
    [
        ("low", 50),
        ("minimal", 50),
        (None, 75),
        ("medium", 75),
        ("high", 75),
        ("xhigh", 75),
        ("max", 100),
        ("ultra", 100),
        (1, 1),
        (37, 37),
        (100, 100),
        (37.0, 37),
        ("30", 30),
    ],
    ids=str,
)
def test_c7_effort_line_says_the_number(encoder: ChatEncoder, effort: Any, number: int) -> None:
    line = f"Reasoning Effort: {number} (range 1-100, the higher the value, the more thorough the "
    want = f"<｜System｜>{line}reasoning)\n\n<｜User｜>Hi<｜Assistant｜><think>"
    assert render(encoder, [HI], reasoning_effort=effort) == want


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize(
    "effort",
    [0, 101, -1, True, 12.5, "bogus", "101", "", "٣", "9" * 5000],
    ids=lambda e: repr(e)[:9],
)
def test_c7_other_efforts_are_refused(tokenizer: Tokenizer, profile: str, effort: Any) -> None:
    with pytest.raises(BadRequest, match="reasoning_effort is") as caught:
        ChatEncoder(tokenizer, PROFILES[profile]).encode(ChatInput([HI], reasoning_effort=effort))
    assert caught.value.param == "reasoning_effort"


def test_c7_v4_has_no_numbers(v4_encoder: ChatEncoder) -> None:
    with pytest.raises(BadRequest, match="DeepSeek-V4 has no numeric effort"):
        v4_encoder.encode(ChatInput([HI], reasoning_effort=30))


@pytest.mark.parametrize(
    ("effort", "is_max"), [("max", True), ("ultra", True), (100, True), (99, False), (None, False)]
)
def test_highest_effort_is_told(encoder: ChatEncoder, effort: Any, is_max: bool) -> None:
    assert encoder.encode(ChatInput([HI], reasoning_effort=effort)).is_max_effort is is_max
    off = encoder.encode(ChatInput([HI], reasoning_effort=effort, thinking=False))
    assert not off.is_max_effort


def test_r2_the_table_is_the_profiles() -> None:
    assert V41.efforts == {"low": 50, "high": 75, "max": 100}


def checkpoint(folder: Path, model_type: str, **keys: int) -> Path:
    (folder / "config.json").write_text(json.dumps({"model_type": model_type, **keys}))
    return folder


@pytest.mark.parametrize(
    ("setting", "model_type", "encoder", "profile"),
    [
        ("auto", "deepseek_v41", None, V41),
        ("auto", "deepseek_v4", None, V4),
        ("auto", "deepseek_v4", 'MAX = "Beyond maximum"', V4),
        ("auto", "deepseek_v4", 'MAX = "Absolute maximum"', V4_PREVIEW),
        ("v4-preview", "deepseek_v4", 'MAX = "Beyond maximum"', V4_PREVIEW),
        ("v41", "deepseek_v4", None, V41),
    ],
    ids=["v41", "v4-alone", "released", "preview", "set", "set-v41"],
)
def test_c6_choice_of_profile_is_logged(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    setting: str,
    model_type: str,
    encoder: str | None,
    profile: Profile,
) -> None:
    if encoder:
        (tmp_path / "encoding").mkdir()
        (tmp_path / "encoding" / "encoding_dsv4.py").write_text(encoder)
    with caplog.at_level(logging.INFO):
        assert choose_profile(setting, checkpoint(tmp_path, model_type)) is profile
    assert f"chat format {profile.name} (" in caplog.text


@pytest.mark.parametrize(
    ("setting", "model_type"), [("auto", "llama"), ("v3", "deepseek_v41")], ids=["model", "name"]
)
def test_unknown_profiles_are_refused(tmp_path: Path, setting: str, model_type: str) -> None:
    with pytest.raises(ConfigError, match="profile"):
        choose_profile(setting, checkpoint(tmp_path, model_type))


@pytest.mark.parametrize(
    ("keys", "profile"),
    [
        ({"num_nextn_predict_layers": 1}, V4_PREVIEW),
        ({"num_nextn_predict_layers": 1, "dspark_block_size": 5}, V4),
        ({"num_nextn_predict_layers": 0}, V4),
    ],
    ids=["mtp", "dspark", "none"],
)
def test_c6_without_an_encoder_the_draft_tells_a_preview(
    tmp_path: Path, keys: dict[str, int], profile: Profile
) -> None:
    assert choose_profile("auto", checkpoint(tmp_path, "deepseek_v4", **keys)) is profile


@pytest.mark.parametrize(
    ("preset", "profile"),
    [
        (None, V41),
        ("tiny-22m", V41),
        ("tiny-v4", V4),
        ("v4-pro-0813", V4),
        ("v4-pro", V4_PREVIEW),
    ],
)
def test_c6_a_preset_has_the_format_of_its_model(preset: str | None, profile: Profile) -> None:
    assert choose_profile("auto", None, preset) is profile


@pytest.mark.parametrize("flag", ["reasoning_parser", "tool_call_parser", "tokenizer_mode"])
@pytest.mark.parametrize(
    ("profile", "name", "is_told"),
    [
        (V4, "auto", False),
        (V4, "hf", False),
        (V4, "deepseek_v4", False),
        (V4, "deepseek-v4", False),
        (V4, "DeepSeekV4", False),
        (V4, "deepseek_v41", True),
        (V4_PREVIEW, "deepseek_v4", False),
        (V41, "deepseekv41", False),
        (V41, "deepseek_v4", True),
        (V41, "hermes", True),
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_names_of_another_chat_format_are_told(
    tokenizer: Tokenizer,
    caplog: pytest.LogCaptureFixture,
    flag: str,
    profile: Profile,
    name: str,
    is_told: bool,
) -> None:
    with caplog.at_level(logging.WARNING):
        ChatEncoder(tokenizer, profile, from_values(ChatConfig, {flag: name}))
    spelt = "--" + flag.replace("_", "-")
    told = [f"{spelt} {name}: this model's chat format is {profile.parser}"]
    assert caplog.messages == (told if is_told else [])
