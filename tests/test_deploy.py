"""Files of ``deploy/``: valid, and about things that exist."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"


def test_dashboard_uses_metrics_that_exist_and_both_kinds() -> None:
    dashboard = json.loads((DEPLOY / "grafana/leadline.json").read_text(encoding="utf-8"))
    documented = (ROOT / "docs/metrics.md").read_text(encoding="utf-8")
    expressions = [t["expr"] for panel in dashboard["panels"] for t in panel.get("targets", ())]
    expressions.append(dashboard["templating"]["list"][1]["query"]["query"])
    used = {
        re.sub(r"_bucket$", "", name)
        for expression in expressions
        for name in re.findall(r"\b(?:vllm|leadline):\w+|\bhttp_\w+", expression)
    }
    assert {name.partition(":")[0] for name in used} >= {"vllm", "leadline"}
    assert [name for name in sorted(used) if f"`{name}`" not in documented] == []
    assert all(expression.count("(") == expression.count(")") for expression in expressions)


def test_dashboard_has_no_panel_twice_or_over_another() -> None:
    panels = json.loads((DEPLOY / "grafana/leadline.json").read_text(encoding="utf-8"))["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [cell for panel in panels for cell in _cells(panel["gridPos"])]
    assert len(set(cells)) == len(cells)


def _cells(at: dict[str, int]) -> list[tuple[int, int]]:
    assert at["x"] + at["w"] <= 24
    return [
        (x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])
    ]


def test_image_runs_as_a_user_and_is_probed() -> None:
    lines = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
    assert lines.index("\nUSER leadline") < lines.index("\nENTRYPOINT")
    assert re.search(r"HEALTHCHECK .*\\\n.*/health", lines)
    for copied in re.findall(r"^COPY (.+) \S+$", lines, re.M):
        assert all((ROOT / name).exists() for name in copied.split())


def test_compose_and_scrape_configuration_fit_together() -> None:
    compose: Any = yaml.safe_load((DEPLOY / "compose.yaml").read_text(encoding="utf-8"))
    scrape: Any = yaml.safe_load((DEPLOY / "prometheus.yml").read_text(encoding="utf-8"))
    [target] = scrape["scrape_configs"][0]["static_configs"][0]["targets"]
    assert target.partition(":")[0] in compose["services"]
    assert (ROOT / compose["services"]["leadline"]["build"]["dockerfile"]).is_file()
