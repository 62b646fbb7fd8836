from __future__ import annotations

import logging
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from leadline.config.args import FlagParser, closest, from_values, parse_count, settings
from leadline.config.engine import EngineConfig
from leadline.config.server import ChatConfig
from leadline.core.errors import ConfigError, NotSupported


@dataclass(frozen=True, slots=True, kw_only=True)
class DoorConfig:
    """A second tree.

    Attributes:
        port: where to listen; 100% of ports
            are allowed.
        served_model_name: names that clients use.
        colours: by part.
    """

    port: int = 8000
    served_model_name: tuple[str, ...] = ()
    colours: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HouseConfig:
    """A tree with a branch.

    Attributes:
        address: where it stands.
        is_open: whether one may enter.
        door: how.
    """

    address: str
    is_open: bool = True
    door: DoorConfig = field(default_factory=DoorConfig)


def parse(*argv: str, environ: dict[str, str] | None = None) -> dict[str, Any]:
    parser = FlagParser("leadline serve", "[MODEL]", "Serve.", [EngineConfig, DoorConfig])
    return parser.parse(argv, environ or {})[0]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("8192", 8192),
        ("-5", -5),
        ("9223372036854775807", 2**63 - 1),
        ("128k", 128 * 1024),
        ("128K", 128 * 1024),
        ("1m", 1024**2),
        ("0.5m", 512 * 1024),
        ("2GiB", 2 * 1024**3),
        ("2gib", 2 * 1024**3),
        ("2 GiB", 2 * 1024**3),
        ("2G", 2 * 1024**3),
        ("2GB", 2 * 1000**3),
        ("1TiB", 1024**4),
    ],
)
def test_counts_are_read_as_people_type_them(text: str, value: int) -> None:
    assert parse_count(text) == value


@pytest.mark.parametrize("text", ["", "k", "1.5", "12x", "2Gi", "1e3", "0x10", "two", "1 2"])
def test_other_spellings_of_counts_are_refused_by_value(text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(repr(text))):
        parse_count(text)


@pytest.mark.parametrize(
    "argv",
    [
        ["--max-num-seqs", "7"],
        ["--max-num-seqs=7"],
        ["--max_num_seqs", "7"],
        ["--max_num_seqs=7"],
        ["--max-num-seqs", "3", "--max_num_seqs", "7"],
    ],
    ids=" ".join,
)
def test_both_spellings_of_a_flag_and_of_its_value(argv: list[str]) -> None:
    assert parse(*argv) == {"max_num_seqs": 7}


def test_underscores_of_values_stay() -> None:
    assert parse("--kv_cache_dtype=nvfp4_ds_mla") == {"kv_cache_dtype": "nvfp4_ds_mla"}


def test_only_what_was_given_is_returned() -> None:
    assert parse() == {}


@pytest.mark.parametrize("name", ["exact_rounding", "debug_nonfinite", "enable_prefix_caching"])
def test_bools_have_a_no_form(name: str) -> None:
    flag = name.replace("_", "-")
    assert parse(f"--{flag}") == {name: True}
    assert parse(f"--no-{flag}") == {name: False}
    assert parse(f"--no_{name}") == {name: False}


def test_auto_is_none_where_none_means_the_best() -> None:
    assert parse("--max-model-len", "auto") == {"max_model_len": None}
    assert parse("--dtype", "auto") == {"dtype": "auto"}


@pytest.mark.parametrize(
    "argv",
    [
        ["--served-model-name", "a", "b"],
        ["--served-model-name", "a", "--served-model-name=b"],
        ["--served-model-name", '["a", "b"]'],
        ["--served-model-name", '["a"]', "--served-model-name", "b"],
    ],
    ids=" ".join,
)
def test_a_tuple_takes_several_values_apart_repeated_or_as_json(argv: list[str]) -> None:
    assert parse(*argv) == {"served_model_name": ["a", "b"]}


@pytest.mark.parametrize(
    ("argv", "value"),
    [
        (['--colours={"frame": "red"}'], {"frame": "red"}),
        (["--colours.frame", "red"], {"frame": "red"}),
        (["--colours.number_of_coats", "2"], {"number_of_coats": 2}),
        (["--colours.frame=True", "--colours.a.b", "0.5"], {"frame": True, "a": {"b": 0.5}}),
        (['--colours={"a": {"b": 1}}', "--colours.a.c", "x y"], {"a": {"b": 1, "c": "x y"}}),
        (["--colours.a", "1", '--colours={"a": 2}'], {"a": 2}),
    ],
    ids=str,
)
def test_a_json_flag_takes_single_keys_too(argv: list[str], value: dict[str, Any]) -> None:
    assert parse(*argv) == {"colours": value}


