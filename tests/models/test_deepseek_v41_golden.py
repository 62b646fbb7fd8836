"""The model against vectors of other implementations (``tests/golden/*/README.md``)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from leadline.kernels import ops
from leadline.kernels.reference.kv_store import load_rows
from leadline.models.common.rows import Rows
from leadline.models.deepseek_v41.attention import Selection
from leadline.models.deepseek_v41.model import Streams
from tests.models.golden import GOLDEN, LENGTHS, WAYS, vectors
from tests.steps import Stepper, make_stepper


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("length", LENGTHS)
def test_v41_tiny_without_quantisers_is_within_2e_4(length: int, way: str) -> None:
    cases, _ = vectors("v41-tiny")
    stepper = make_stepper(GOLDEN / "v41-tiny", kv_cache_dtype="float32")
    name = f"p{length}.noquant"
    greedy = cases[f"{name}.greedy_ids"].tolist()
    tokens = cases[f"p{length}.input_ids"].tolist() + greedy[:-1]
    logits = WAYS[way](stepper, tokens, length)
    want = cases[f"{name}.prompt_logits"]
    torch.testing.assert_close(logits[length - len(want) : length], want, rtol=0, atol=2e-4)
    torch.testing.assert_close(
        logits[length - 1 :], cases[f"{name}.greedy_logits"], rtol=0, atol=2e-4
    )
    assert logits[length - 1 :].argmax(-1).tolist() == greedy
    assert torch.equal(logits[:length].argmax(-1).int(), cases[f"{name}.prompt_argmax"])


@pytest.mark.parametrize("way", ["one_shot", "chunks_of_7", "beside_seven_others"])
def test_v41_tiny_with_quantisers_deviates_no_more_than_its_noise(way: str) -> None:
    """One flipped code moves a whole case, so the six cases are judged together."""
    cases, notes = vectors("v41-tiny")
    deviation, noise, agreement, allowed = [], [], [], []
    for length in LENGTHS:
        stepper = make_stepper(GOLDEN / "v41-tiny")
        first = cases[f"p{length}.quant.greedy_ids"].tolist()[:1]
        tokens = cases[f"p{length}.input_ids"].tolist() + first
        logits = WAYS[way](stepper, tokens, length)[:length]
        want = cases[f"p{length}.quant.prompt_logits"]
        deviation.append((logits[-len(want) :] - want).abs().mean())
        same = logits.argmax(-1) == cases[f"p{length}.quant.prompt_argmax"]
        agreement.append(same.float().mean())
        stated = notes[f"p{length}"]["quant"]
        noise.append(stated["noise1e-6_mean_abs_diff"])
        allowed.append(stated["noise1e-6_argmax_agreement"])
    assert torch.stack(deviation).mean() <= torch.tensor(noise).mean()
    assert torch.stack(agreement).mean() >= torch.tensor(allowed).mean()


def test_v41_tiny_layers_match_at_130_tokens() -> None:
    cases, _ = vectors("v41-tiny")
    stepper = make_stepper(GOLDEN / "v41-tiny", kv_cache_dtype="float32")
    tokens = cases["p130.input_ids"].tolist() + cases["p130.noquant.greedy_ids"].tolist()
    seen: dict[str, Tensor] = {}
    for block in stepper.model.blocks:
        record_outputs(block, seen)
    sequence = stepper.start(tokens)
    stepper.feed(sequence)
    for name, value in seen.items():
        if f"p130.noquant.{name}" in cases:
            want = cases[f"p130.noquant.{name}"]
            torch.testing.assert_close(value, want, rtol=0, atol=2e-4, msg=name)
    for layer, entries in ((2, 73), (4, 146)):
        for field, name in (("kv", "compressed_kv"), ("index", "index_keys")):
            stored = getattr(stepper.pool, field)[layer]
            place, per_page = torch.arange(entries), stored.values.shape[1]
            pages = torch.tensor(sequence.pages)[place // per_page]
            rows = load_rows(stored, pages, place % per_page, torch.float32)
            want = cases[f"p130.noquant.{name}.{layer}"]
            torch.testing.assert_close(rows, want, rtol=0, atol=1e-4)


def record_outputs(block: Any, seen: dict[str, Tensor]) -> None:
    read, forward, finish = block.attn.read, block.ffn.forward, block.finish

    def recording_finish(*args: Any) -> Streams:
        streams: Streams = finish(*args)
        seen[f"streams_out.{block.layer}"] = streams.x
        seen[f"pre_mix_out.{block.layer}"] = streams.carry
        return streams

    block.finish = recording_finish
    block.attn.read = lambda *a: seen.setdefault(f"attn.{block.layer}", read(*a))
    block.ffn.forward = lambda *a: seen.setdefault(f"ffn.{block.layer}", forward(*a))


@pytest.mark.parametrize("mode", ["noquant", "quant"])
def test_v41_tiny_selections_at_700_tokens(mode: str) -> None:
    """Selections of nearly all rows agree; quantised ones wherever no code flipped upstream."""
    cases, _ = vectors("v41-tiny")
    kv_cache_dtype = "float32" if mode == "noquant" else "auto"
    stepper = make_stepper(GOLDEN / "v41-tiny", kv_cache_dtype=kv_cache_dtype)
    name = f"p700.{mode}"
    tokens = cases["p700.input_ids"].tolist() + cases[f"{name}.greedy_ids"].tolist()
    seen: dict[int, Tensor] = {}
    for block in stepper.model.blocks:
        if block.attn.indexer is not None:
            record_selection(block.layer, block.attn.indexer, seen)
    stepper.feed(stepper.start(tokens))
    for layer, chosen in seen.items():
        want = cases[f"{name}.indexer_topk.{layer}"].long()
        width = max(chosen.shape[1], want.shape[1])
        same = sorted_rows(chosen, width) == sorted_rows(want, width)
        share = same.all(-1).float().mean()
        assert share >= (0.999 if mode == "noquant" else 0.7), f"layer {layer}: {share}"


def record_selection(layer: int, indexer: Any, seen: dict[int, Tensor]) -> None:
    select = indexer.select

    def recording(
        u: Tensor, qr: Tensor, step: Any, keys: Any, ratio: int, chosen: Selection
    ) -> None:
        select(u, qr, step, keys, ratio, chosen)
        assert chosen.entries is not None
        seen[layer] = chosen.entries

    indexer.select = recording


def sorted_rows(entries: Tensor, width: int) -> Tensor:
    padded = entries.new_full((len(entries), width), -1)
    padded[:, : entries.shape[1]] = entries
    return padded.sort(-1).values


REFERENCE_MODES: dict[str, dict[str, Any]] = {
    "f32": {"kv_cache_dtype": "float32", "quantize_activations": False},
    "f32q": {},
    "bf16": {"dtype": torch.bfloat16},
}
REFERENCE_LENGTHS = (1, 7, 130, 300, 520)


@pytest.mark.parametrize("way", ["one_shot", "chunks_of_7", "beside_seven_others"])
@pytest.mark.parametrize("length", REFERENCE_LENGTHS)
def test_v41_reference_without_quantisers_is_within_2e_4(length: int, way: str) -> None:
    cases, _ = vectors("v41-reference")
    stepper = make_stepper(GOLDEN / "v41-reference", **REFERENCE_MODES["f32"])
    greedy = cases[f"p{length}.f32.greedy_ids"].tolist()
    tokens = cases[f"p{length}.input_ids"].tolist() + greedy[:-1]
    logits = WAYS[way](stepper, tokens, length)
    want = cases[f"p{length}.f32.prompt_logits"]
    torch.testing.assert_close(logits[length - len(want) : length], want, rtol=0, atol=2e-4)
    got, wanted = logits[length - 1 :], cases[f"p{length}.f32.greedy_logits"]
    torch.testing.assert_close(got, wanted, rtol=0, atol=2e-4)
    assert got.argmax(-1).tolist() == greedy


@pytest.mark.parametrize("mode", ["f32q", "bf16"])
def test_v41_reference_with_quantisers_deviates_like_another_order_of_sums(mode: str) -> None:
    cases, notes = vectors("v41-reference")
    deviation, agreement, noise, allowed = [], [], [], []
    for length in REFERENCE_LENGTHS:
        stepper = make_stepper(GOLDEN / "v41-reference", **REFERENCE_MODES[mode])
        logits = stepper.feed(stepper.start(cases[f"p{length}.input_ids"].tolist()))
        want = cases[f"p{length}.{mode}.prompt_logits"]
        deviation.append((logits[-len(want) :] - want).abs().mean())
        same = logits.argmax(-1) == cases[f"p{length}.{mode}.prompt_argmax"]
        agreement.append(same.float().mean())
        stated = notes[f"p{length}.{mode}"]["noise_embedding"]
        noise.append(stated["mean"])
        allowed.append(stated["argmax_equal"])
    assert torch.stack(deviation).mean() <= torch.tensor(noise).mean()
    assert torch.stack(agreement).mean() >= torch.tensor(allowed).mean()


@pytest.mark.parametrize("layer", range(8))
def test_v41_reference_layer_by_layer_in_bf16(layer: int) -> None:
    """Each layer starts from the stored state: the sharp check of the rounding points.

    The golden's own noise is 0.5 % of the stream elements in its worst layer.
    """
    cases, _ = vectors("v41-reference")
    stepper = make_stepper(GOLDEN / "v41-reference", dtype=torch.bfloat16)
    model = stepper.model
    tokens = cases["p130.input_ids"].tolist()
    with torch.inference_mode():
        batch = stepper.batch([(stepper.start(tokens), 130)])
        rows = Rows.of(batch, batch.pos, batch.req_of_row, batch.q_off)
        step = model._step(batch, rows, batch.floor_lo, model.blocks)
        model.lower(batch)
        assert model.prefetch is not None
        ngrams = model.prefetch.start(batch)
        if layer == 0:
            x = model.embed[batch.ids].unsqueeze(1).expand(-1, 4, -1)
            carry = torch.tensor([1.0, 0, 0, 0]).expand(130, -1)
        else:
            x = cases[f"p130.bf16.streams_out.{layer - 1}"]
            carry = cases[f"p130.bf16.pre_mix_out.{layer - 1}"]
        chosen = Selection()
        block, seen = model.blocks[layer], dict[str, Tensor]()
        source = model.config.kv_source(layer)
        if source is not None and source != layer:
            restore_source(stepper, layer, chosen, cases)
        record_outputs(block, seen)
        streams, u, qr = block.begin(Streams(x, carry), ngrams, step, stepper.pool)
        assert torch.equal(u, cases[f"p130.bf16.attn_in.{layer}"])
        out = block.finish(streams, u, qr, step, stepper.pool, chosen)
    for name in (f"attn.{layer}", f"ffn.{layer}"):
        got, want = seen[name].float(), cases[f"p130.bf16.{name}"].float()
        assert (got - want).norm() / want.norm() < 2e-3, name
    different = (out.x != cases[f"p130.bf16.streams_out.{layer}"]).float().mean()
    assert different < 0.01
    torch.testing.assert_close(
        out.carry, cases[f"p130.bf16.pre_mix_out.{layer}"], rtol=0, atol=1e-3
    )


def restore_source(
    stepper: Stepper, layer: int, chosen: Selection, cases: dict[str, Tensor]
) -> None:
    """The stored entries, keys, selection and candidates that a layer reads from its sources."""
    config, pool = stepper.config, stepper.pool
    source = config.kv_source(layer)
    index_source = config.index_source(layer)
    assert source is not None
    pages = torch.tensor(stepper.sequences[0].pages)
    for field, name in ((pool.kv, "compressed_kv"), (pool.index, "index_keys")):
        rows = cases[f"p130.bf16.{name}.{source}"]
        place, per_page = torch.arange(len(rows)), field[source].values.shape[1]
        packed = ops.pack_rows(rows, field[source].record)
        ops.store_rows(field[source], pages[place // per_page], place % per_page, *packed)
    if index_source != layer:
        chosen.entries = cases[f"p130.bf16.indexer_topk.{index_source}"].long()
    elif config.candidate_source_layer_id == source:
        scores = cases[f"p130.bf16.indexer_scores.{source}"].float()
        chosen.candidates = ops.select_candidate_blocks(
            scores,
            torch.arange(1, 131),
            block_size=config.candidate_block_size,
            topk_blocks=config.candidate_topk_blocks,
        )
