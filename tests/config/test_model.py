from __future__ import annotations

import copy
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from leadline.config.model import (
    LayerMode,
    load_model_config,
    model_config_to_json,
    parse_model_config,
)
from leadline.config.presets import V41_PRESETS, preset
from leadline.core.errors import ConfigError, NotSupported

Change = Callable[[dict[str, Any]], Any]


@pytest.fixture
def raw(golden: Path) -> dict[str, Any]:
    """A good file with every section, drafts and quantisation included."""
    loaded: dict[str, Any] = json.loads((golden / "v41-reference/config.json").read_text())
    return loaded


def text(**values: Any) -> Change:
    return lambda raw: raw["text_config"].update(values)


def quantization(**values: Any) -> Change:
    return lambda raw: raw["quantization_config"].update(values)


def drop(name: str) -> Change:
    return lambda raw: raw["text_config"].pop(name)


@pytest.mark.parametrize("name", V41_PRESETS)
def test_presets_survive_the_official_layout(name: str) -> None:
    config = preset(name)
    assert parse_model_config(json.loads(json.dumps(model_config_to_json(config)))) == config


def test_layer_table_of_the_official_schedule() -> None:
    """v41-model 2.5."""
    config = preset("v4.1-flash")
    assert config.cut == 20
    assert [config.mode(layer) for layer in (0, 2, 3, 20, 24, 39)] == [
        LayerMode.WINDOW,
        LayerMode.FULL,
        LayerMode.REUSE,
        LayerMode.FULL,
        LayerMode.REINDEX,
        LayerMode.REUSE,
    ]
    assert [config.kv_source(layer) for layer in (1, 7, 13, 19, 20, 39)] == [None, 2, 8, 14, 20, 20]
    assert [config.index_source(layer) for layer in (1, 23, 24, 35, 39)] == [None, 20, 24, 32, 36]
    assert config.engram_columns == 24


# What is wrong, how it gets in, and the message that names it.
BAD: list[tuple[str, Change, str]] = [
    ("a missing key", drop("head_dim"), r"missing key\(s\) head_dim in text_config"),
    ("two missing keys", lambda r: (drop("hc_mult")(r), drop("hc_eps")(r)), "hc_mult, hc_eps"),
    ("text for a number", text(hidden_size="128"), "hidden_size is '128'; it must be of type int"),
    ("a switch for a number", text(index_topk=True), "index_topk is True; it must be of type int"),
    ("a fraction for a count", text(head_dim=64.5), "head_dim is 64.5; it must be of type int"),
    ("a number for a list", text(compress_ratios=2), "compress_ratios is 2; it must be a list"),
    ("text in a list", text(engram_layer_ids=["1"]), r"engram_layer_ids\[0\] is '1'"),
    ("not finite", text(swiglu_limit=float("nan")), "swiglu_limit is nan; it must be finite"),
    ("zero", text(sliding_window=0), "sliding_window is 0; it must be positive"),
    ("no object", text(rope_scaling=[]), r"rope_scaling is \[\]; it must be an object"),
    (
        "half an object",
        text(rope_scaling={"rope_type": "yarn"}),
        "rope_scaling: missing key factor",
    ),
    ("another rope", lambda r: rope(r, rope_type="linear"), "rope_type is 'linear'; only 'yarn'"),
    ("another activation", text(hidden_act="gelu"), "hidden_act is 'gelu'; V4.1 is defined for"),
    ("weights not normalised", text(norm_topk_prob=False), "norm_topk_prob is False; V4.1 is"),
    ("V4's blocks", quantization(weight_block_size=[128, 128]), r"weight_block_size is \[128, 128"),
    ("numbers for scales", quantization(scale_fmt="float"), "scale_fmt is 'float'; V4.1 is"),
    ("tied embeddings", text(tie_word_embeddings=True), "tie_word_embeddings is True"),
    ("a short schedule", text(compress_ratios=[0, 0, 2]), "compress_ratios has 3 entries"),
    (
        "a ratio without its source",
        lambda r: r["text_config"]["compress_ratios"].__setitem__(1, 2),
        "layer 1 has compress ratio 2, but its KV source is none",
    ),
    (
        "a ratio that differs from its source",
        lambda r: r["text_config"]["compress_ratios"].__setitem__(3, 1),
        "layer 3 has compress ratio 1, but its KV source is layer 2 with ratio 2",
    ),
    ("a negative ratio", lambda r: set_ratio(r, 0, -2), r"compress_ratios\[0\] is -2"),
    ("a draft that compresses", lambda r: set_ratio(r, 8, 1), "of the draft stages"),
    ("no KV source", text(kv_source_layer_ids=[]), "kv_source_layer_ids is empty"),
    ("sources out of order", text(kv_source_layer_ids=[4, 2]), "must be ascending layer numbers"),
    ("a source past the end", text(index_source_layer_ids=[2, 4, 60]), "layer numbers below 8"),
    ("a source that is window-only", text(index_source_layer_ids=[1, 2, 4]), "its ratio is 0"),
    (
        "a KV source that is no index source",
        text(index_source_layer_ids=[4, 6]),
        "KV source 2 is missing in index_source_layer_ids",
    ),
    ("candidates from elsewhere", text(candidate_source_layer_id=6), "which is no KV source"),
    ("no candidate blocks", text(candidate_topk_blocks=0), "candidate_topk_blocks and"),
    ("too many experts a token", text(num_experts_per_tok=9), "more than n_routed_experts"),
    ("uneven output groups", text(o_groups=3), "not a multiple of o_groups"),
    ("too wide a rotation", text(qk_rope_head_dim=66), "qk_rope_head_dim is 66"),
    ("an odd rotation", text(qk_rope_head_dim=15), "it must be even"),
    ("a width without whole blocks", text(head_dim=48), "head_dim is 48; the cache formats need"),
    ("Engram tables missing", text(engram_num_embeddings=[630]), "they must match"),
    ("no Engram heads", text(engram_n_heads=0), "engram_n_heads must be positive"),
    ("no n-grams", text(engram_max_ngram_size=1), "engram_max_ngram_size is 1; at least 2"),
    ("a pad outside", text(engram_pad_token_id=512), "outside the vocabulary"),
    ("a draft without a block", text(dspark_block_size=0), "dspark_block_size and"),
    ("a draft with too many experts", text(dspark_num_experts_per_tok=5), "must lie in 1..dspark"),
    ("draft features from nowhere", text(dspark_target_layer_ids=[9]), "of the backbone"),
    ("no text model", lambda r: r.pop("text_config"), "text_config is missing"),
    ("another architecture", lambda r: r.update(architectures=["Llama"]), "it must name Deepseek"),
]


