"""The index of a checkpoint folder, and where a folder comes from."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open

from leadline.core.errors import CheckpointError, ConfigError
from leadline.weights.checkpoint import Checkpoint, resolve_checkpoint


@pytest.mark.parametrize("name", ["v41-tiny", "v41-reference"])
def test_entries_are_what_the_safetensors_library_sees(golden: Path, name: str) -> None:
    checkpoint = Checkpoint(golden / name)
    seen = 0
    for file in sorted((golden / name).glob("model*.safetensors")):
        with safe_open(file, "pt") as library:
            for key in library.keys():  # noqa: SIM118 - no mapping
                part = library.get_slice(key)
                entry = checkpoint.entries[key]
                assert (entry.file, entry.dtype) == (file, part.get_dtype())
                assert list(entry.shape) == part.get_shape()
                seen += 1
    assert seen == len(checkpoint.entries)


def test_arrays_hold_the_raw_bits(golden: Path) -> None:
    checkpoint = Checkpoint(golden / "v41-reference")
    name = "layers.0.attn.wq_a.scale"
    with safe_open(checkpoint.entries[name].file, "pt") as library:
        expected = library.get_tensor(name).view(torch.uint8).numpy()
    assert np.array_equal(checkpoint.array(name), expected)
    assert not checkpoint.array(name).flags.writeable


def test_opening_touches_no_data(tmp_path: Path) -> None:
    """A header that promises 1 TiB of zeros opens at once."""
    nbytes = 1 << 40
    header = f'{{"t": {{"dtype": "U8", "shape": [{nbytes}], "data_offsets": [0, {nbytes}]}}}}'
    with (tmp_path / "model.safetensors").open("wb") as stream:
        stream.write(len(header).to_bytes(8, "little") + header.encode())
        stream.truncate(8 + len(header) + nbytes)
    assert Checkpoint(tmp_path).array("t")[-1] == 0


@pytest.mark.parametrize(
    ("content", "message"),
    [
        pytest.param(b"", r"bad header: 0 bytes announced, the file has 0", id="empty"),
        pytest.param(
            b"\xff" * 64, r"bad header: \d+ bytes announced, the file has 64", id="length"
        ),
        pytest.param(b"\x04" + bytes(7) + b"[1, ", r"bad header: JSONDecodeError", id="no-json"),
        pytest.param(b"\x02" + bytes(7) + b"[]", r"bad header: TypeError", id="no-object"),
    ],
)
def test_a_file_that_is_no_safetensors_file_is_named(
    tmp_path: Path, content: bytes, message: str
) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"model\.safetensors: {message}"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        pytest.param(
            '"dtype": "F4", "shape": [2], "data_offsets": [0, 1]', "unknown type F4", id="type"
        ),
        pytest.param(
            '"dtype": "F32", "shape": [2], "data_offsets": [0, 4]',
            r"spans 4 bytes, but F32 \[2\] needs 8",
            id="length",
        ),
        pytest.param(
            '"dtype": "F32", "shape": [2]', "bad header: KeyError.'data_offsets'", id="no-offsets"
        ),
    ],
)
def test_a_tensor_that_cannot_be_is_named(tmp_path: Path, fields: str, message: str) -> None:
    header = f'{{"t": {{{fields}}}}}'.encode()
    file = tmp_path / "model.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(64))
    with pytest.raises(CheckpointError, match=message) as raised:
        Checkpoint(tmp_path)
    assert str(file) in str(raised.value)


def test_a_folder_without_weights_says_what_it_looked_for(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"holds neither model\.safetensors nor model\."):
        Checkpoint(tmp_path)


@pytest.mark.parametrize("content", ["{", "[]", '{"weight_map": 3}', '{"metadata": {}}'])
def test_a_broken_index_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"index\.json: no index with a weight_map"):
        Checkpoint(tmp_path)


def test_an_index_cannot_point_outside_its_folder(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"t": "../x"}}')
    with pytest.raises(CheckpointError, match=r"tensor t lies in '\.\./x', which is no file name"):
        Checkpoint(tmp_path)


def test_a_local_folder_resolves_to_itself(tmp_path: Path) -> None:
    assert resolve_checkpoint(str(tmp_path)) == tmp_path


@pytest.mark.parametrize("model", ["./nowhere", "/no/such/folder", "nowhere", "a/b/c"])
def test_what_is_neither_folder_nor_hub_id_is_an_error(model: str) -> None:
    with pytest.raises(ConfigError, match="neither a folder nor a hub id"):
        resolve_checkpoint(model)


@pytest.fixture
def offline_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty hub cache, and no network."""
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return tmp_path


def test_a_hub_id_comes_from_the_cache_when_offline(offline_hub: Path) -> None:
    repository = offline_hub / "models--owner--name"
    commit = "0123abcd" * 5
    snapshot = repository / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    assert resolve_checkpoint("owner/name") == snapshot
    assert resolve_checkpoint("owner/name", commit) == snapshot


def test_a_hub_id_that_is_not_cached_is_an_error_when_offline(offline_hub: Path) -> None:
    with pytest.raises(CheckpointError, match="model owner/name at revision v2 cannot be had"):
        resolve_checkpoint("owner/name", "v2")
