"""DeepSeek-V4 against vectors of other implementations (``tests/golden/v4-tiny/README.md``)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from leadline.kernels import ops
from tests.models.golden import GOLDEN, LENGTHS, WAYS, vectors
from tests.steps import V4Stepper, make_v4_stepper

CLOSE: dict[str, Any] = {"rtol": 0, "atol": 2e-4}


def make() -> V4Stepper:
    return make_v4_stepper(GOLDEN / "v4-tiny", kv_cache_dtype="float32")


def tokens_of(length: int) -> list[int]:
    cases, _ = vectors("v4-tiny")
    prompt, greedy = (cases[f"p{length}.{part}_ids"].tolist() for part in ("input", "greedy"))
    return prompt + greedy


# 700 steps of one row would show what 300 do.
RUNS = [(n, way) for n in LENGTHS for way in WAYS if (n, way) != (700, "chunks_of_1")]


@pytest.mark.parametrize(("length", "way"), RUNS)
def test_logits_are_within_2e_4(length: int, way: str) -> None:
    cases, _ = vectors("v4-tiny")
    logits = WAYS[way](make(), tokens_of(length)[:-1], length)
    want = cases[f"p{length}.prompt_logits"]
    torch.testing.assert_close(logits[length - len(want) : length], want, **CLOSE)
    torch.testing.assert_close(logits[length - 1 :], cases[f"p{length}.greedy_logits"], **CLOSE)
    assert logits[length - 1 :].argmax(-1).tolist() == cases[f"p{length}.greedy_ids"].tolist()
    assert torch.equal(logits[:length].argmax(-1).int(), cases[f"p{length}.prompt_argmax"])


@pytest.mark.parametrize("chunk", [None, 50])
def test_layers_match_at_130_tokens(chunk: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    cases, _ = vectors("v4-tiny")
    stepper, parts = make(), dict[str, list[Tensor]]()

    def watch(of: Any, method: str, name: str, *, argument: bool = False) -> None:
        call = getattr(of, method)

        def watched(*args: Any) -> Any:
            result = call(*args)
            parts.setdefault(name, []).append(args[0] if argument else result)
            return result

        monkeypatch.setattr(of, method, watched)

    for block in stepper.model.blocks:
        watch(block, "forward", f"streams.{block.layer}", argument=True)
        watch(block.attn, "read", f"attn.{block.layer}")
        watch(block.ffn, "forward", f"ffn.{block.layer}")
    watch(stepper.model, "upper", "final_norm")
    stepper.feed(stepper.start(tokens_of(130)), chunk)
    stored = {f"p130.{name}": torch.cat(values) for name, values in parts.items()}
    wanted = {"final_norm", *(f"{part}.{i}" for part in ("attn", "ffn") for i in range(6))}
    assert {f"p130.{name}" for name in wanted | {"streams.2", "streams.4"}} <= cases.keys()
    for name in stored.keys() & cases.keys():
        torch.testing.assert_close(stored[name], cases[name], **CLOSE, msg=name)


@pytest.mark.parametrize("length", [130, 700])
def test_selections_and_experts_match(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    cases, _ = vectors("v4-tiny")
    stepper, entries, experts = make(), list[Tensor](), list[Tensor]()
    select, route = ops.select_top_k, ops.route

    def selecting(*args: Any) -> Tensor:
        entries.append(select(*args))
        return entries[-1]

    def routing(*args: Any, **options: Any) -> tuple[Tensor, Tensor]:
        experts.append(route(*args, **options)[0])
        return route(*args, **options)

    monkeypatch.setattr(ops, "select_top_k", selecting)
    monkeypatch.setattr(ops, "route", routing)
    stepper.feed(stepper.start(tokens_of(length)))
    for layer, chosen in zip((2, 4), entries, strict=True):
        want = cases[f"p{length}.indexer_topk.{layer}"].long()
        assert torch.equal(chosen.sort().values, want.sort().values), layer
    for layer, chosen in zip((3, 4, 5), experts, strict=True):
        assert torch.equal(chosen, cases[f"p{length}.router_topk.{layer}"].long()), layer


def test_in_bf16_it_deviates_no_more_than_the_implementation_of_the_vectors() -> None:
    cases, notes = vectors("v4-tiny")
    deviation, agreement, stated = [], [], []
    for length in LENGTHS:
        stepper = make_v4_stepper(
            GOLDEN / "v4-tiny", dtype=torch.bfloat16, kv_cache_dtype="bfloat16"
        )
        logits = stepper.feed(stepper.start(cases[f"p{length}.input_ids"].tolist()))
        want = cases[f"p{length}.prompt_logits"]
        deviation.append((logits[-len(want) :] - want).abs().mean())
        same = logits.argmax(-1) == cases[f"p{length}.prompt_argmax"]
        agreement.append(same.float().mean())
        stated.append(notes[f"p{length}"]["bf16_run"])
    mean, equal = (
        torch.tensor([run[name] for run in stated]).mean()
        for name in ("mean_abs_diff", "argmax_agreement")
    )
    assert torch.stack(deviation).mean() <= mean
    assert torch.stack(agreement).mean() >= equal