SETTINGS = """
port: 1
max-num-seqs: 2
served_model_name: [a, b]
colours: {frame: red}
exact-rounding: false
debug_nonfinite: true
max_model_len: 128k
revision: null
"""


def test_a_file_gives_flags_and_environment_and_command_line_win(tmp_path: Path) -> None:
    file = tmp_path / "flags.yaml"
    file.write_text(SETTINGS)
    environ = {"LEADLINE_PORT": "3", "LEADLINE_MAX_NUM_SEQS": "4"}
    given = parse("--config", str(file), "--max-num-seqs", "5", environ=environ)
    assert given == {
        "port": 3,
        "max_num_seqs": 5,
        "served_model_name": ["a", "b"],
        "colours": {"frame": "red"},
        "exact_rounding": False,
        "debug_nonfinite": True,
        "max_model_len": 128 * 1024,
    }
    assert parse(environ={"LEADLINE_CONFIG": str(file)})["port"] == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- a", "which is no mapping of flags to values"),
        ("{", "which cannot be read"),
        ("prot: 1", "unknown flag --prot; did you mean --port?"),
        ("port: http", "--port: 'http' is not a whole number"),
    ],
    ids=str,
)
def test_a_bad_file_is_named(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "flags.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=re.escape(message)) as error:
        parse("--config", str(file))
    assert str(file) in str(error.value)


def test_positionals_may_stand_before_and_behind_flags() -> None:
    parser = FlagParser("leadline serve", "[MODEL]", "Serve.", [EngineConfig])
    for argv in (["m", "--seed", "1"], ["--seed", "1", "m"], ["--seed", "1", "--", "m"]):
        assert parser.parse(argv, {}) == ({"seed": 1}, ["m"])
    assert parser.parse(["--", "--seed"], {})[1] == ["--seed"]
    assert parser.parse(["-"], {})[1] == ["-"]


def test_environment_gives_values_and_the_command_line_wins() -> None:
    environ = {
        "LEADLINE_MAX_NUM_SEQS": "9",
        "LEADLINE_EXACT_ROUNDING": "false",
        "LEADLINE_DEBUG_NONFINITE": "1",
        "LEADLINE_SERVED_MODEL_NAME": "x y",
        "LEADLINE_KV_CACHE_MEMORY_BYTES": "1GiB",
        "LEADLINE_SOMETHING_ELSE": "?",
    }
    assert parse("--max-num-seqs", "2", environ=environ) == {
        "max_num_seqs": 2,
        "exact_rounding": False,
        "debug_nonfinite": True,
        "served_model_name": ["x", "y"],
        "kv_cache_memory_bytes": 1024**3,
    }


@pytest.mark.parametrize(
    ("argv", "environ", "message"),
    [
        (["--max-modl-len", "8"], {}, "unknown flag --max-modl-len; did you mean --max-model-len?"),
        (["--max_modl_len=8"], {}, "unknown flag --max-modl-len; did you mean --max-model-len?"),
        (["--xyzzy"], {}, "unknown flag --xyzzy"),
        (["--max-num"], {}, "unknown flag --max-num; did you mean --max-num-seqs?"),
        (["--max-num-seqs", "lots"], {}, "--max-num-seqs: 'lots' is not a whole number"),
        (["--max-num-seqs"], {}, "--max-num-seqs: expected one argument"),
        (["--colours", "red"], {}, "--colours: 'red' is not a JSON object"),
        (["--colours.frame"], {}, "--colours.frame: expected one argument"),
        (["--served-model-name", "[1]"], {}, "--served-model-name: '[1]' is not a JSON list of"),
        (["--config", "nowhere.yaml"], {}, "config is 'nowhere.yaml', which cannot be read"),
        (["--gpu-memory-utilization", "90%"], {}, "--gpu-memory-utilization: could not convert"),
        ([], {"LEADLINE_PORT": "http"}, "in the environment: --port: 'http' is not a whole"),
        ([], {"LEADLINE_EXACT_ROUNDING": "maybe"}, "LEADLINE_EXACT_ROUNDING is 'maybe'; write"),
    ],
    ids=str,
)
def test_bad_flags_are_one_clear_error(
    argv: list[str], environ: dict[str, str], message: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        parse(*argv, environ=environ)


@pytest.mark.parametrize(
    "argv",
    [
        ["--trust-remote-code"],
        ["--enable-chunked-prefill"],
        ["--no-enable-chunked-prefill"],
        ["--disable-log-requests"],
        ["--enable-auto-tool-choice"],
        ["--compilation-config", '{"level": 3}'],
        ["--attention-backend", "FLASHMLA"],
        ["--moe-backend=auto"],
        ["--swap-space", "4"],
    ],
    ids=" ".join,
)
def test_flags_of_other_servers_warn_once_each(
    argv: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert parse(*argv) == {}
    assert len(caplog.messages) == 1
    assert argv[0].removeprefix("--no-").removeprefix("--").partition("=")[0] in caplog.messages[0]


@pytest.mark.parametrize(
    ("argv", "values"),
    [
        (["--no-swa-bounded-replay"], {"swa_bounded_replay": False}),
        (["--swa-replay-lower"], {"swa_replay_lower": True}),
        (["--no-swa-replay-upper"], {"swa_replay_upper": False}),
        (["--swa-replay-length", "4k"], {"swa_replay_length": 4096}),
        (["--snapshot-interval", "0"], {"snapshot_interval": 0}),
        (["--hot-slots", "4"], {"hot_slots": 4}),
        (["--no-enable-prefix-caching"], {"enable_prefix_caching": False}),
        (["--no-async-scheduling"], {"async_scheduling": False}),
        (["--check-integrity"], {"check_integrity": True}),
        (["--cuda-graphs", "decode"], {"cuda_graphs": "decode"}),
        (["--enforce-eager"], {"cuda_graphs": "off"}),
        (["--no-enforce-eager"], {}),
        (["--enforce-eager", "--cuda-graphs", "all"], {"cuda_graphs": "all"}),
        (["--cuda-graphs", "all", "--enforce-eager"], {"cuda_graphs": "all"}),
    ],
    ids=str,
)
def test_caching_and_replay_have_flags(argv: list[str], values: dict[str, object]) -> None:
    assert parse(*argv) == values


@pytest.mark.parametrize(
    "argv",
    [
        ["--tensor-parallel-size", "1"],
        ["-tp", "1"],
        ["-dp", "1"],
        ["-pp", "1"],
    ],
    ids=" ".join,
)
def test_flags_that_ask_for_what_is_so_are_silent(
    argv: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert parse(*argv) == {}
    assert caplog.messages == []


@pytest.mark.parametrize("config", [EngineConfig, ChatConfig])
def test_names_of_chat_formats_are_taken_by_every_command(config: type) -> None:
    parser = FlagParser("leadline", "[MODEL]", "", [config])
    argv = ["--reasoning-parser", "a", "--tool-call-parser=b", "--tokenizer-mode", "c"]
    asked = {"reasoning_parser": "a", "tool_call_parser": "b", "tokenizer_mode": "c"}
    assert parser.parse(argv, {})[0] == asked


@pytest.mark.parametrize(
    ("flag", "value", "feature"),
    [
        ("-tp", "2", "tensor parallelism"),
        ("--data-parallel-size", "8", "data parallelism"),
        ("--pipeline-parallel-size", "2", "pipeline parallelism"),
    ],
)
def test_parallelism_is_refused_by_name(flag: str, value: str, feature: str) -> None:
    with pytest.raises(NotSupported, match=f"{value}: {feature} does not exist yet"):
        parse(flag, value)


def test_help_shows_every_flag_its_meaning_and_its_default(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as exit_:
        parse("--help")
    assert exit_.value.code == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "where to listen; 100% of ports are allowed. (default: 8000)" in shown
    for setting in settings(EngineConfig):
        assert setting.flag in shown
        assert setting.help, f"{setting.name} has no entry in its dataclass's docstring"


def test_from_values_fills_the_tree_and_keeps_defaults() -> None:
    values = {"address": "here", "port": 1, "unrelated": 2}
    house = from_values(HouseConfig, values)
    assert house == HouseConfig(address="here", door=DoorConfig(port=1))
    assert from_values(HouseConfig, {"address": "x"}).door.port == DoorConfig().port


def test_names_of_leaves_are_unique() -> None:
    names = [setting.name for setting in settings(EngineConfig)]
    assert len(set(names)) == len(names)


def test_closest_suggests_only_near_names() -> None:
    assert closest("dtyp", ["dtype", "seed"]) == "; did you mean dtype?"
    assert closest("zzz", ["dtype", "seed"]) == ""
