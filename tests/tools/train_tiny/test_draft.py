"""The draft head over many blocks at once agrees with one block drafted from the formulas."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from leadline.config.model import ModelConfig
from leadline.models.deepseek_v41.engram import hash_primes
from leadline.tools.train_tiny.batch import Batch
from leadline.tools.train_tiny.blocks import Blocks, choose_blocks
from leadline.tools.train_tiny.draft import Draft, Drafted
from leadline.tools.train_tiny.draft_trainer import DraftTrainer, acceptance
from leadline.tools.train_tiny.model import Hidden, Phase, Transformer
from leadline.tools.train_tiny.official import parameter_formats
from leadline.tools.train_tiny.recipes import REHEARSAL, REHEARSAL_CONFIG
from leadline.tools.train_tiny.replicas import Replicas
from leadline.tools.train_tiny.rows import Rows
from leadline.weights.table import Role
from tests.tools.train_tiny.draft_definition import Definition

VOCAB, SLOTS, WINDOW = 256, 5, 8
LENGTH, SECOND = 64, 24  # a row holds two documents
TOKEN_MAP = list(range(VOCAB))


def small_config() -> ModelConfig:
    config = dataclasses.replace(
        REHEARSAL_CONFIG,
        vocab_size=VOCAB,
        sliding_window=WINDOW,
        engram_compressed_vocab_size=VOCAB,
    )
    rows = tuple(sum(primes) for primes in hash_primes(config))
    return dataclasses.replace(config, engram_num_embeddings=rows)


CONFIG = small_config()


def models(seed: int = 0) -> tuple[Transformer, Draft]:
    torch.manual_seed(seed)
    backbone, draft = Transformer(CONFIG, TOKEN_MAP), Draft(CONFIG)
    for parameter in draft.parameters():  # no weight is one that does nothing
        parameter.data += 0.05 * torch.randn_like(parameter)
    for name, buffer in draft.named_buffers():
        assert name.endswith("gate.bias")
        buffer.copy_(0.1 * torch.randn_like(buffer))
    return backbone, draft


def two_documents(rows: int = 2, seed: int = 1) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(64, VOCAB, (rows, LENGTH), generator=generator)
    first = torch.where(torch.arange(LENGTH) < SECOND, 0, SECOND).expand(rows, -1).clone()
    weights = torch.ones(rows, LENGTH)
    weights[:, [0, SECOND]] = 0
    return Batch(ids, first, weights)


def choose(batch: Batch, per_row: int = 12) -> Blocks:
    return choose_blocks(batch, CONFIG, per_row, torch.Generator().manual_seed(2))


def draft_all(
    backbone: Transformer, draft: Draft, batch: Batch, blocks: Blocks, *, quantize: bool = False
) -> Drafted:
    rows = Rows(batch, CONFIG, probes=0)
    with torch.no_grad():
        hidden = backbone.hidden(rows, Phase(sparse=True))
    cos, sin = rows.plain
    turns = (cos.flatten(0, 1), sin.flatten(0, 1))
    drafted: Drafted = draft(backbone, hidden.features, turns, blocks, quantize=quantize)
    return drafted


@pytest.mark.parametrize("quantize", [False, True], ids=["plain", "quantised"])
def test_blocks_drafted_at_once_equal_one_block_drafted_by_definition(quantize: bool) -> None:
    backbone, draft = models()
    batch = two_documents(rows=1)
    # Both ends of both documents, with fewer tokens in front than a window and with more.
    targets = [3, 6, 12, 20, SECOND + 3, SECOND + 10, LENGTH - SLOTS]
    weights = torch.zeros(1, LENGTH)
    for target in targets:
        weights[0, target - 1 : target + 1] = 1
    blocks = choose(dataclasses.replace(batch, weights=weights), per_row=len(targets))
    with torch.no_grad():
        drafted = draft_all(backbone, draft, batch, blocks, quantize=quantize)
        hidden = backbone.hidden(Rows(batch, CONFIG, probes=0), Phase(sparse=True))
    features = torch.cat(hidden.features, dim=1)
    definition = Definition(CONFIG, backbone, draft, quantize=quantize)
    found = (blocks.rows[:, 0] + 1).tolist()
    assert sorted(found) == targets
    for block, target in enumerate(found):
        start = SECOND if target >= SECOND else 0
        tokens = batch.ids[0, target - 1 : target - 1 + SLOTS].tolist()
        logits, confidence = definition.draft(features[start : target - 1], tokens)
        torch.testing.assert_close(drafted.logits[block], logits, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(drafted.confidence[block], confidence, atol=1e-5, rtol=1e-5)


def one_block(batch: Batch, target: int) -> Blocks:
    weights = torch.zeros_like(batch.weights)
    weights[0, target - 1 : target + SLOTS] = 1
    blocks = choose(dataclasses.replace(batch, weights=weights), per_row=SLOTS)
    at = int((blocks.rows[:, 0] + 1 == target).nonzero()[0])
    return Blocks(*(getattr(blocks, f.name)[at : at + 1] for f in dataclasses.fields(blocks)))


def test_a_block_at_a_documents_start_reads_nothing_of_the_document_before() -> None:
    backbone, draft = models()
    batch = two_documents(rows=1)
    other = dataclasses.replace(batch, ids=batch.ids.clone())
    other.ids[0, :SECOND] = batch.ids[0, :SECOND].flip(0)
    block = one_block(batch, SECOND + 3)
    assert block.sees[0].tolist() == [True, True] + [False] * (WINDOW - 2)
    with torch.no_grad():
        found, expected = (draft_all(backbone, draft, b, block).logits for b in (other, batch))
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)


def test_a_block_reads_no_features_behind_q() -> None:
    backbone, draft = models()
    batch = two_documents(rows=1)
    target = 12
    other = dataclasses.replace(batch, ids=batch.ids.clone())
    other.ids[0, target - 1 :] = batch.ids[0, target - 1 :].flip(0)
    with torch.no_grad():
        block = one_block(batch, target)  # the same tokens in front of the slots
        found, expected = (draft_all(backbone, draft, b, block).logits for b in (other, batch))
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)


def test_every_slot_sees_every_slot_of_its_block() -> None:
    backbone, draft = models()
    batch = two_documents(rows=1)
    block = one_block(batch, 12)
    for slot in range(1, SLOTS):  # the keys of the first slot depend on where the others stand
        positions = block.positions.clone()
        positions[0, slot] += 3
        moved = dataclasses.replace(block, positions=positions)
        with torch.no_grad():
            found, expected = (draft_all(backbone, draft, batch, b).logits for b in (moved, block))
        changed = (found - expected).abs().amax(-1)[0] > 1e-6
        assert changed.all(), slot


def test_a_slot_knows_of_the_text_only_the_anchor_and_the_token_in_front_of_it() -> None:
    backbone, draft = models()
    batch = two_documents(rows=1)
    block = one_block(batch, 12)
    changes = []
    for slot in range(SLOTS):
        previous = block.previous.clone()
        previous[0, slot] = (previous[0, slot] + 1) % VOCAB
        other = dataclasses.replace(block, previous=previous)
        with torch.no_grad():
            found, expected = (draft_all(backbone, draft, batch, b).logits for b in (other, block))
        changes.append(((found - expected).abs().amax(-1)[0] > 1e-6).tolist())
    assert changes[0] == [True] * SLOTS
    assert changes[1:] == [[i == slot for i in range(SLOTS)] for slot in range(1, SLOTS)]


def test_blocks_begin_where_a_model_writes_and_end_with_what_it_writes() -> None:
    batch = two_documents(rows=2)
    weights = torch.zeros_like(batch.weights)
    weights[:, 10:14] = 1.0
    weights[:, SECOND + 1 :] = 0.5
    weights[1, 40:] = 0
    blocks = choose(dataclasses.replace(batch, weights=weights), per_row=40)
    found = {}
    for row, of_block in zip((blocks.rows[:, 0] + 1).tolist(), blocks.weights, strict=True):
        if of_block.any():
            assert row not in found
            found[row] = of_block.tolist()
    # A document's last answer leaves fewer slots, and a prompt's first token is no prediction.
    assert found[11] == [1, 1, 1, 0, 0]
    assert found[13] == [1, 0, 0, 0, 0]
    assert found[LENGTH - 2] == [0.5, 0.5, 0, 0, 0]
    firsts = {*range(11, 14), *range(SECOND + 3, LENGTH)}
    firsts |= {LENGTH + i for i in (*range(11, 14), *range(SECOND + 3, 40))}
    assert found.keys() == firsts
    ids = batch.ids.flatten()
    assert torch.equal(blocks.previous, ids[blocks.rows])
    live = blocks.weights > 0
    assert torch.equal(blocks.targets[live], ids[blocks.rows[live] + 1])
    positions = batch.positions.flatten()
    assert torch.equal(blocks.positions[live], positions[blocks.rows[live]])


def test_heavier_text_is_drafted_more_often() -> None:
    batch = two_documents(rows=64)
    weights = batch.weights.clone()
    weights[:, SECOND:] *= 0.1
    blocks = choose(dataclasses.replace(batch, weights=weights), per_row=4)
    share = (blocks.rows[:, 0] % LENGTH < SECOND).float().mean()
    assert share > 0.7  # of 60 tokens, 21 weigh ten times as much as the others


def test_names_and_shapes_are_those_of_the_official_tensors() -> None:
    _, draft = models()
    expected = {
        name: ((CONFIG.dspark_n_routed_experts,) if ".experts." in name else ()) + spec.shape
        for name, spec in parameter_formats(CONFIG).items()
        if name.startswith("mtp.") and spec.role is not Role.IMAGE_ROUTER
    }
    assert {name: tuple(v.shape) for name, v in draft.state_dict().items()} == expected


def draft_trainer(backbone: Transformer, draft: Draft, *settings: str) -> DraftTrainer:
    recipe = REHEARSAL.changed(["warmup_steps=10", *settings])
    return DraftTrainer(draft, backbone, recipe, replicas=Replicas())


def test_every_weight_of_the_head_learns_and_the_backbone_does_not() -> None:
    backbone, draft = models()
    output = draft_trainer(backbone, draft).forward(two_documents(rows=8), Phase())
    output.loss.backward()
    assert all(p.grad is None for p in backbone.parameters())
    untaught = [n for n, p in draft.named_parameters() if p.grad is None or not p.grad.any()]
    assert untaught == []
    assert all(p.grad is not None and p.grad.isfinite().all() for p in draft.parameters())
    slots = 8 * (LENGTH // 16) * SLOTS
    assert output.expert_counts.sum(1).eq(slots * CONFIG.dspark_num_experts_per_tok).all()


def counting(rows: int) -> Batch:
    """Each token follows from the one before it, so that a Markov head may learn it."""
    ids = (torch.randint(VOCAB, (rows, 1)) + 3 * torch.arange(LENGTH)) % VOCAB
    weights = torch.ones(rows, LENGTH)
    weights[:, 0] = 0
    return Batch(ids, torch.zeros_like(ids), weights)


class Certain(Transformer):
    """A backbone that is sure of the next token of ``counting``, and has no layers to run."""

    def __init__(self) -> None:
        super().__init__(CONFIG, TOKEN_MAP)
        self.embed.weight.data = torch.randn(VOCAB, CONFIG.hidden_size)
        self.head.weight.data = self.embed.weight.data.roll(3, 0)

    def hidden(self, rows: Rows, phase: Phase) -> Hidden:
        x = F.embedding(rows.batch.ids.flatten(), self.embed.weight)
        features = [x] * len(CONFIG.dspark_target_layer_ids)
        none = torch.zeros(())
        return Hidden(x, index_loss=none, expert_counts=none, index_mass=none, features=features)


def test_a_head_learns_what_its_backbone_says_and_how_sure_to_be() -> None:
    torch.manual_seed(0)
    trainer = draft_trainer(Certain(), Draft(CONFIG), "adamw_lr=0.01")
    held_out = {"counting": counting(8)}
    before = trainer.acceptance(held_out)["counting"]
    for step in range(70):
        batches = iter([counting(8)])
        phase = Phase(quantize=step >= 60)
        trainer.step(batches, phase, passes=1, lr_factor=1.0)
    after = trainer.acceptance(held_out)["counting"]
    assert before.length < 1.5  # the first slot sees the anchor's embedding anyway
    assert after.length > 4
    assert after.loss < before.loss
    for expected, given in zip(after.confidence, after.given_earlier, strict=True):
        assert expected == pytest.approx(given, abs=0.15)
    assert trainer.is_quantized


def test_accepted_length_counts_up_to_the_first_rejected_slot() -> None:
    def one_hot(tokens: list[list[int]]) -> Tensor:
        return 9.0 * F.one_hot(torch.tensor(tokens), VOCAB).float()

    drafted = Drafted(
        logits=one_hot([[1, 2, 9, 4, 5], [1, 2, 3, 4, 5], [9, 2, 3, 4, 5]]),
        confidence=torch.zeros(3, SLOTS),
        expert_counts=torch.ones(1, 1),
    )
    block = one_block(two_documents(rows=1), 12)
    blocks = Blocks(*(getattr(block, f.name).expand(3, -1) for f in dataclasses.fields(block)))
    weights = torch.tensor([[1.0] * 5, [1.0] * 3 + [0.0] * 2, [1.0] * 5])
    blocks = dataclasses.replace(blocks, weights=weights)
    target = one_hot([[1, 2, 3, 4, 5]] * 3)
    found = acceptance(blocks, drafted, target, torch.tensor(2.5))
    assert found.blocks == 3
    assert found.length == pytest.approx((2 + 3 + 0) / 3)
    assert found.by_slot == pytest.approx([2 / 3, 1, 2 / 3, 1, 1])
    assert found.given_earlier == pytest.approx([2 / 3, 1, 1 / 2, 0, 0])
    assert found.confidence == pytest.approx([0.5, 0.5, 0.5, 0, 0])
    assert found.loss == 2.5
