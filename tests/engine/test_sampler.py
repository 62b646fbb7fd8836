from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from leadline.core.request import Request, SamplingParams, ThinkingBudget
from leadline.engine.sampler import Sampler
from leadline.kernels import ops

VOCAB = 64
EOS = 1
SAMPLER = Sampler(EOS)


def make_request(
    request_id: str = "r",
    prompt: Sequence[int] = (5, 6, 7),
    output: Sequence[int] = (),
    seed: int = 0,
    **params: Any,
) -> Request:
    return Request(
        request_id=request_id,
        tokens=array("i", [*prompt, *output]),
        num_prompt_tokens=len(prompt),
        sampling=SamplingParams(**{"max_tokens": 100, **params}),
        arrival=0.0,
        seed=seed,
    )


def random_logits(rows: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 3 * torch.randn(rows, VOCAB, generator=generator, dtype=dtype)


def sample_one(logits: Tensor, request: Request) -> int:
    return SAMPLER.sample(logits[None], [request])[0].token_id


def exact_distribution(
    logits: Tensor, *, temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> np.ndarray:
    """The distribution by its definition, one id after the other."""
    probs: np.ndarray = torch.softmax(logits.double() / temperature, -1).numpy().copy()
    probs[probs < min_p * probs.max()] = 0
    best_first = sorted(range(len(probs)), key=lambda i: (-probs[i], i))
    if top_k > 0:
        probs[best_first[top_k:]] = 0
    total, mass = probs.sum(), 0.0
    for i in best_first:
        if mass >= top_p * total:
            probs[i] = 0
        mass += probs[i]
    probs /= probs.sum()
    return probs


def assert_follows(counts: np.ndarray, probs: np.ndarray) -> None:
    """Chi-square over the ids that are expected five times or more, the others taken together."""
    assert counts[probs == 0].sum() == 0, "an id outside the distribution was drawn"
    expected = probs * counts.sum()
    common = expected >= 5
    seen = [*counts[common], counts[~common].sum()]
    want = [*expected[common], expected[~common].sum()]
    statistic = sum((s - w) ** 2 / w for s, w in zip(seen, want, strict=True) if w > 0)
    freedom = int(common.sum()) - 1 + (want[-1] > 0)
    # Mean and standard deviation of chi-square; the draws are seeded, so this never flickers.
    assert statistic < freedom + 4 * math.sqrt(2 * max(freedom, 1))


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 1.0},
        {"temperature": 0.5},
        {"temperature": 2.0},
        {"temperature": 1.0, "top_k": 5},
        {"temperature": 1.0, "top_p": 0.7},
        {"temperature": 1.3, "min_p": 0.05},
        {"temperature": 1.0, "top_k": 12, "top_p": 0.8, "min_p": 0.02},
    ],
    ids=str,
)
def test_draws_follow_the_exact_distribution(settings: dict[str, Any]) -> None:
    draws = 50_000
    logits = random_logits(1)[0]
    expanded = logits.expand(draws, VOCAB)
    tokens = ops.sample(
        expanded,
        temperature_R=torch.full((draws,), settings["temperature"], dtype=torch.float64),
        min_p_R=torch.full((draws,), settings.get("min_p", 0.0), dtype=torch.float64),
        top_k_R=torch.full((draws,), settings.get("top_k", 0)),
        top_p_R=torch.full((draws,), settings.get("top_p", 1.0), dtype=torch.float64),
        uniform_R=torch.tensor(
            [ops.counter_uniform(7, position) for position in range(draws)], dtype=torch.float64
        ),
    )
    counts = np.bincount(tokens.numpy(), minlength=VOCAB)
    assert_follows(counts, exact_distribution(logits, **settings))


def test_request_seeds_draw_from_the_distribution_too() -> None:
    """Same position, seeds i = 0, 1, 2 ...: the choices of a request with n > 1."""
    logits = random_logits(1)[0]
    requests = [make_request(seed=seed) for seed in range(4000)]
    sampled = SAMPLER.sample(logits.expand(len(requests), VOCAB), requests)
    counts = np.bincount([token.token_id for token in sampled], minlength=VOCAB)
    assert_follows(counts, exact_distribution(logits, temperature=1.0))


@pytest.mark.parametrize("seed", [0, -1, 2**63 - 1, -(2**63)], ids=str)
def test_counter_uniform_fills_the_unit_interval(seed: int) -> None:
    values = np.array([ops.counter_uniform(seed, position) for position in range(4096)])
    assert 0 <= values.min() < 0.01
    assert 0.99 < values.max() < 1
    assert abs(values.mean() - 0.5) < 0.02
    assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 0.05


