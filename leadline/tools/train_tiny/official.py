"""Between the trainer's parameters and the official tensors of a checkpoint."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from leadline.config.model import ModelConfig
from leadline.kernels.packed import WeightFormat
from leadline.tools.checkpoint_writer import write_checkpoint
from leadline.weights.checkpoint import Checkpoint
from leadline.weights.engram_tables import to_tensor
from leadline.weights.formats import decode, encode, scale_name
from leadline.weights.names import model_weights
from leadline.weights.table import Role, WeightSpec

_EXPERT = re.compile(r"\.experts\.(\d+)\.")


def parameter_of(spec: WeightSpec) -> tuple[str, int | None]:
    """The parameter that holds a weight, and the weight's place in it if experts are stacked."""
    found = _EXPERT.search(spec.name)
    if found is None:
        return spec.name, None
    return _EXPERT.sub(".experts.", spec.name), int(found[1])


def parameter_formats(config: ModelConfig) -> dict[str, WeightSpec]:
    """One specification for each parameter: its format, and the shape of one expert."""
    return {parameter_of(spec)[0]: spec for spec in model_weights(config).values()}


def round_weight(values: Tensor, spec: WeightSpec) -> Tensor:
    """The float32 values that a file would hold for ``[..., out, in]``, exactly.

    A fixed point: rounding the result again gives the same codes and scales.
    """
    if spec.format is WeightFormat.PLAIN:
        return values if spec.dtype == "F32" else values.bfloat16().float()
    return decode(spec.format, *encode(spec.format, values.float()))


def stored(values: Tensor, spec: WeightSpec) -> dict[str, Tensor]:
    """The tensors of a file for one weight.

    Args:
        values: already rounded (``round_weight``); rounding may have lowered a block's largest
            value to where a smaller scale fits, so codes are made from rounded values only.
        spec: the weight.
    """
    if spec.format is WeightFormat.PLAIN:
        return {spec.name: values.to(torch.float32 if spec.dtype == "F32" else torch.bfloat16)}
    codes, scales = encode(spec.format, values.float())
    return {spec.name: codes, scale_name(spec.name): scales}


def export(
    out: Path,
    config: ModelConfig,
    parameters: Mapping[str, Tensor],
    *,
    tokenizer: Path | None = None,
    num_shards: int = 2,
) -> None:
    """Write parameters, backbone and draft, as a checkpoint in the official mixed layout.

    Args:
        out: the folder; must not hold a checkpoint already.
        config: the model.
        parameters: float32 or bf16 values by the trainer's names.
        tokenizer: a ``tokenizer.json`` to copy.
        num_shards: files.
    """

    def make(spec: WeightSpec) -> dict[str, Tensor]:
        if spec.role is Role.IMAGE_ROUTER:
            return {spec.name: torch.zeros(spec.shape)}
        name, expert = parameter_of(spec)
        values = parameters[name].detach().cpu().float()
        return stored(round_weight(values if expert is None else values[expert], spec), spec)

    write_checkpoint(out, config, make, num_shards=num_shards, tokenizer=tokenizer)


def read(folder: Path, config: ModelConfig) -> dict[str, Tensor]:
    """Exact float32 values of a checkpoint by the trainer's names, backbone and draft."""
    parameters: dict[str, list[Tensor]] = {}
    for name, values in _decoded(folder, config):
        parameters.setdefault(name, []).append(values)
    return {
        name: torch.stack(parts) if ".experts." in name else parts[0]
        for name, parts in parameters.items()
    }


def _decoded(folder: Path, config: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    files = Checkpoint(folder)
    for spec in model_weights(config).values():
        if spec.role is Role.IMAGE_ROUTER:
            continue
        name, _ = parameter_of(spec)
        values = to_tensor(np.array(files.array(spec.name)))
        if spec.format is not WeightFormat.PLAIN:
            scales = to_tensor(np.array(files.array(scale_name(spec.name))))
            values = decode(spec.format, values, scales)
        yield name, values.float()
