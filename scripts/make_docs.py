"""Write the reference pages that come from the code: docs/flags.md and docs/metrics.md.

python scripts/make_docs.py           # write them
python scripts/make_docs.py --check   # fail where they are not up to date
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import re
import sys
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from leadline.config.args import Setting, settings
from leadline.config.engine import EngineConfig
from leadline.config.server import ServerConfig
from leadline.core.client import EngineStats
from leadline.engine.metrics import COUNTERS, STEP_PARTS
from leadline.serving.metrics import ServingMetrics

DOCS = Path(__file__).parents[1] / "docs"

FLAGS = """\
# Flags of `leadline serve`

Written by `scripts/make_docs.py` from the settings; `leadline serve --help` says the same.

Every flag `--some-flag` is also read from the environment as `LEADLINE_SOME_FLAG` and from the file
that `--config` names; the command line wins over the environment, and that over the file. A flag
that is on or off is written `--flag` or `--no-flag`; numbers may be written `128k`, `2GiB`; several
values follow one flag. `--print-config` shows what all of this comes to, keys masked.
"""

METRICS = """\
# Metrics

Written by `scripts/make_docs.py` from the code. `GET /metrics` serves all of these in the text
format of Prometheus; `deploy/` has a scrape configuration and a Grafana dashboard over them.

* Names with `vllm:` mean what they mean in vLLM, so its dashboards work; `--metrics-prefix` changes
  that part. Names with `leadline:` are ours.
* Every sample but the HTTP ones carries the labels `model_name` and `engine`.
* Counters never go down while the process lives, restarts of the engine included. While the engine
  does not answer, what it counts is absent and what the HTTP process counted stays.
* `vllm:request_success` gets exactly one sample for each accepted choice, whatever its end:
  `stop`, `length`, `abort` (the client left) or `error`. Refused requests are in
  `vllm:admission_rejections` (for load) and `http_requests` (all).
* What does not exist here (drafts, adapters, images, remote caches) stays 0 under its name.
"""


def main() -> int:
    """Write the pages, or with ``--check`` name those that differ; the exit code."""
    pages = {"flags.md": flags_page(), "metrics.md": metrics_page()}
    if sys.argv[1:] != ["--check"]:
        for name, text in pages.items():
            (DOCS / name).write_text(text, encoding="utf-8")
        return 0
    stale = [n for n, text in pages.items() if (DOCS / n).read_text(encoding="utf-8") != text]
    for name in stale:
        print(f"docs/{name} is not up to date; run python scripts/make_docs.py")
    return len(stale)


def flags_page() -> str:
    """Every leaf of the settings, by the class that holds it."""
    parts = [FLAGS]
    for config_type in (*_classes(ServerConfig), *_classes(EngineConfig)):
        names = {field.name for field in dataclasses.fields(config_type)}
        own = [setting for setting in settings(config_type) if setting.name in names]
        if own:
            title = (inspect.getdoc(config_type) or "").partition("\n")[0]
            title = re.sub(r"\s*\([^)]*\)|\.$", "", title)  # without sections of the contract
            rows = ["| flag | default | meaning |", "|---|---|---|", *map(_flag_row, own)]
            parts.append("\n".join([f"## {title}", "", *rows, ""]))
    return "\n".join(parts)


def _classes(config_type: type) -> Iterator[type]:
    yield config_type
    hints = typing.get_type_hints(config_type)
    for field in dataclasses.fields(config_type):
        if dataclasses.is_dataclass(hints[field.name]):
            yield from _classes(typing.cast(type, hints[field.name]))


def _flag_row(setting: Setting) -> str:
    meaning = setting.help.replace("``", "`").replace("|", "\\|")
    return f"| `{setting.flag}` | {_default(setting)} | {meaning[:1].upper()}{meaning[1:]} |"


def _default(setting: Setting) -> str:
    match setting.default:
        case None | dataclasses.MISSING | ():
            return ""
        case bool(value):
            return "on" if value else "off"
        case tuple(values):
            return " ".join(f"`{value}`" for value in values)
        case "":
            return ""
        case value:
            return f"`{value}`"


def metrics_page() -> str:
    """Every family of an exposition, with its labels."""
    rows: dict[str, list[str]] = {"gauge": [], "counter": [], "histogram": []}
    for family in text_string_to_metric_families(_exposition().decode()):
        name = f"{family.name}_total" if family.type == "counter" else family.name
        rows[family.type].append(f"| `{name}` | {_labels(family)} | {family.documentation} |")
    parts = [METRICS]
    for kind, lines in rows.items():
        head = ["| name | labels | meaning |", "|---|---|---|"]
        parts.append("\n".join([f"## {kind.capitalize()}s", "", *head, *sorted(lines), ""]))
    return "\n".join(parts)


def _labels(family: Metric) -> str:
    """Labels beyond those of every sample, with their values where these are fixed."""
    values: dict[str, dict[str, None]] = {}
    for sample in family.samples:
        for label, value in sample.labels.items():
            if label not in ("model_name", "engine", "le"):
                values.setdefault(label, {})[value] = None
    return ", ".join(
        f"`{label}`" + (f" ({', '.join(known)})" if len(known) > 1 else "")
        for label, known in values.items()
    )


def _exposition() -> bytes:
    metrics = ServingMetrics("model")
    scope: dict[str, Any] = {"method": "GET", "state": {}}
    metrics.count_answer(scope, 200, 0.0)
    stats = EngineStats(
        counters=dict.fromkeys((*COUNTERS, "evicted_pages"), 0),
        iteration_tokens=[(math.inf, 0)],
        step_seconds=dict.fromkeys(STEP_PARTS, 0.0),
    )
    return metrics.exposition(stats)


if __name__ == "__main__":
    raise SystemExit(main())
