"""The documentation: reference pages match the code, and the examples run."""

from __future__ import annotations

import json
import re
import runpy
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from leadline.cli import InspectOptions
from leadline.config.args import settings
from leadline.config.engine import EngineConfig
from leadline.config.server import ServerConfig
from leadline.eval.options import EvalOptions
from leadline.profile.options import ProfileOptions
from leadline.tools.chat import ChatOptions
from tests.serving.conftest import MakeRig, rig
from tests.serving.live import serving
from tests.serving.test_admin import samples

__all__ = ["rig"]  # a fixture of another folder

ROOT = Path(__file__).parents[1]
DOCS = sorted((ROOT / "docs").glob("*.md"))
PAGES = [*DOCS, ROOT / "deploy/README.md"]
BLOCK = re.compile(r"^## (.+?)$|^```(\w+)\n(.*?)^```$", re.M | re.S)
FLAG = re.compile(r"(?<![\w-])--([a-z][a-z0-9-]+)")


def blocks(page: Path, language: str) -> list[Any]:
    """Code of one language, each with the heading above it and its number as its id."""
    heading = ""
    found: list[Any] = []
    for match in BLOCK.finditer(page.read_text(encoding="utf-8")):
        if match[1]:
            heading = match[1]
        elif match[2] == language:
            found.append(pytest.param(match[3], id=f"{heading} {len(found)}"))
    return found


# With the bundled model's own answers: ``e2e/test_quickstart.py``.
EXAMPLES = [
    block
    for block in blocks(ROOT / "docs/quickstart.md", "python")
    if not str(block.id).startswith("Five minutes")
]


@pytest.mark.parametrize("name", ["flags", "metrics"])
def test_reference_page_is_what_the_code_says(name: str) -> None:
    """When this fails: ``python scripts/make_docs.py``."""
    written = (ROOT / f"docs/{name}.md").read_text(encoding="utf-8")
    assert written == runpy.run_path(str(ROOT / "scripts/make_docs.py"))[f"{name}_page"]()


def test_every_metric_of_a_scrape_is_documented(rig: MakeRig) -> None:
    server = rig("a</think>b")
    server.chat()
    text = (ROOT / "docs/metrics.md").read_text(encoding="utf-8")
    names = {re.sub(r"_(bucket|count|sum)$", "", name) for name, *_ in samples(server)}
    assert [name for name in sorted(names) if f"`{name}`" not in text] == []


def test_every_code_of_an_error_is_documented() -> None:
    text = (ROOT / "docs/errors.md").read_text(encoding="utf-8")
    codes = {
        code
        for package in ("core", "serving", "text", "engine")
        for file in (ROOT / "leadline" / package).rglob("*.py")
        for code in re.findall(r"""\bcode(?:: str)? ?= ?"(\w+)\"""", file.read_text())
    }
    assert codes >= {"invalid_value", "model_not_found", "server_overloaded"}
    assert sorted(code for code in codes if f"`{code}`" not in text) == []


def test_map_of_the_architecture_names_every_module() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    named = set(re.findall(r"\w+", text.partition("## The map")[2].partition("## ")[0]))
    as_a_whole = {"ops", "reference", "cpu", "openai", "responses", "anthropic"}  # folders
    modules = (ROOT / "leadline").rglob("*.py")
    known = [p for p in modules if p.parent.name not in as_a_whole and p.stem[0] != "_"]
    assert [path.stem for path in known if path.stem not in named] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_flags_that_a_page_speaks_of_exist(page: Path) -> None:
    options = (EvalOptions, ChatOptions, ProfileOptions, InspectOptions)
    configs = (ServerConfig, EngineConfig, *options)
    known = {s.flag[2:] for config in configs for s in settings(config)}
    known |= {"help", "config", "print-config", "some-flag", "flag"}
    scripts = [ROOT / "benchmarks/kernels.py", ROOT / "scripts/compile_kernels.py"]
    scripts.append(ROOT / "leadline/tools/random_checkpoint.py")
    for file in [*scripts, *(ROOT / "leadline/tools/train_tiny").glob("*.py")]:
        known |= set(re.findall(r"""add_argument\(\s*"--([\w-]+)\"""", file.read_text()))
    known |= {"build-arg", "gpus", "shm-size", "ulimit"}  # docker's
    known |= {"nproc-per-node"}  # torchrun's
    known |= {"tasks", "include", "output"}  # lm_eval's, the last two up to their underscore
    named = FLAG.findall(page.read_text(encoding="utf-8"))
    assert sorted({flag.removeprefix("no-") for flag in named} - known) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_metrics_that_a_page_speaks_of_exist(page: Path) -> None:
    known = (ROOT / "docs/metrics.md").read_text(encoding="utf-8")
    named = re.findall(r"\b(?:vllm|leadline):\w+", page.read_text(encoding="utf-8"))
    assert [name for name in named if f"`{name.removesuffix('_bucket')}`" not in known] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).is_file(), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_examples_are_well_formed(page: Path) -> None:
    parsers: dict[str, Callable[[str], object]] = {
        "python": lambda text: compile(text, page.name, "exec"),
        "json": json.loads,
        "toml": tomllib.loads,
        "yaml": yaml.safe_load,
    }
    for language, parse in parsers.items():
        for block in blocks(page, language):
            parse(block.values[0])


@pytest.mark.parametrize("code", [e for e in EXAMPLES if "from openai" in e.values[0]])
def test_quickstart_of_openai_runs(
    rig: MakeRig, capsys: pytest.CaptureFixture[str], code: str
) -> None:
    run_example(rig, code)
    assert "seven fathoms" in capsys.readouterr().out


@pytest.mark.parametrize("code", [e for e in EXAMPLES if "from anthropic" in e.values[0]])
def test_quickstart_of_anthropic_runs(
    rig: MakeRig, capsys: pytest.CaptureFixture[str], code: str
) -> None:
    run_example(rig, code)
    assert capsys.readouterr().out == "seven fathoms5\n"


def run_example(rig: MakeRig, code: str) -> None:
    """Run a block against a scripted server in the place of its own."""
    answer = "seven fathoms"
    server = rig(answer if "none, low" in code else f"Hm</think>{answer}")
    server.engine.num_cached_tokens = 5
    names: dict[str, Any] = {}
    with serving(server.app) as url:
        try:
            exec(code.replace("http://localhost:8000", url), names)
        finally:
            names["client"].close()