def rope(raw: dict[str, Any], **values: Any) -> None:
    raw["text_config"]["rope_scaling"].update(values)


def set_ratio(raw: dict[str, Any], layer: int, ratio: int) -> None:
    raw["text_config"]["compress_ratios"][layer] = ratio


@pytest.mark.parametrize(
    ("change", "message"), [case[1:] for case in BAD], ids=[case[0] for case in BAD]
)
def test_a_bad_configuration_gets_one_message_that_names_file_and_key(
    raw: dict[str, Any], change: Change, message: str
) -> None:
    broken = copy.deepcopy(raw)
    change(broken)
    with pytest.raises(ConfigError, match=message) as caught:
        parse_model_config(broken, where="DIR/config.json")
    assert str(caught.value).startswith("DIR/config.json: ")
    assert "\n" not in str(caught.value)


def test_another_model_is_named(raw: dict[str, Any]) -> None:
    with pytest.raises(NotSupported, match="model_type is 'deepseek_v4', not 'deepseek_v41'"):
        parse_model_config(raw | {"model_type": "deepseek_v4"})


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "cannot be read"), ("{", "not valid JSON"), ("[]", "must hold a JSON object")],
    ids=["missing", "broken", "a list"],
)
def test_a_file_that_is_no_configuration(tmp_path: Path, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=rf"config\.json.*{message}"):
        load_model_config(tmp_path)


def test_an_unknown_key_warns_once_by_name(
    raw: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    raw["text_config"]["moonlight"] = 1
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            parse_model_config(raw, where="test_an_unknown_key")
    assert [record.message for record in caplog.records] == [
        "test_an_unknown_key: unknown key text_config.moonlight is ignored"
    ]


def test_older_spellings_are_understood(raw: dict[str, Any]) -> None:
    raw["torch_dtype"] = raw.pop("dtype")
    raw["text_config"]["engram_pad_id"] = raw["text_config"].pop("engram_pad_token_id")
    assert parse_model_config(raw).engram_pad_token_id == 2
