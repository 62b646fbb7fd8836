"""A checkpoint folder as an index of tensors: names, types, shapes and byte ranges.

Opening reads headers only; bytes are touched when a slice of an array is. The file format is an
8-byte little-endian header length, a JSON header and the data.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from leadline.core.errors import CheckpointError, ConfigError

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"

# numpy has no bf16 and no 8-bit floats: their raw bits stand in. Scale bytes (F8_E8M0) are thereby
# never converted by value (user-reports E1).
_STORAGE: dict[str, type[np.generic]] = {
    "BOOL": np.bool_,
    "U8": np.uint8,
    "I8": np.int8,
    "F8_E4M3": np.uint8,
    "F8_E5M2": np.uint8,
    "F8_E8M0": np.uint8,
    "U16": np.uint16,
    "I16": np.int16,
    "F16": np.float16,
    "BF16": np.uint16,
    "U32": np.uint32,
    "I32": np.int32,
    "F32": np.float32,
    "U64": np.uint64,
    "I64": np.int64,
    "F64": np.float64,
}


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where one tensor lies.

    Attributes:
        dtype: the safetensors name, such as ``F8_E4M3``.
        offset: first byte, counted from the start of ``file``.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    offset: int
    nbytes: int


class Checkpoint:
    """The tensors of a folder: one ``model.safetensors``, or shards with an index.

    Attributes:
        path: the folder.
        entries: every tensor by name.

    Raises:
        CheckpointError: a file is missing, truncated or no safetensors file, or the shards and the
            index contradict each other; the message names file and tensor.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.entries: Mapping[str, TensorEntry] = _read_entries(self.path)
        self._maps: dict[Path, npt.NDArray[np.uint8]] = {}

    def array(self, name: str) -> npt.NDArray[Any]:
        """A read-only view of a tensor on its memory-mapped file; bf16 and fp8 as raw bits."""
        entry = self.entries[name]
        if entry.file not in self._maps:
            self._maps[entry.file] = np.memmap(entry.file, dtype=np.uint8, mode="r")
        raw = self._maps[entry.file][entry.offset : entry.offset + entry.nbytes]
        return raw.view(_STORAGE[entry.dtype]).reshape(entry.shape)

    def describe(self, name: str) -> str:
        """``file: tensor name``, as error messages begin."""
        return f"{self.entries[name].file}: tensor {name}"

    def stamp(self, name: str) -> str:
        """What tells a tensor of this file, as it is, from any other, wherever the file lies."""
        entry = self.entries[name]
        status = entry.file.stat()
        return f"{entry.file.name} {status.st_size} {status.st_mtime_ns} {name} {entry.offset}"


def resolve_checkpoint(model: str, revision: str | None = None) -> Path:
    """The folder of a model: a local one, or a hub id's, downloaded if need be.

    Only weights, ``*.json`` and the chat encoder are fetched, the last to be read, never run: it
    tells V4's preview from its release (C6). With ``HF_HUB_OFFLINE=1`` the hub's cache
    alone is looked at. ``revision`` applies to hub ids.

    Raises:
        ConfigError: ``model`` is neither a folder nor a hub id, or ``huggingface_hub`` is missing.
        CheckpointError: the hub (or, offline, its cache) does not have it.
    """
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists() or model.startswith(("/", ".", "~")) or model.count("/") != 1:
        raise ConfigError(
            f"model is {model!r}, which is neither a folder nor a hub id 'owner/name'"
        )
    try:
        import huggingface_hub  # slow to import, and needed for hub ids only
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError
    except ImportError as error:
        raise ConfigError(
            f"model is {model!r}, which is no folder; hub ids need `pip install huggingface_hub`"
        ) from error
    try:
        local = huggingface_hub.snapshot_download(
            model,
            revision=revision,
            allow_patterns=["*.safetensors", "*.json", "*encoding*.py"],
        )
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        at = f" at revision {revision}" if revision else ""
        raise CheckpointError(f"model {model}{at} cannot be had from the hub: {error}") from error
    return Path(local)


def _read_entries(folder: Path) -> dict[str, TensorEntry]:
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such folder")
    index = folder / INDEX_FILE
    if index.exists():
        return _read_shards(folder, index)
    single = folder / SINGLE_FILE
    if not single.exists():
        raise CheckpointError(f"{folder}: holds neither {SINGLE_FILE} nor {INDEX_FILE}")
    return {entry.name: entry for entry in _read_header(single)}


def _read_shards(folder: Path, index: Path) -> dict[str, TensorEntry]:
    weight_map, _ = read_index(index)
    entries: dict[str, TensorEntry] = {}
    for shard in sorted(set(weight_map.values())):
        file = folder / shard
        if not file.exists():
            raise CheckpointError(f"{file}: shard is missing, but {index.name} names it")
        for entry in _read_header(file):
            if entry.name in entries:
                raise CheckpointError(
                    f"{file}: tensor {entry.name} is also in {entries[entry.name].file.name}"
                )
            entries[entry.name] = entry
    for name, shard in weight_map.items():
        if name not in entries or entries[name].file.name != shard:
            raise CheckpointError(
                f"{folder / shard}: tensor {name} is not in it, but {index.name} says so"
            )
    for entry in entries.values():
        if entry.name not in weight_map:
            raise CheckpointError(f"{entry.file}: tensor {entry.name} is missing in {index.name}")
    return entries


def read_index(index: Path) -> tuple[dict[str, str], int | None]:
    """Which file holds each tensor, and the bytes of all of them if the index says.

    Raises:
        CheckpointError: it cannot be read, or names files outside its folder.
    """
    try:
        content = json.loads(index.read_text(encoding="utf-8"))
        items = dict(content["weight_map"].items())
        total_size = content.get("metadata", {}).get("total_size")
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{index}: no index with a weight_map ({error!r})") from error
    for name, shard in items.items():
        # A shard is a file of this folder; anything else could reach outside it.
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise CheckpointError(
                f"{index}: tensor {name} lies in {shard!r}, which is no file name"
            )
    return items, total_size


def _read_header(file: Path) -> Iterator[TensorEntry]:
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > size - 8:
            raise CheckpointError(
                f"{file}: bad header: {length} bytes announced, the file has {size}; "
                "it is truncated or no safetensors file"
            )
        header = stream.read(length)
    try:
        items = json.loads(header)
        items.pop("__metadata__", None)
        fields = {
            name: (str(item["dtype"]), tuple(map(int, item["shape"])), *item["data_offsets"])
            for name, item in items.items()
        }
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{file}: bad header: {error!r}") from error
    start = 8 + length
    for name, (dtype, shape, begin, end) in fields.items():
        if dtype not in _STORAGE:
            raise CheckpointError(f"{file}: tensor {name} has the unknown type {dtype}")
        nbytes = math.prod(shape) * np.dtype(_STORAGE[dtype]).itemsize
        if end - begin != nbytes:
            raise CheckpointError(
                f"{file}: tensor {name} spans {end - begin} bytes, but {dtype} {list(shape)} "
                f"needs {nbytes}"
            )
        if start + end > size:
            raise CheckpointError(
                f"{file}: truncated: tensor {name} ends at byte {start + end}, the file at {size}"
            )
        yield TensorEntry(name, dtype, shape, file, start + begin, nbytes)