@pytest.mark.parametrize("extra", [{}, {"logprobs": 1}], ids=["fast path", "with logprobs"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_greedy_takes_the_smallest_of_equals(dtype: torch.dtype, extra: dict[str, Any]) -> None:
    logits = random_logits(2, dtype=dtype)
    logits[0, [50, 9, 30]] = 100.0
    logits[1] = 0.0
    requests = [make_request(temperature=0, **extra) for _ in range(2)]
    assert [t.token_id for t in SAMPLER.sample(logits, requests)] == [9, 0]


def test_tiny_temperature_counts_as_greedy() -> None:
    logits = random_logits(1)[0]
    assert sample_one(logits, make_request(temperature=9e-6, seed=3)) == int(logits.argmax())


@pytest.mark.parametrize(
    "params",
    [{"top_k": 1}, {"top_p": 1e-300}, {"top_p": 1e-6}, {"min_p": 1.0}, {"temperature": 1e-4}],
    ids=str,
)
def test_extreme_limits_leave_the_best_token(params: dict[str, Any]) -> None:
    logits = random_logits(1)[0]
    best = int(logits.argmax())
    assert {sample_one(logits, make_request(seed=s, **params)) for s in range(50)} == {best}


def test_top_k_at_a_tie_keeps_the_smaller_ids() -> None:
    drawn = {sample_one(torch.zeros(VOCAB), make_request(seed=s, top_k=3)) for s in range(100)}
    assert drawn == {0, 1, 2}


@pytest.mark.parametrize("params", [{"top_k": -1}, {"top_k": VOCAB + 5}, {"top_p": 1.0}], ids=str)
def test_limits_that_are_off_change_no_draw(params: dict[str, Any]) -> None:
    logits = random_logits(1)[0]
    for seed in range(50):
        want = sample_one(logits, make_request(seed=seed))
        assert sample_one(logits, make_request(seed=seed, **params)) == want


def test_seed_reproduces_whatever_runs_beside_it() -> None:
    logits = random_logits(5)
    mine = make_request(seed=42, top_p=0.9)
    alone = SAMPLER.sample(logits[2:3], [mine])[0]
    others = [
        make_request("a", temperature=0),
        make_request("b", top_k=4, logprobs=2),
        make_request("c", presence_penalty=1.0, output=[3]),
        make_request("d", logit_bias={4: 5.0}),
    ]
    batch = [*others[:2], mine, *others[2:]]
    assert SAMPLER.sample(logits, batch)[2].token_id == alone.token_id


def test_draws_change_with_seed_and_position() -> None:
    logits = torch.zeros(VOCAB)
    by_seed = {sample_one(logits, make_request(seed=s)) for s in range(20)}
    by_position = {sample_one(logits, make_request(seed=1, output=[2] * n)) for n in range(20)}
    assert min(len(by_seed), len(by_position)) > 10


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_item_76_logit_bias_of_100_forces_and_of_minus_100_forbids(temperature: float) -> None:
    logits = random_logits(1)[0]
    best = int(logits.argmax())
    forced = make_request(temperature=temperature, seed=0, logit_bias={11: 100.0})
    assert sample_one(logits, forced) == 11
    for seed in range(20):
        forbidden = make_request(temperature=temperature, seed=seed, logit_bias={best: -100.0})
        assert sample_one(logits, forbidden) != best


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_single_allowed_token_is_the_answer(temperature: float) -> None:
    request = make_request(temperature=temperature, seed=5, allowed_token_ids=(33,), top_p=0.5)
    assert sample_one(random_logits(1)[0], request) == 33


@pytest.mark.parametrize(
    ("params", "prompt", "output", "want"),
    [
        pytest.param({"presence_penalty": 2.0}, [5, 5], [], 5, id="prompt is free"),
        pytest.param({"presence_penalty": 2.0}, [9], [5], 8, id="presence"),
        pytest.param({"presence_penalty": -2.0}, [9], [8], 8, id="negative presence"),
        pytest.param({"frequency_penalty": 0.3}, [9], [5], 5, id="one occurrence costs 0.3"),
        pytest.param({"frequency_penalty": 0.3}, [9], [5, 5], 8, id="two cost 0.6"),
    ],
)
def test_presence_and_frequency_count_generated_tokens_only(
    params: dict[str, Any], prompt: list[int], output: list[int], want: int
) -> None:
    logits = torch.zeros(VOCAB)
    logits[5], logits[8] = 3.0, 2.5
    request = make_request(prompt=prompt, output=output, temperature=0, **params)
    assert sample_one(logits, request) == want


def test_repetition_penalty_counts_the_prompt_and_shrinks_both_signs() -> None:
    logits = torch.full((VOCAB,), -10.0)
    logits[5], logits[8] = 3.0, 2.0
    assert sample_one(logits, make_request(repetition_penalty=2.0, prompt=[5], temperature=0)) == 8
    logits[5], logits[8] = -2.0, -3.0
    assert sample_one(logits, make_request(repetition_penalty=2.0, prompt=[5], temperature=0)) == 8


def test_penalties_without_history_change_nothing() -> None:
    logits = random_logits(1)[0]
    plain = make_request(seed=4)
    penalised = make_request(seed=4, presence_penalty=2.0, frequency_penalty=-2.0)
    assert sample_one(logits, penalised) == sample_one(logits, plain)


def test_penalties_of_one_row_leave_its_neighbours_alone() -> None:
    logits = random_logits(1).repeat(2, 1)
    best = int(logits[0].argmax())
    said: dict[str, Any] = {"output": [best] * 9, "temperature": 0}
    penalties: dict[str, Any] = {"presence_penalty": 2.0, "frequency_penalty": 2.0}
    requests = [make_request(**said, **penalties), make_request(**said)]
    tokens = [t.token_id for t in SAMPLER.sample(logits, requests)]
    assert tokens[0] != best
    assert tokens[1] == best


def test_item_73_min_tokens_hold_back_the_end_and_stop_tokens() -> None:
    logits = torch.zeros(VOCAB)
    logits[EOS], logits[20], logits[30] = 9.0, 8.0, 7.0
    params: dict[str, Any] = {"temperature": 0, "min_tokens": 2, "stop_token_ids": (20,)}
    assert sample_one(logits, make_request(output=[9], **params)) == 30
    assert sample_one(logits, make_request(output=[9, 9], **params)) == EOS
    assert sample_one(logits, make_request(output=[9], ignore_eos=True, **params)) == EOS
    assert sample_one(logits, make_request(ignore_eos=True, temperature=0, min_tokens=1)) == EOS


def test_the_callers_logits_are_left_as_they_were() -> None:
    logits = random_logits(2)
    before = logits.clone()
    requests = [
        make_request(logit_bias={3: 5.0}, output=[4], presence_penalty=1.0),
        make_request(allowed_token_ids=(3, 4), min_tokens=1),
    ]
    SAMPLER.sample(logits, requests)
    assert torch.equal(logits, before)


@pytest.mark.parametrize("count", [0, 3, -1], ids="logprobs={}".format)
def test_c41_logprobs_are_the_models_own(count: int) -> None:
    """Before temperature, bias and masks; the sampled token is there even outside the top."""
    logits = random_logits(1)[0]
    worst = int(logits.argmin())
    request = make_request(logprobs=count, temperature=0.3, seed=1, allowed_token_ids=(worst,))
    sampled = SAMPLER.sample(logits[None], [request])[0]
    want = torch.log_softmax(logits.double(), -1)
    assert sampled.logprobs is not None
    assert sampled.logprobs.token_id == sampled.token_id == worst
    assert sampled.logprobs.logprob == pytest.approx(want[worst].item(), abs=1e-4)
    assert sampled.logprobs.rank == VOCAB
    expected = want.sort(descending=True)
    top_n = VOCAB if count < 0 else count
    assert [token for token, _ in sampled.logprobs.top] == expected.indices[:top_n].tolist()
    assert [value for _, value in sampled.logprobs.top] == pytest.approx(
        expected.values[:top_n].tolist(), abs=1e-4
    )


def test_each_row_has_as_many_rivals_as_its_request_wants() -> None:
    """Side by side in a batch; the values are those that each would have alone."""
    logits = random_logits(5)
    requests = [make_request(temperature=0, logprobs=n) for n in (2, None, 0, -1, 25)]
    together = SAMPLER.sample(logits, requests)
    alone = [SAMPLER.sample(logits[i : i + 1], [r])[0] for i, r in enumerate(requests)]
    assert together == alone
    counts = [None if t.logprobs is None else len(t.logprobs.top) for t in together]
    assert counts == [2, None, 0, VOCAB, 25]


def test_rank_of_a_tied_greedy_token_is_one() -> None:
    request = make_request(logprobs=1, temperature=0)
    logprobs = SAMPLER.sample(torch.zeros(1, VOCAB), [request])[0].logprobs
    assert logprobs is not None
    assert logprobs.rank == 1
    assert logprobs.logprob == pytest.approx(-math.log(VOCAB))


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0},
        {"temperature": 0, "logprobs": 3},
        {"temperature": 1.0},
        {"temperature": 1.0, "top_k": 3, "top_p": 0.5},
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", ["one nan", "all nan", "all -inf", "+inf"])
def test_a_row_without_a_distribution_is_minus_one(kind: str, params: dict[str, Any]) -> None:
    logits = random_logits(3)
    match kind:
        case "one nan":
            logits[1, 7] = torch.nan
        case "all nan":
            logits[1] = torch.nan
        case "all -inf":
            logits[1] = -torch.inf
        case "+inf":
            logits[1, 7] = torch.inf
    before, bad, after = SAMPLER.sample(logits, [make_request(**params) for _ in range(3)])
    assert bad.token_id == -1
    assert bad.logprobs is None
    assert 0 <= before.token_id < VOCAB
    assert 0 <= after.token_id < VOCAB


def test_nothing_allowed_is_minus_one() -> None:
    request = make_request(allowed_token_ids=(5,), temperature=0)
    request.bad_token_ids = ((5,),)
    [token] = SAMPLER.sample(random_logits(1), [request])
    assert (token.token_id, token.error, token.is_corrupted) == (-1, "nothing is allowed", False)


def test_item_73_min_tokens_never_forbids_the_only_id_that_is_left() -> None:
    request = make_request(allowed_token_ids=(EOS,), min_tokens=1, temperature=0)
    assert sample_one(random_logits(1)[0], request) == EOS
    request = make_request(allowed_token_ids=(EOS, 9), min_tokens=1, temperature=0)
    assert sample_one(random_logits(1)[0], request) == 9


@pytest.mark.parametrize(
    ("bad", "is_banned"),
    [((5,), True), ((7, 5), True), ((6, 7, 5), True), ((8, 5), False), ((3, 6, 7, 5), False)],
    ids=str,
)
def test_the_last_id_of_a_bad_sequence_is_banned_behind_the_others(
    bad: tuple[int, ...], is_banned: bool
) -> None:
    logits = random_logits(1)[0]
    logits[5] = 100.0
    request = make_request(prompt=(8, 3), output=(6, 7), temperature=0)
    request.bad_token_ids = (bad,)  # the prompt's own ids do not count
    assert (sample_one(logits, request) != 5) == is_banned


@pytest.mark.parametrize(
    ("num_output", "expected"), [(1, 9), (2, 30), (3, 30)], ids=["below", "at", "beyond"]
)
def test_item_69_a_spent_thinking_budget_leaves_its_end_only(
    num_output: int, expected: int
) -> None:
    logits = random_logits(1)[0]
    logits[9] = 100.0
    request = make_request(output=(6,) * num_output, temperature=0, allowed_token_ids=(9, 10))
    request.thinking_budget = ThinkingBudget(num_tokens=2, end_id=30)
    assert sample_one(logits, request) == expected
    request.append(30)
    assert sample_one(logits, request) == 9


def test_rows_that_ask_for_nothing_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, bool]] = []
    greedy = ops.greedy

    def watch(given: Tensor) -> Tensor:
        seen.append((len(given), given.data_ptr() == logits.data_ptr()))
        return greedy(given)

    monkeypatch.setattr(ops, "greedy", watch)
    logits = random_logits(3)
    adjusted = make_request(temperature=0, logit_bias={5: 1.0})
    SAMPLER.sample(logits, [make_request(temperature=0)] * 3)
    SAMPLER.sample(logits, [make_request(temperature=0), adjusted, make_request(temperature=0)])
    assert seen == [(3, True), (3, True), (1, False)]


def test_minus_inf_ids_are_never_drawn() -> None:
    logits = torch.full((VOCAB,), -torch.inf)
    logits[[4, 40]] = 0.0
    assert {sample_one(logits, make_request(seed=s)) for s in range(60)} == {4, 40}


def test_no_rows_give_no_tokens() -> None:
    assert SAMPLER.sample(torch.empty(0, VOCAB), []) == []
