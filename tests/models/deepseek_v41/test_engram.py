"""Engram rows: exact integers from outside, whatever the split and the neighbours."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor

from leadline.config.model import ModelConfig
from leadline.config.presets import TINY_WINDOW128, V41_FLASH
from leadline.core.errors import ConfigError
from leadline.kernels.registry import choose
from leadline.models.batch import ForwardBatch
from leadline.models.deepseek_v41.engram import (
    EngramHash,
    EngramPrefetch,
    NgramValues,
    compressed_token_map,
    hash_multipliers,
    hash_primes,
)
from leadline.weights.engram_tables import TableMemory
from leadline.weights.load import DummySource
from tests.models.streams import FakeDevice, Race, Watched

CPU = torch.device("cpu")
# An id that no golden sequence uses stands for images, so that masks can be put in by hand.
IMAGE = -7
CONFIGS: dict[str, ModelConfig] = {
    "tiny": dataclasses.replace(TINY_WINDOW128, engram_compressed_vocab_size=360),
    "official": V41_FLASH,
}
both = pytest.mark.parametrize("name", CONFIGS)


@pytest.fixture(scope="session")
def engram(golden: Path) -> dict[str, Tensor]:
    """Tensors of ``golden/engram``."""
    return load_file(golden / "engram/vectors.safetensors")


@pytest.fixture(scope="session")
def hashes(engram: dict[str, Tensor]) -> dict[str, EngramHash]:
    """The hash of both configurations, with the files' token maps."""
    return {
        name: EngramHash(
            dataclasses.replace(config, image_token_id=IMAGE),
            engram[f"{name}.token_map"].tolist(),
            CPU,
        )
        for name, config in CONFIGS.items()
    }


def batch_of(*parts: tuple[list[int], int]) -> ForwardBatch:
    """Requests as ``(ids so far, how many of them are new)``; what no hash reads is left empty."""
    none = torch.empty(0, dtype=torch.int64)
    counts = torch.tensor([new for _, new in parts])
    fed = [(ids[: len(ids) - new], ids[len(ids) - new :]) for ids, new in parts]
    return ForwardBatch(
        ids=torch.tensor([i for _, new in fed for i in new], dtype=torch.int32),
        pos=torch.cat([torch.arange(len(old), len(old) + len(new)) for old, new in fed]),
        req_of_row=torch.repeat_interleave(torch.arange(len(parts)), counts),
        q_off=torch.cat((torch.zeros(1), counts.cumsum(0))).long(),
        seq_len=torch.tensor([len(ids) for ids, _ in parts]),
        slot=none,
        floor_lo=none,
        floor_up=none,
        write_from=none,
        page_table=none,
        hist=torch.tensor([([-1] * 3 + old)[-3:] for old, _ in fed], dtype=torch.int32),
        rows_upper=none,
        req_of_upper=none,
        upper_off=none,
        sample_rows=none,
        max_len=0,
        max_rows=0,
    )


def to_device(batch: ForwardBatch, device: torch.device) -> ForwardBatch:
    values: dict[str, Any] = {f.name: getattr(batch, f.name) for f in dataclasses.fields(batch)}
    for name, value in values.items():
        if isinstance(value, Tensor):
            values[name] = value.to(device)
    return ForwardBatch(**values)


def golden_ids(engram: dict[str, Tensor], sequence: str) -> list[int]:
    """Ids of a sequence, masked places replaced by the image token."""
    ids = engram[f"{sequence}.input_ids"]
    mask = engram.get(f"{sequence}.token_mask")
    return (ids if mask is None else ids.masked_fill(mask == 0, IMAGE)).tolist()


class TestConstants:
    @both
    def test_primes(self, engram: dict[str, Tensor], name: str) -> None:
        assert hash_primes(CONFIGS[name]) == engram[f"{name}.primes"].tolist()

    @both
    def test_multipliers(self, engram: dict[str, Tensor], name: str) -> None:
        assert hash_multipliers(CONFIGS[name]).tolist() == engram[f"{name}.multipliers"].tolist()

    @both
    def test_offsets(
        self, engram: dict[str, Tensor], hashes: dict[str, EngramHash], name: str
    ) -> None:
        assert torch.equal(hashes[name].offsets, engram[f"{name}.offsets"])

    @both
    def test_configurations_are_those_of_the_file(self, golden: Path, name: str) -> None:
        params = json.loads((golden / "engram/params.json").read_text())[name]
        config = CONFIGS[name]
        assert params.pop("checks")["prime_sums"] == list(config.engram_num_embeddings)
        for key, value in params.items():
            got = getattr(config, key)
            assert (list(got) if isinstance(got, tuple) else got) == value, key

    def test_token_map_of_the_tiny_tokenizer(self, golden: Path, engram: dict[str, Tensor]) -> None:
        tokenizer = Tokenizer.from_file(str(golden / "v41-tiny/tokenizer.json"))
        assert compressed_token_map(tokenizer) == engram["tiny.token_map"].tolist()

    def test_tokenizer_of_another_model_is_refused(self, engram: dict[str, Tensor]) -> None:
        config = dataclasses.replace(CONFIGS["tiny"], engram_compressed_vocab_size=361)
        with pytest.raises(ConfigError, match=r"360.*engram_compressed_vocab_size is 361"):
            EngramHash(config, engram["tiny.token_map"].tolist(), CPU)


