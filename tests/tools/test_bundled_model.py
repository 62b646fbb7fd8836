"""The bundled model: whole, small, described, in the package, and the one that is served."""

from __future__ import annotations

import fnmatch
import importlib.util
import re
import tomllib
from pathlib import Path

import pytest

from leadline import LLM, SamplingParams
from leadline.cli import bundled_model, main
from leadline.config.model import load_model_config
from leadline.text.markers import check_markers
from leadline.text.profiles import choose_profile
from leadline.text.tokenizer import Tokenizer
from leadline.tools.train_tiny.corpus import notice
from leadline.weights.checkpoint import Checkpoint
from leadline.weights.verify import verify

ROOT = Path(__file__).parents[2]
BUNDLED = bundled_model()
CARD = (BUNDLED / "README.md").read_text(encoding="utf-8")


def test_the_files_hold_exactly_what_the_configuration_promises() -> None:
    checkpoint = Checkpoint(BUNDLED)
    contents = verify(checkpoint, load_model_config(BUNDLED))
    assert len(contents.used) + sum(contents.skipped.values()) == len(checkpoint.entries)


def test_the_weights_are_shards_of_at_most_16_mib() -> None:
    shards = list(BUNDLED.glob("*.safetensors"))
    assert len(shards) == 2
    assert all(shard.stat().st_size <= 16 * 2**20 for shard in shards)
    assert (BUNDLED / "model.safetensors.index.json").is_file()


def test_the_whole_is_at_most_25_megabytes() -> None:
    assert sum(path.stat().st_size for path in BUNDLED.iterdir()) <= 25_000_000


def test_the_tokenizer_has_every_id_of_the_model_and_every_marker() -> None:
    tokenizer = Tokenizer(BUNDLED / "tokenizer.json")
    assert tokenizer.vocab_size == load_model_config(BUNDLED).vocab_size
    check_markers(tokenizer, choose_profile("auto", BUNDLED))


def test_every_file_is_package_data() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    patterns = settings["tool"]["setuptools"]["package-data"]["leadline"]
    for path in BUNDLED.iterdir():
        name = str(path.relative_to(ROOT / "leadline"))
        assert any(fnmatch.fnmatch(name, pattern) for pattern in patterns), name


def test_notices_of_all_texts_come_with_it() -> None:
    assert (BUNDLED / "NOTICE").read_text(encoding="utf-8") == notice()


def test_commands_of_the_card_exist() -> None:
    modules = re.findall(r"python -m ([\w.]+)", CARD)
    assert modules
    assert [name for name in modules if importlib.util.find_spec(name) is None] == []


def test_files_that_the_card_names_exist() -> None:
    named = re.findall(r"`((?:\w+/)+\w[\w.-]*\.\w+|[\w.-]+\.json)`", CARD)
    assert [n for n in named if not ((ROOT / n).is_file() or (BUNDLED / n).is_file())] == []


def test_inspect_describes_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect"]) == 0
    shown = capsys.readouterr().out
    assert "The files hold every tensor of the backbone" in shown
    assert "What the model is for" in shown


def test_it_answers_chats(capsys: pytest.CaptureFixture[str]) -> None:
    messages = [{"role": "user", "content": "How deep is the harbour?"}]
    params = SamplingParams(temperature=0, max_tokens=8)
    with LLM(BUNDLED, kv_cache_memory_bytes=32 * 2**20, max_num_seqs=2) as llm:
        [result] = llm.chat(messages, params, use_tqdm=False)
    assert 0 < len(result.outputs[0].token_ids) <= 8
