"""Do a checkpoint's files hold exactly what its configuration promises?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from leadline.config.families import AnyConfig
from leadline.core.errors import CheckpointError
from leadline.kernels.packed import WeightFormat
from leadline.weights.checkpoint import INDEX_FILE, Checkpoint, TensorEntry, read_index
from leadline.weights.formats import PACKINGS, SCALE_DTYPE, scale_name
from leadline.weights.names import SKIPPED_PREFIXES, expected_tensors, model_weights, vision_totals
from leadline.weights.table import Part, WeightSpec


@dataclass(frozen=True, slots=True)
class Contents:
    """What was found.

    Attributes:
        weights: the backbone by tensor name.
        formats: how the files hold each of them; tests and small models come unpacked.
        used: tensors of the backbone, scales included.
        skipped: tensors of parts that are not used yet, by part.
        skipped_bytes: of all of these.
    """

    weights: dict[str, WeightSpec]
    formats: dict[str, WeightFormat]
    used: tuple[TensorEntry, ...]
    skipped: dict[str, int]
    skipped_bytes: int

    def summary(self) -> str:
        """One line: what is used, what is skipped."""
        size = sum(entry.nbytes for entry in self.used)
        skipped = ", ".join(f"{count:,} {part}" for part, count in self.skipped.items()) or "none"
        return f"{len(self.used):,} tensors ({size / 1e9:.3g} GB); skipped: {skipped}"


def verify(checkpoint: Checkpoint, config: AnyConfig) -> Contents:
    """Match the files' tensors with the configuration's, by headers alone.

    A packed weight may also come plain: bf16 or fp32 ``[out, in]`` without a scale (v41-model 7.2).

    Raises:
        CheckpointError: a tensor is missing or unknown, or its shape or type is wrong.
    """
    weights = {
        name: spec for name, spec in model_weights(config).items() if spec.part is Part.BACKBONE
    }
    missing = [name for name in weights if name not in checkpoint.entries]
    if missing:
        raise CheckpointError(
            f"{checkpoint.path}: {len(missing)} tensor(s) missing: {_some(missing)}"
        )
    formats = {name: _check_weight(checkpoint, spec) for name, spec in weights.items()}
    used = set(weights)
    used |= {scale_name(name) for name, f in formats.items() if f is not WeightFormat.PLAIN}
    skipped: Counter[str] = Counter()
    unknown = []
    for name in checkpoint.entries.keys() - used:
        part = next((p for start, p in SKIPPED_PREFIXES.items() if name.startswith(start)), None)
        if part is None:
            unknown.append(name)
        else:
            skipped[part] += 1
    if unknown:
        first = checkpoint.entries[min(unknown)]
        raise CheckpointError(
            f"{first.file}: {len(unknown)} tensor(s) that the configuration does not explain: "
            f"{_some(sorted(unknown))}"
        )
    entries = tuple(checkpoint.entries[name] for name in sorted(used))
    skipped_bytes = sum(e.nbytes for name, e in checkpoint.entries.items() if name not in used)
    return Contents(weights, formats, entries, dict(sorted(skipped.items())), skipped_bytes)


def verify_index(folder: Path, config: AnyConfig) -> None:
    """Match the names in a folder's index, and its bytes, with the configuration's tensors.

    For folders whose shards are elsewhere: of a tensor the index says nothing but its name.

    Raises:
        CheckpointError: an official tensor is missing, one is unknown, or the bytes differ.
    """
    index = folder / INDEX_FILE
    names, total_size = read_index(index)
    expected = expected_tensors(config)
    missing = [name for name in expected if name not in names]
    if missing:
        raise CheckpointError(f"{index}: {len(missing)} tensor(s) missing: {_some(missing)}")
    others = names.keys() - expected.keys()
    unknown = sorted(name for name in others if not name.startswith(tuple(SKIPPED_PREFIXES)))
    if unknown:
        raise CheckpointError(
            f"{index}: {len(unknown)} tensor(s) that the configuration does not explain: "
            f"{_some(unknown)}"
        )
    vision_tensors, vision_bytes = vision_totals(config)
    nbytes = sum(tensor.nbytes for tensor in expected.values()) + vision_bytes
    if len(others) != vision_tensors or total_size != nbytes:
        raise CheckpointError(
            f"{index}: {len(names):,} tensors of {total_size:,} bytes; config.json makes them "
            f"{len(expected) + vision_tensors:,} of {nbytes:,}"
        )


def _check_weight(checkpoint: Checkpoint, spec: WeightSpec) -> WeightFormat:
    """The format in which the files hold a weight, once shapes and types are right."""
    entry = checkpoint.entries[spec.name]
    scale = checkpoint.entries.get(scale_name(spec.name))
    if spec.format is WeightFormat.PLAIN:
        wider = ("F32",) if spec.dtype == "BF16" else ()
        _check_entry(entry, spec.shape, (spec.dtype, *wider))
        return WeightFormat.PLAIN
    packing = PACKINGS[spec.format]
    if scale is None and entry.dtype in ("BF16", "F32"):
        _check_entry(entry, spec.shape, ("BF16", "F32"))
        return WeightFormat.PLAIN
    if scale is None:
        raise CheckpointError(
            f"{entry.file}: tensor {spec.name} is {entry.dtype} and needs "
            f"{scale_name(spec.name)}, which is missing"
        )
    _check_entry(entry, packing.code_shape(spec.shape), (packing.code_dtype,))
    # A scale of any other type was once copied by value: its bytes are lost (user-reports E1).
    _check_entry(scale, packing.scale_shape(spec.shape), (SCALE_DTYPE,))
    return spec.format


def _check_entry(entry: TensorEntry, shape: tuple[int, ...], types: tuple[str, ...]) -> None:
    if entry.dtype not in types:
        raise CheckpointError(
            f"{entry.file}: tensor {entry.name} is {entry.dtype}; it must be {' or '.join(types)}"
        )
    if entry.shape != shape:
        raise CheckpointError(
            f"{entry.file}: tensor {entry.name} has shape {list(entry.shape)}; config.json needs "
            f"{list(shape)}"
        )


def _some(names: Iterable[str], limit: int = 4) -> str:
    names = list(names)
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
