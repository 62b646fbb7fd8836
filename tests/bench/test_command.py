"""``leadline bench`` as it is typed, and what it counts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from leadline.bench.measure import Run
from leadline.bench.options import BenchOptions
from leadline.bench.report import summary
from leadline.bench.workload import file_prompts, random_prompts
from leadline.cli import main
from leadline.core.errors import ConfigError

SMALL = ("--kv-cache-memory-bytes", "32MiB", "--max-model-len", "512", "--max-num-seqs", "4")
FAST = ("--input-len", "20", "--output-len", "3", "--runs", "2", "--warmup", "0")


def bench(file: Path, *flags: str) -> Any:
    assert main(["bench", *flags, *SMALL, *FAST, "--json", str(file)]) == 0
    return json.loads(file.read_text())


def test_latency_is_told_of_one_batch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = bench(tmp_path / "found.json", "latency", "--batch-size", "2")
    assert "time to first token, ms" in capsys.readouterr().out
    assert found["command"].startswith("leadline bench latency --batch-size 2")
    assert found["results"]["time to first token, ms"]["count"] == 4
    assert found["results"]["time between tokens, ms"]["count"] == 8
    assert found["settings"]["cache"]["kv_cache_memory_bytes"]


def test_throughput_takes_prompts_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "One."}\n\n{"text": "Two words."}\n')
    flags = ("throughput", "--num-prompts", "6", "--dataset", str(file))
    found = bench(tmp_path / "found.json", *flags)
    assert found["results"]["time to first token, ms"]["count"] == 12
    assert len(found["results"]["output tokens/s"]["runs"]) == 2


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ((), "bench needs what to measure first, latency or throughput"),
        (("speed",), "got 'speed'"),
        (("latency", "--runs", "0"), "runs is 0; it must be at least 1"),
        (("latency", "--dataset", "nowhere.txt"), "dataset nowhere.txt cannot be read"),
        (("latency", "--input-len", "600", *SMALL), "maximum context length is 512 tokens"),
        (("latency", "--json", "/nowhere/found.json"), "cannot be written"),
    ],
)
def test_mistakes_are_one_line(
    flags: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *flags]) == 2
    assert message in capsys.readouterr().err


def test_no_two_runs_share_a_prompt() -> None:
    first, second = (random_prompts(3, 8, 512, seed) for seed in ("0 0", "0 1"))
    assert len({tuple(prompt[:4]) for prompt in first + second}) == 6
    assert first == random_prompts(3, 8, 512, "0 0")


def test_a_text_is_cut_and_begins_anew(tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_text("abcde")
    prompts = file_prompts(file, 4, 2, lambda text: [ord(c) for c in text])
    assert ["".join(map(chr, prompt)) for prompt in prompts] == ["ab", "cd", "e", "ab"]


@pytest.mark.parametrize("line", ["{", '{"words": 1}', "3"])
def test_a_line_without_a_prompt_is_named(tmp_path: Path, line: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(f'{{"text": "fine"}}\n{line}\n')
    with pytest.raises(ConfigError, match="line 2"):
        file_prompts(file, 1, 8, lambda text: [1])


def test_an_empty_file_holds_no_prompt(tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.touch()
    with pytest.raises(ConfigError, match="holds no prompt"):
        file_prompts(file, 1, 8, lambda text: [])


def test_quantiles_are_over_all_runs() -> None:
    runs = [Run((0.1, 0.3), (0.01, 0.02), 2.0, 10, 4), Run((0.2, 0.4), (0.03,), 4.0, 10, 4)]
    found = summary(runs)
    assert found["time to first token, ms"]["median"] == pytest.approx(250)
    assert found["time to first token, ms"]["runs"] == pytest.approx([200, 300])
    assert found["output tokens/s"]["max"] == pytest.approx(2.0)
    assert "time between tokens, ms" not in summary([Run((0.1,), (), 1.0, 1, 1)])


def test_counts_must_be_positive() -> None:
    with pytest.raises(ConfigError, match="batch_size is 0"):
        BenchOptions(batch_size=0)
