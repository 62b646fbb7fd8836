"""Write checkpoints in the official layout: ``config.json``, shards with an index, a tokenizer."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm

from leadline.config.families import AnyConfig, any_config_to_json
from leadline.core.errors import ConfigError
from leadline.weights.checkpoint import INDEX_FILE, SINGLE_FILE
from leadline.weights.names import model_weights
from leadline.weights.table import WeightSpec, stored_tensors

# Raw bytes in memory -> the type that the file's header names.
_FILE_TYPES = {
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I8": torch.int8,
}


def write_checkpoint(
    out: Path,
    config: AnyConfig,
    make: Callable[[WeightSpec], dict[str, Tensor]],
    *,
    num_shards: int = 1,
    tokenizer: Path | None = None,
) -> None:
    """Write backbone and draft weights, ``config.json`` and perhaps an index and a tokenizer.

    One shard is in memory at a time.

    Args:
        out: the folder; made if need be. Must not hold a checkpoint already.
        config: the model.
        make: one weight as the tensors of a file, by name; codes and scales are raw uint8 bytes.
        num_shards: files; one is called ``model.safetensors``, more come with an index.
        tokenizer: a ``tokenizer.json`` to copy.

    Raises:
        ConfigError: ``num_shards`` fits no checkpoint of this size, or ``out`` holds one.
    """
    weights = list(model_weights(config).values())
    if not 1 <= num_shards <= len(weights):
        raise ConfigError(f"shards is {num_shards}; it must lie in 1..{len(weights)}")
    out.mkdir(parents=True, exist_ok=True)
    if any(out.glob("*.safetensors")):
        raise ConfigError(f"{out}: holds a checkpoint already; choose an empty folder")
    (out / "config.json").write_text(json.dumps(any_config_to_json(config), indent=2) + "\n")
    if tokenizer is not None:
        shutil.copyfile(tokenizer, out / "tokenizer.json")

    weight_map: dict[str, str] = {}
    total_size = 0
    shards = _split(weights, num_shards)
    for number, shard in enumerate(tqdm(shards, desc="Shards", disable=None), start=1):
        file = SINGLE_FILE if num_shards == 1 else _shard_name(number, num_shards)
        tensors: dict[str, Tensor] = {}
        for spec in shard:
            tensors |= _typed(spec, make(spec))
        save_file(tensors, out / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, file)
        total_size += sum(tensor.nbytes for tensor in tensors.values())
    if num_shards > 1:
        index = {"metadata": {"total_size": total_size}, "weight_map": weight_map}
        (out / INDEX_FILE).write_text(json.dumps(index, indent=1, sort_keys=True) + "\n")


def _typed(spec: WeightSpec, made: dict[str, Tensor]) -> dict[str, Tensor]:
    specs = stored_tensors(spec)
    return {
        # Values that are no raw bytes have their type already.
        name: tensor.view(_FILE_TYPES[specs[name].dtype]) if tensor.dtype is torch.uint8 else tensor
        for name, tensor in made.items()
    }


def _split(weights: list[WeightSpec], num_shards: int) -> list[list[WeightSpec]]:
    """Contiguous runs of about equal bytes, none empty; a weight and its scale stay together."""
    sizes = [sum(t.nbytes for t in stored_tensors(w).values()) for w in weights]
    runs: list[list[WeightSpec]] = [[] for _ in range(num_shards)]
    target, done, at = sum(sizes) / num_shards, 0, 0
    for i, (weight, size) in enumerate(zip(weights, sizes, strict=True)):
        full = done >= target * (at + 1) or len(weights) - i < num_shards - at
        if runs[at] and full and at + 1 < num_shards:
            at += 1
        runs[at].append(weight)
        done += size
    return runs


def _shard_name(number: int, num_shards: int) -> str:
    return f"model-{number:05d}-of-{num_shards:05d}.safetensors"
