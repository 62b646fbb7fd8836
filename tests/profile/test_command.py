"""``leadline profile`` as it is typed."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from leadline.cli import main
from leadline.config.engine import CacheConfig, EngineConfig
from leadline.config.presets import SLICE_96
from leadline.core.errors import ConfigError
from leadline.profile.command import step_bound
from leadline.profile.measure import Profile
from leadline.profile.options import ProfileOptions
from leadline.profile.report import component_table, numbers, step_table
from leadline.profile.roofline import (
    ATTENTION,
    CANDIDATE_LOGITS,
    COMPONENTS,
    DENSE_LOGITS,
    ENGRAM,
    PROJECTIONS,
    ROUTER,
)
from leadline.profile.trace import OTHER

SMALL = ("--kv-cache-memory-bytes", "32MiB", "--max-model-len", "1024", "--max-num-seqs", "4")
FAST = ("--device", "cpu", "--steps", "2", "--warmup", "1")


def profile(folder: Path, *flags: str) -> Any:
    file = folder / "found.json"
    assert main(["profile", *flags, *SMALL, *FAST, "--json", str(file)]) == 0
    return json.loads(file.read_text())


def test_decode_steps_are_told_by_component(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.json.gz"
    flags = ("decode", "--batch-size", "3", "--context", "700", "--trace", str(trace))
    found = profile(tmp_path, *flags)
    shown = capsys.readouterr().out
    assert "decode: 3 x 700 tokens; a step by the host's clock" in shown
    assert "routed experts" in shown
    assert "bound" not in shown  # of a GPU
    results = found["results"]
    assert list(results["components"]) == [*COMPONENTS, OTHER]
    assert all(us > 0 for us in results["components"].values())
    assert set(results["host"]) == {"schedule", "build", "forward", "sample"}
    assert results["bound"] is results["busy"] is results["idle"] is None
    assert found["command"].startswith("leadline profile decode --batch-size 3")
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    assert any(event.get("name") == "attention: sparse_attention" for event in events)


def test_prompts_are_told_whole(tmp_path: Path) -> None:
    results = profile(tmp_path, "prefill", "--input-len", "300")["results"]
    assert results["unit"] == "prompt"
    assert all(us > 0 for us in results["components"].values())


def test_a_v4_is_told_by_what_it_has(tmp_path: Path) -> None:
    file, small = tmp_path / "found.json", ("--batch-size", "3", "--context", "700")
    flags = ("decode", "tiny-v4", "--load-format", "dummy", *small, *SMALL, *FAST)
    assert main(["profile", *flags, "--json", str(file)]) == 0
    parts = json.loads(file.read_text())["results"]["components"]
    assert {name for name, us in parts.items() if not us} == {ENGRAM, CANDIDATE_LOGITS}


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["decode", "prefill"])
@pytest.mark.parametrize("graphs", ["all", "off"])
def test_a_gpu_knows_of_nearly_all_of_its_work(kind: str, graphs: str, tmp_path: Path) -> None:
    """Whether or not CUPTI lets us look."""
    file = tmp_path / "found.json"
    model = ("tiny-window128", "--load-format", "dummy", "--kernel-backend", "triton")
    engine = ("--device", "cuda", "--cuda-graphs", graphs, "--max-num-batched-tokens", "512")
    sizes = ("--context", "700", "--batch-size", "4", "--input-len", "300")
    flags = (*model, *engine, *sizes, *SMALL)
    assert main(["profile", kind, *flags, "--json", str(file)]) == 0
    results = json.loads(file.read_text())["results"]
    for name in COMPONENTS:
        assert results["components"][name] > 0, name
    assert results["components"].get(OTHER, 0.0) < results["busy"] / 2
    assert tuple(results["bound"]) == COMPONENTS


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ((), "profile needs what to measure first, decode or prefill"),
        (("speed",), "got 'speed'"),
        (("decode", "--steps", "0"), "steps is 0; it must be at least 1"),
        (("decode", "--trace", "trace.txt"), "must end in .json or .json.gz"),
        (("decode", "--trace", "/nowhere/trace.json"), "trace is '/nowhere/trace.json', which"),
        (("decode", "--context", "100", "--batch-size", "9", *SMALL), "4 have slots"),
        (("decode", "--context", "1020", *SMALL, *FAST), "requests reached max_model_len 1024"),
        (("prefill", "--input-len", "1024", *SMALL, *FAST), "maximum context length is 1024"),
    ],
)
def test_mistakes_are_one_line(
    flags: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["profile", *flags]) == 2
    assert message in capsys.readouterr().err


def test_rates_must_be_positive() -> None:
    with pytest.raises(ConfigError, match="fp8_flops is 0"):
        ProfileOptions(fp8_flops=0)


def test_bounds_follow_the_settings() -> None:
    config, options = EngineConfig(model="slice-96", load_format="dummy"), ProfileOptions()
    decode = step_bound("decode", options, config, SLICE_96)
    plain = EngineConfig(
        model="slice-96", load_format="dummy", cache=CacheConfig(kv_cache_dtype="bfloat16")
    )
    assert step_bound("decode", options, plain, SLICE_96)[DENSE_LOGITS] > 3 * decode[DENSE_LOGITS]
    exact = EngineConfig(
        model="slice-96", load_format="dummy", cache=CacheConfig(swa_bounded_replay=False)
    )
    replayed, whole = (step_bound("prefill", options, c, SLICE_96) for c in (config, exact))
    assert whole[ATTENTION] > 1.9 * replayed[ATTENTION]
    longer = EngineConfig(
        model="slice-96", load_format="dummy", cache=CacheConfig(swa_replay_length=512)
    )
    assert step_bound("prefill", options, longer, SLICE_96)[ATTENTION] > 1.02 * replayed[ATTENTION]
    fast = step_bound("prefill", ProfileOptions(bound_fp8=True), config, SLICE_96)
    assert fast[PROJECTIONS] < 0.7 * replayed[PROJECTIONS]


FOUND = Profile(
    unit="step",
    wall=1500.0,
    host={"forward": 20.0},
    components={ROUTER: 250.0, OTHER: 750.0},
    source="the device's trace",
    busy=1000.0,
    pieces=12.0,
    launches=3.5,
)


def test_a_component_stands_beside_its_bound() -> None:
    assert component_table(FOUND, {ROUTER: 100.0, ATTENTION: 100.0}) == [
        ["", "us", "%", "bound, us", "times the bound"],
        [ROUTER, "250.0", "25.0", "100.0", "2.50"],
        [OTHER, "750.0", "75.0", "", ""],
        ["all", "1,000", "100.0", "200.0", "5.00"],
    ]
    assert component_table(FOUND, None)[1] == [ROUTER, "250.0", "25.0"]


def test_a_component_that_a_model_lacks_has_no_ratio() -> None:
    lines = component_table(FOUND, {ROUTER: 0.0, ATTENTION: 100.0})
    assert lines[1] == [ROUTER, "250.0", "25.0", "0.0", ""]


def test_a_device_is_idle_while_it_is_not_busy() -> None:
    assert numbers(FOUND, None)["idle"] == 500
    assert step_table(FOUND) == [
        ["", "a step"],
        ["whole, us", "1,500"],
        ["device busy, us", "1,000"],
        ["device idle, us", "500.0"],
        ["kernels and copies", "12.0"],
        ["launches by the host", "3.5"],
        ["host: forward, us", "20.0"],
    ]
