"""The trainer's model and the engine's, written apart from the same formulas, agree."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from leadline.config.model import ModelConfig
from leadline.config.presets import TINY_WINDOW128
from leadline.models.deepseek_v41.engram import compressed_token_map
from leadline.tools.random_checkpoint import write_random_checkpoint
from leadline.tools.train_tiny import official
from leadline.tools.train_tiny.data import model_config
from leadline.tools.train_tiny.model import Phase, Transformer
from leadline.tools.train_tiny.tokenizer import train_tokenizer
from tests.steps import make_stepper
from tests.tools.train_tiny.statistics import compare_to_noise, one_row

# Every truncation bites within 200 tokens: window 16, 16 entries chosen of 6 blocks of 8.
SHAPE = dataclasses.replace(
    TINY_WINDOW128, sliding_window=16, index_topk=16, candidate_topk_blocks=6, hidden_size=64
)
SPARSE = Phase(sparse=True)
QUANTIZED = Phase(sparse=True, quantize=True)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("train_tiny")
    tokenizer = train_tokenizer([Path("LICENSE").read_text()], vocab_size=512)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = model_config(SHAPE, tokenizer)
    write_random_checkpoint(folder / "model", config, tokenizer=folder / "tokenizer.json")
    return folder / "model"


def load(folder: Path) -> tuple[Transformer, ModelConfig]:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    config = model_config(SHAPE, tokenizer)
    model = Transformer(config, compressed_token_map(tokenizer))
    values = official.read(folder, config)
    model.load_state_dict({n: v for n, v in values.items() if not n.startswith("mtp.")})
    return model, config


def random_ids(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, 400, (count,), generator=torch.Generator().manual_seed(seed))


def test_without_quantisers_logits_equal_the_engines(checkpoint: Path) -> None:
    model, _ = load(checkpoint)
    ids = random_ids(200)
    stepper = make_stepper(checkpoint, kv_cache_dtype="float32", quantize_activations=False)
    expected = stepper.feed(stepper.start(ids.tolist()))
    with torch.no_grad():
        found = model.logits(one_row(ids), SPARSE)[0]
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


def test_with_quantisers_they_differ_by_no_more_than_a_tiny_change_of_the_embeddings(
    checkpoint: Path,
) -> None:
    model, _ = load(checkpoint)
    documents = [random_ids(150, seed) for seed in range(8)]
    compare_to_noise(model, make_stepper(checkpoint), documents)


def test_documents_of_one_row_do_not_see_each_other(checkpoint: Path) -> None:
    model, _ = load(checkpoint)
    ids = random_ids(160)
    start = 64  # a multiple of candidate_block_size, so that blocks of candidates are the same
    first = torch.tensor([0] * start + [start] * (160 - start))
    with torch.no_grad():
        together = model.logits(one_row(ids, first), SPARSE)[0]
        apart = [model.logits(one_row(part), SPARSE)[0] for part in ids.split([start, 160 - start])]
    torch.testing.assert_close(together, torch.cat(apart), atol=1e-5, rtol=0)


def test_every_weight_learns_and_only_the_index_loss_teaches_indexers(checkpoint: Path) -> None:
    model, _ = load(checkpoint)
    output = model(one_row(random_ids(128)), QUANTIZED)
    output.loss.backward(retain_graph=True)
    indexers = {name for name, _ in model.named_parameters() if ".indexer." in name}
    taught = {name for name, p in model.named_parameters() if p.grad is not None}
    assert taught.isdisjoint(indexers)
    output.index_loss.backward()
    untaught = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    assert untaught == []
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    assert output.expert_counts.sum(1).eq(128 * SHAPE.num_experts_per_tok).all()


def test_weights_scale_what_a_token_costs(checkpoint: Path) -> None:
    model, _ = load(checkpoint)
    ids = random_ids(32)
    with torch.no_grad():
        logits = model.logits(one_row(ids), SPARSE)[0]
        batch = dataclasses.replace(one_row(ids), weights=torch.zeros(1, 32))
        batch.weights[0, 5], batch.weights[0, 9] = 1.0, 0.5
        output = model(batch, SPARSE)
    log_probs = logits.log_softmax(-1)
    costs = [-log_probs[t - 1, ids[t]] for t in (5, 9)]
    assert output.loss == pytest.approx(float((costs[0] + 0.5 * costs[1]) / 1.5), rel=1e-5)
    assert output.token_losses[0, 5] == pytest.approx(float(costs[0]), rel=1e-5)
    assert output.token_losses[0, 6] == 0


def test_an_export_read_back_and_exported_again_is_the_same_file(
    checkpoint: Path, tmp_path: Path
) -> None:
    _, config = load(checkpoint)
    torch.manual_seed(3)
    # Values on no grid, as a trainer has them.
    parameters = {
        name: values + 0.03 * values.std().nan_to_num(1.0) * torch.randn_like(values)
        for name, values in official.read(checkpoint, config).items()
    }
    official.export(tmp_path / "once", config, parameters, num_shards=2)
    values = official.read(tmp_path / "once", config)
    official.export(tmp_path / "twice", config, values, num_shards=2)
    for file in (tmp_path / "once").glob("*.safetensors"):
        assert file.read_bytes() == (tmp_path / "twice" / file.name).read_bytes()
    specs = official.parameter_formats(config)
    for name, values_read in values.items():
        rounded = official.round_weight(parameters[name], specs[name])
        assert torch.equal(rounded, values_read), name