class TestGoldenRows:
    @both
    @pytest.mark.parametrize("sequence", ["seq0", "seq1", "seq2", "seq3"])
    def test_whole_sequences(
        self, engram: dict[str, Tensor], hashes: dict[str, EngramHash], name: str, sequence: str
    ) -> None:
        ids = golden_ids(engram, f"{name}.{sequence}")
        rows, live = hashes[name].rows(batch_of((ids, len(ids))))
        assert torch.equal(rows.int(), engram[f"{name}.{sequence}.rows"])
        assert live.all()

    @both
    def test_masked_positions_block_the_look_back(
        self, engram: dict[str, Tensor], hashes: dict[str, EngramHash], name: str
    ) -> None:
        ids, mask = golden_ids(engram, f"{name}.masked"), engram[f"{name}.masked.token_mask"] > 0
        rows, live = hashes[name].rows(batch_of((ids, len(ids))))
        assert torch.equal(live, mask)
        assert torch.equal(rows[mask].int(), engram[f"{name}.masked.rows"][mask])

    @both
    @pytest.mark.parametrize("sequence", ["seq3", "masked"])
    def test_all_sequences_in_one_step(
        self, engram: dict[str, Tensor], hashes: dict[str, EngramHash], name: str, sequence: str
    ) -> None:
        """Neighbours, and padding rows between them, are none of a request's business."""
        order = ["seq1", None, "seq0", sequence, None, "seq2"]
        whole = [[0, 0] if s is None else golden_ids(engram, f"{name}.{s}") for s in order]
        counts = [len(ids) for ids in whole]
        rows, live = hashes[name].rows(batch_of(*zip(whole, counts, strict=True)))
        for s, got, alive in zip(order, rows.int().split(counts), live.split(counts), strict=True):
            if s is not None:
                assert torch.equal(got[alive], engram[f"{name}.{s}.rows"][alive])


def test_rows_stay_inside_the_table(hashes: dict[str, EngramHash]) -> None:
    for name, config in CONFIGS.items():
        ids = torch.randint(0, config.vocab_size, (500,)).tolist()
        rows, _ = hashes[name].rows(batch_of((ids, 500)))
        assert (rows >= 0).all()
        assert (rows.amax((0, 2)) < torch.tensor(config.engram_num_embeddings)).all()


def test_without_a_tokenizer_classes_are_ids() -> None:
    plain = EngramHash(TINY_WINDOW128, None, CPU)
    mapped = EngramHash(TINY_WINDOW128, list(range(512)), CPU)
    ids = torch.randint(0, 510, (50,)).tolist()
    one, other = (h.rows(batch_of((ids, 50)))[0] for h in (plain, mapped))
    assert torch.equal(one, other)


def test_an_id_that_the_tokenizer_lacks_has_no_ngrams_and_harms_nobody() -> None:
    """A model may draw such an id: it is dead, as an image is, and the step goes on."""
    config = dataclasses.replace(TINY_WINDOW128, engram_compressed_vocab_size=100)
    hash_ = EngramHash(config, list(range(100)), CPU)
    ids = torch.tensor([5, config.vocab_size - 1, 6])
    batch = ForwardBatch(
        ids=ids,
        pos=torch.arange(3),
        req_of_row=torch.zeros(3, dtype=torch.int64),
        q_off=torch.tensor([0, 3]),
        seq_len=torch.tensor([3]),
        slot=torch.tensor([1]),
        floor_lo=torch.tensor([0]),
        floor_up=torch.tensor([0]),
        write_from=torch.tensor([0]),
        page_table=torch.tensor([[1]]),
        hist=torch.full((1, 3), -1),
        rows_upper=torch.arange(3),
        req_of_upper=torch.zeros(3, dtype=torch.int64),
        upper_off=torch.tensor([0, 3]),
        sample_rows=torch.arange(3),
        max_len=3,
        max_rows=3,
    )
    rows, live = hash_.rows(batch)
    assert live.tolist() == [True, False, True]
    assert (rows >= 0).all()


