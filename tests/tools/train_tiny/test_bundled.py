"""The bundled model: the trainer and the engine compute the same from its files."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import tokenizers
import torch
from torch import Tensor

from leadline.cli import bundled_model
from leadline.config.model import load_model_config
from leadline.eval.tasks import FAMILIES
from leadline.models.deepseek_v41.engram import compressed_token_map
from leadline.text.encoding import ChatEncoder
from leadline.text.tokenizer import Tokenizer
from leadline.tools.train_tiny import official
from leadline.tools.train_tiny.documents import DocumentEncoder
from leadline.tools.train_tiny.model import Phase, Transformer
from tests.steps import make_stepper
from tests.tools.train_tiny.statistics import compare_to_noise, one_row

BUNDLED = bundled_model()
CONFIG = load_model_config(BUNDLED)
SHORT = ("recall", "multi_turn", "tool_calls", "word_problem", "multiple_choice", "sequences")


@pytest.fixture(scope="module")
def values() -> dict[str, Tensor]:
    return official.read(BUNDLED, CONFIG)


@pytest.fixture(scope="module")
def model(values: dict[str, Tensor]) -> Transformer:
    tokenizer = tokenizers.Tokenizer.from_file(str(BUNDLED / "tokenizer.json"))
    made = Transformer(CONFIG, compressed_token_map(tokenizer))
    made.load_state_dict({name: values[name] for name in made.state_dict()})
    return made


def exercises(families: Sequence[str], count: int, sizes: tuple[int, int]) -> Iterator[Tensor]:
    """Ids of exercises with their answers, one family after the other."""
    encoder = DocumentEncoder(ChatEncoder(Tokenizer(BUNDLED / "tokenizer.json")))
    for i in range(count):
        rng = random.Random(f"agreement {i}")
        exercise = FAMILIES[families[i % len(families)]].make(rng, rng.randint(*sizes))
        ids = torch.from_numpy(encoder.encode(exercise).ids.astype("int64"))
        yield ids[: len(ids) // 2 * 2]  # rows of the trainer are whole entries


def row_differences(model: Transformer, ids: Tensor) -> Tensor:
    """Greatest difference between the trainer's logits and the engine's, of each row."""
    stepper = make_stepper(BUNDLED, kv_cache_dtype="float32", quantize_activations=False)
    expected = stepper.feed(stepper.start(ids.tolist()))
    with torch.no_grad():
        found = model.logits(one_row(ids), Phase(sparse=True))[0]
    return (found - expected).abs().amax(-1)


def test_without_quantisers_logits_equal_the_engines(model: Transformer) -> None:
    for ids in exercises(SHORT, len(SHORT), (60, 160)):
        assert row_differences(model, ids).max() < 1e-4


@pytest.mark.slow
def test_without_quantisers_logits_of_100_exercises_equal_the_engines(model: Transformer) -> None:
    differences = [row_differences(model, ids) for ids in exercises([*FAMILIES], 100, (100, 1000))]
    rows = torch.cat(differences)
    assert rows.median() < 5e-5
    # Where two entries or two experts are tied for the last place, rounding picks one of them, and
    # what attends to that row is another computation.
    assert (rows < 1e-4).float().mean() > 0.98
    assert sum(bool(prompt.max() < 1e-4) for prompt in differences) >= 80


def test_with_quantisers_they_differ_by_no_more_than_a_tiny_change_of_the_embeddings(
    model: Transformer,
) -> None:
    documents = [*exercises(("recall", "tool_calls", "sequences"), 3, (60, 160))]
    compare_to_noise(model, make_stepper(BUNDLED), documents)


def test_its_values_exported_again_are_the_same_files(
    values: dict[str, Tensor], tmp_path: Path
) -> None:
    official.export(tmp_path, CONFIG, values)
    shards = sorted(file.name for file in BUNDLED.glob("*.safetensors"))
    assert len(shards) == 2
    for name in (*shards, "model.safetensors.index.json"):
        assert (tmp_path / name).read_bytes() == (BUNDLED / name).read_bytes(), name
