"""An index without its shards: names and bytes against the configuration."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from leadline.config.presets import any_preset
from leadline.core.errors import CheckpointError
from leadline.weights.checkpoint import INDEX_FILE
from leadline.weights.names import expected_tensors, vision_totals
from leadline.weights.verify import verify_index


def write_index(folder: Path, preset: str) -> dict[str, Any]:
    """The index of an official checkpoint; its vision tower's names are made up."""
    config = any_preset(preset)
    tensors = expected_tensors(config)
    vision, vision_bytes = vision_totals(config)
    names = [*tensors, *(f"vision.{i}" for i in range(vision))]
    index = {
        "metadata": {"total_size": sum(t.nbytes for t in tensors.values()) + vision_bytes},
        "weight_map": dict.fromkeys(names, "model-00001-of-00001.safetensors"),
    }
    (folder / INDEX_FILE).write_text(json.dumps(index))
    return index


@pytest.mark.parametrize("preset", ["v4-flash", "v4-flash-0731", "tiny-v4", "tiny-window128"])
def test_an_official_index_is_what_the_configuration_makes(tmp_path: Path, preset: str) -> None:
    write_index(tmp_path, preset)
    verify_index(tmp_path, any_preset(preset))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda names: names.pop("layers.0.ffn.gate.tid2eid"),
            r"1 tensor\(s\) missing: layers.0.ffn.gate.tid2eid",
        ),
        (lambda names: names.pop("mtp.2.hc_head_fn"), r"1 tensor\(s\) missing: mtp.2.hc_head_fn"),
        (
            lambda names: names.update({"layers.0.ffn.gate.bias": "a.safetensors"}),
            r"1 tensor\(s\) that the configuration does not explain: layers.0.ffn.gate.bias",
        ),
        (
            lambda names: names.update({"mtp.3.norm.weight": "a.safetensors"}),
            r"751 tensors of [\d,]+ bytes; config.json makes them 750 of",
        ),
    ],
    ids=["missing", "missing-draft", "unknown", "more-of-the-draft"],
)
def test_names_that_do_not_fit_are_told(
    tmp_path: Path, change: Callable[[dict[str, str]], Any], message: str
) -> None:
    index = write_index(tmp_path, "tiny-v4")
    change(index["weight_map"])
    (tmp_path / INDEX_FILE).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=message):
        verify_index(tmp_path, any_preset("tiny-v4"))


def test_other_bytes_are_told(tmp_path: Path) -> None:
    """As of a checkpoint whose names are the same, and whose widths are not."""
    index = write_index(tmp_path, "tiny-v4")
    index["metadata"]["total_size"] += 2
    (tmp_path / INDEX_FILE).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"750 tensors of 5,315,684 bytes; .* 5,315,682"):
        verify_index(tmp_path, any_preset("tiny-v4"))