class Table:
    """A table whose rows are their numbers."""

    num_rows = 834
    waits_for_host = False

    def gather(self, rows: Tensor) -> Tensor:
        return rows.unsqueeze(-1).repeat_interleave(2, dim=-1)


class TestPrefetch:
    def make(self) -> EngramPrefetch:
        tables = [Table() for _ in TINY_WINDOW128.engram_layer_ids]
        return EngramPrefetch(EngramHash(TINY_WINDOW128, None, CPU), tables, CPU)

    def test_each_layer_gets_its_own_rows(self) -> None:
        prefetch, batch = self.make(), batch_of(([5, 6, 7, 8], 3), ([9], 1))
        rows, live = prefetch.hash.rows(batch)
        values = prefetch.start(batch)
        for index in range(len(TINY_WINDOW128.engram_layer_ids)):
            got, got_live = values.wait(index)
            assert torch.equal(got, rows[:, index].repeat_interleave(2, dim=1))
            assert torch.equal(got_live, live)

    def test_some_rows_go_on_as_plain_tensors(self) -> None:
        values = self.make().start(batch_of(([5, 6, IMAGE, 8], 4)))
        kept = torch.tensor([1, 3])
        some = NgramValues.of([1], *(part[kept] for part in values.tensors([1])))
        for got, whole in zip(some.wait(1), values.wait(1), strict=True):
            assert torch.equal(got, whole[kept])

    def test_no_rows_are_no_values(self) -> None:
        values = self.make().start(batch_of(([5], 0)))
        assert values.wait(0)[0].shape == (0, 2 * TINY_WINDOW128.engram_columns)

    def test_each_layer_waits_for_its_own_rows_only(self, monkeypatch: pytest.MonkeyPatch) -> None:
        device = FakeDevice()
        monkeypatch.setattr(torch, "get_device_module", lambda _: device)
        prefetch, batch = self.make(), batch_of(([5, 6], 2))
        with Watched(device):
            values = prefetch.start(batch)
            assert device.streams[0].clock["main"] == 0
            first, live = values.wait(0)
            assert ((first + 0)[live] >= 0).all()
            with pytest.raises(Race):
                values.of_layer[1].value + 0
            assert (values.wait(1)[0] + 0 >= 0).all()


@pytest.mark.gpu
class TestPrefetchOnAGpu:
    DEVICE = torch.device("cuda")

    def make(self) -> EngramPrefetch:
        source = DummySource(TINY_WINDOW128, table_memory=TableMemory(self.DEVICE))
        tables = [
            source.engram_table(f"layers.{layer}.engram.embed", torch.bfloat16)
            for layer in TINY_WINDOW128.engram_layer_ids
        ]
        return EngramPrefetch(EngramHash(TINY_WINDOW128, None, self.DEVICE), tables, self.DEVICE)

    def batch(self, ids: list[int]) -> ForwardBatch:
        return to_device(batch_of((ids, len(ids))), self.DEVICE)

    def wanted(self, ids: list[int]) -> list[Tensor]:
        source = DummySource(TINY_WINDOW128)
        rows, _ = EngramHash(TINY_WINDOW128, None, CPU).rows(batch_of((ids, len(ids))))
        return [
            source.engram_table(f"layers.{layer}.engram.embed", torch.bfloat16)
            .gather(rows[:, index])
            .flatten(1)
            for index, layer in enumerate(TINY_WINDOW128.engram_layer_ids)
        ]

    @pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
    def test_the_host_waits_for_nothing(self) -> None:
        prefetch, ids = self.make(), list(range(40, 70))
        batch = self.batch(ids)
        with choose("triton", self.DEVICE, torch.bfloat16).active():
            prefetch.start(batch)  # compiles
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error")
            try:
                values = prefetch.start(batch)
                found = [values.wait(index)[0] for index in range(2)]
            finally:
                torch.cuda.set_sync_debug_mode("default")
        for got, wanted in zip(found, self.wanted(ids), strict=True):
            assert torch.equal(got.cpu(), wanted)

    def test_a_graph_takes_it_in_and_gathers_what_the_batch_holds_then(self) -> None:
        prefetch = self.make()
        batch = self.batch(list(range(40, 70)))
        with choose("triton", self.DEVICE, torch.bfloat16).active():
            prefetch.start(batch)  # compiles
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                values = prefetch.start(batch)
                found = [values.wait(index)[0] + 0 for index in range(2)]
        for first in (40, 100, 200):
            ids = list(range(first, first + 30))
            batch.ids.copy_(torch.tensor(ids))
            graph.replay()
            for got, wanted in zip(found, self.wanted(ids), strict=True):
                assert torch.equal(got.cpu(), wanted)
