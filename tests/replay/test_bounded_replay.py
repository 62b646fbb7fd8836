"""Bounded replay on a real model: cache-and-scheduling 7, 19 to 24 and 26 to 31."""

from __future__ import annotations

from array import array

import pytest
import torch
from torch import Tensor

from leadline.core.request import Request, SamplingParams
from leadline.engine.batch_builder import BatchBuilder
from leadline.engine.plan import RowGroup, RowKind
from leadline.kernels.packed import RecordField
from leadline.models.batch import ForwardBatch, forward
from leadline.models.common.attention import StepRows
from leadline.models.deepseek_v41.attention import Indexer, Selection
from tests.replay.harness import (
    EXACT,
    FULL_HALO,
    PAGE,
    WINDOW,
    Answer,
    Service,
    assert_same,
    bounded,
    exact,
    stepper_of,
    tiny_model,
    tokens_of,
)
from tests.replay.reference import replay_logprobs
from tests.steps import Sequence, Stepper, trimmed

# (H, E): whole prompts found; tails of one row, shorter than a window, as long, longer.
HITS = [(16, 16), (48, 48), (16, 17), (48, 51), (80, 87), (80, 88), (48, 57), (80, 120)]


def warm_prompt(hit: int, end: int) -> list[int]:
    return tokens_of(end, seed=1000 * hit + end)


def learn(service: Service, hits: list[tuple[int, int]]) -> None:
    """Let the cache know the first ``hit`` tokens of each prompt."""
    for i, pair in enumerate(hits):
        service.add(f"cold {i}", [*warm_prompt(*pair)[: pair[0]], 5], 1)
    service.run()


def ask_warm(service: Service, hits: list[tuple[int, int]]) -> list[Answer]:
    """The prompts together, once the cache knows a part of each."""
    learn(service, hits)
    answers = [service.add(f"warm {i}", warm_prompt(*pair)) for i, pair in enumerate(hits)]
    service.run()
    for (hit, end), answer in zip(hits, answers, strict=True):
        assert answer.cached == min(hit, end - 1)
    return answers


@pytest.fixture(scope="module")
def warm() -> list[Answer]:
    return ask_warm(bounded(tiny_model()), HITS)


# The lower half.


@pytest.mark.parametrize("chunk", [None, 3])
def test_17_what_is_cached_keeps_its_bytes(chunk: int | None) -> None:
    """Replayed hidden states are approximate; their entries are not written."""
    service = bounded(tiny_model(), chunk=chunk)
    service.ask(*(warm_prompt(*pair)[: pair[0]] for pair in HITS), max_tokens=1)
    before = [tensor.clone() for tensor in global_fields(service)]
    written = (before[0].flatten(1) != 0).any(1)
    assert written.sum() == sum(hit // PAGE for hit, _ in HITS)
    warm = service.ask(*(warm_prompt(*pair) for pair in HITS))
    assert all(answer.replayed for answer in warm)
    for old, new in zip(before, global_fields(service), strict=True):
        assert torch.equal(old[written], new[written])


def test_19_replay_equals_one_forward_with_an_explicit_mask(warm: list[Answer]) -> None:
    for (hit, end), answer in zip(HITS, warm, strict=True):
        assert answer.replayed == WINDOW
        want = replay_logprobs(tiny_model(), answer.text[:-1], hit=hit, prefill_end=end)
        EXACT(answer.logprobs, want)


def test_19_the_lower_half_alone_equals_its_reference() -> None:
    hits = [(16, 16), (48, 51), (80, 95)]
    service = Service(tiny_model(), lower=True, upper=False, chunk=7)
    for (hit, end), answer in zip(hits, ask_warm(service, hits), strict=True):
        text = answer.text[:-1]
        want = replay_logprobs(tiny_model(), text, hit=hit, prefill_end=end, upper=False)
        EXACT(answer.logprobs, want)


@pytest.mark.parametrize(("chunk", "budget"), [(1, 2048), (3, 2048), (3, 10), (64, 10)], ids=str)
def test_19_replay_does_not_depend_on_its_chunks(
    chunk: int, budget: int, warm: list[Answer]
) -> None:
    """A ``chunk`` below the replay's length splits it; so does a short ``budget``."""
    service = bounded(tiny_model(), chunk=chunk, max_num_batched_tokens=budget)
    for got, want in zip(ask_warm(service, HITS), warm, strict=True):
        assert_same(got, want)


def test_replay_is_an_approximation_that_the_tests_can_see(warm: list[Answer]) -> None:
    """Otherwise the equalities above would say little."""
    plain = exact(tiny_model(), caching=False)
    for answer in warm:
        [cold] = plain.ask(answer.prompt, max_tokens=1)
        assert (cold.rows[0] - answer.rows[0]).abs().max() > 1e-3


@pytest.mark.parametrize("upper", [False, True], ids=["lower", "both"])
def test_20_prompts_within_the_window_are_exact(upper: bool) -> None:
    prompts = [tokens_of(n, seed=n) for n in range(1, WINDOW + 1)]
    want = exact(tiny_model()).ask(*prompts, max_tokens=12)
    got = Service(tiny_model(), lower=True, upper=upper).ask(*prompts, max_tokens=12)
    for one, other in zip(got, want, strict=True):
        assert_same(one, other)


def test_20_cold_prompts_without_the_trim_are_exact() -> None:
    prompts = [tokens_of(n, seed=n) for n in (9, 16, 17, 50, 90)]
    want = exact(tiny_model()).ask(*prompts)
    got = Service(tiny_model(), lower=True, upper=False).ask(*prompts)
    for one, other in zip(got, want, strict=True):
        assert_same(one, other)


def test_20_the_trim_leaves_the_pages_of_a_cold_prompt_exact() -> None:
    """The trim is above the last layer that owns global KV."""
    services = [exact(tiny_model()), bounded(tiny_model(), chunk=7)]
    for service in services:
        service.ask(tokens_of(70, seed=1), max_tokens=1)  # alone: both take the same pages
    for one, other in zip(*map(global_fields, services), strict=True):
        assert torch.equal(one[: 1 + 70 // PAGE], other[: 1 + 70 // PAGE])


def global_fields(service: Service) -> list[Tensor]:
    fields = [*service.pool.kv.values(), *service.pool.index.values()]
    return [t for f in fields for t in (f.values, f.scales) if t is not None]


@pytest.mark.parametrize(("hit", "end"), [pair for pair in HITS if pair[0] == pair[1]], ids=str)
def test_21_a_full_hit_feeds_one_window_and_takes_no_page(hit: int, end: int) -> None:
    service = bounded(tiny_model())
    learn(service, [(hit, end)])
    before, free = service.counters, service.cache.num_free_pages
    answer = service.add("warm", warm_prompt(hit, end))
    service.step()
    fed = {name: service.counters[name] - before[name] for name in before}
    assert (fed["computed_tokens"], fed["replayed_tokens"], fed["upper_rows"]) == (0, 8, 8)
    assert free - service.cache.num_free_pages == hit // PAGE  # those found, and no new one
    [row] = answer.rows
    EXACT(row, replay_logprobs(tiny_model(), answer.prompt, hit=hit, prefill_end=end)[0])
    service.run()


# A prefix of any length may come from another machine: pages only, the last one half full.


def received(stepper: Stepper, tokens: list[int], hit: int) -> tuple[Sequence, Sequence]:
    """The whole text computed cold, and a sequence that got the entries below ``hit`` alone."""
    cold, warm = stepper.start(tokens), stepper.start(tokens)
    stepper.feed(cold)
    for fields in (stepper.pool.kv, stepper.pool.index):
        for layer, field in fields.items():
            ratio = stepper.config.compress_ratios[layer]
            for tensor in (field.values, field.scales):
                if tensor is not None:
                    pages = tensor[cold.pages].flatten(0, 1)
                    pages[hit // ratio :] = 0x55
                    tensor[warm.pages] = pages.unflatten(0, (len(warm.pages), -1))
    warm.write_from = hit
    return cold, warm


def entry_at(stepper: Stepper, sequence: Sequence, position: int) -> list[Tensor]:
    """Bytes of the ratio-2 entry and key that complete at an odd position."""
    page, place = sequence.pages[position // PAGE], position % PAGE // 2
    fields: tuple[RecordField, ...] = (stepper.pool.kv[2], stepper.pool.index[2])
    return [t[page, place] for f in fields for t in (f.values, f.scales) if t is not None]


@pytest.mark.parametrize(
    ("hit", "length"),
    # Feeding from 0, or with the whole halo, the hidden states are those of the cold run.
    [(7, WINDOW), (71, FULL_HALO), (57, FULL_HALO)],
    ids=["start_0", "odd_start", "start_1"],
)
@pytest.mark.parametrize("chunk", [None, 1])
def test_22_the_pair_across_an_odd_hit_equals_the_cold_one(
    hit: int, length: int, chunk: int | None
) -> None:
    stepper = stepper_of(tiny_model())
    cold, warm = received(stepper, tokens_of(hit + 9, seed=hit), hit)
    warm.fed = warm.floor_lo = warm.floor_up = max(0, hit - length)
    stepper.feed(warm, chunk)
    for got, want in zip(entry_at(stepper, warm, hit), entry_at(stepper, cold, hit), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("chunk", [1, WINDOW, 5])
def test_22_an_odd_hit_does_not_depend_on_chunks(chunk: int) -> None:
    """One of the chunks ends between the two rows of the pair."""
    hit, logits, entries = 41, [], []
    for size in (None, chunk):
        stepper = stepper_of(tiny_model())
        _, warm = received(stepper, tokens_of(hit + 9, seed=hit), hit)
        warm.fed = warm.floor_lo = warm.floor_up = hit - WINDOW
        logits.append(stepper.feed(warm, size))
        entries.append(entry_at(stepper, warm, hit))
    EXACT(*logits)
    for one, other in zip(*entries, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("image", [False, True], ids=["text", "image"])
def test_23_replayed_rows_have_the_ngrams_of_a_cold_run(image: bool) -> None:
    model = tiny_model()
    assert model.prefetch is not None
    hashing = model.prefetch.hash
    tokens = tokens_of(40, seed=2)
    if image:
        tokens[1] = tokens[17] = tokens[18] = model.config.image_token_id
    builder = BatchBuilder(num_history=3, device=torch.device("cpu"))
    request = Request("", array("i", tokens), 40, SamplingParams(), arrival=0.0)
    request.pages = array("i", [1, 2, 3])

    def rows(start: int) -> tuple[Tensor, Tensor]:
        request.cached = min(40, start + WINDOW) if start else 0
        group = RowGroup(request, RowKind.PREFILL, start, 40 - start, 40 - start, 1)
        return hashing.rows(builder.build([group]))

    cold, cold_live = rows(0)
    for start in range(40):
        replayed, live = rows(start)
        assert torch.equal(replayed, cold[start:])
        assert torch.equal(live, cold_live[start:])


def test_24_hits_of_several_lengths_replay_together_as_one_by_one(warm: list[Answer]) -> None:
    for pair, together in zip(HITS, warm, strict=True):
        [alone] = ask_warm(bounded(tiny_model()), [pair])
        assert_same(alone, together)


# The upper half.

COLD_LENGTHS = (1, 7, 8, 9, 16, 17, 33, 72)


@pytest.fixture(scope="module")
def cold() -> list[Answer]:
    return ask_cold(bounded(tiny_model()))


def ask_cold(service: Service) -> list[Answer]:
    return service.ask(*(tokens_of(n, seed=n) for n in COLD_LENGTHS))


@pytest.mark.parametrize(
    ("chunk", "budget"), [(1, 2048), (3, 10), (64, 64), (256, 256), (1000, 1000)], ids=str
)
def test_27_any_chunks_of_a_cold_prompt_give_the_same_tokens(
    chunk: int, budget: int, cold: list[Answer]
) -> None:
    service = bounded(tiny_model(), chunk=chunk, max_num_batched_tokens=budget)
    for got, want in zip(ask_cold(service), cold, strict=True):
        assert_same(got, want)


def test_28_the_trim_changes_nothing_that_clipped_windows_do_not(cold: list[Answer]) -> None:
    """The reference runs every row in the upper half, clipped at U."""
    for answer in cold:
        end = len(answer.prompt)
        want = replay_logprobs(tiny_model(), answer.text[:-1], hit=0, prefill_end=end)
        EXACT(answer.logprobs, want)


@pytest.mark.parametrize("chunk", [None, 3])
def test_28_the_upper_half_alone_gives_behind_a_snapshot_what_it_gives_cold(
    chunk: int | None,
) -> None:
    """Where a window of new rows follows the hit: then no saved row of the upper layers is read."""
    hits = [(16, 24), (48, 57), (80, 120)]
    services = [Service(tiny_model(), lower=False, upper=True, chunk=chunk) for _ in range(2)]
    cold = services[0].ask(*(warm_prompt(*pair) for pair in hits))
    for got, want in zip(ask_warm(services[1], hits), cold, strict=True):
        assert_same(got, want)


def test_28_batch_mates_and_batch_size_change_nothing(cold: list[Answer]) -> None:
    service = bounded(tiny_model())
    for answer in cold[::-2]:
        [alone] = service.ask(answer.prompt)
        assert_same(alone, answer)


def test_29_prompt_logits_are_exact_beside_trimmed_neighbours(cold: list[Answer]) -> None:
    """Twice: the second time their own pages are in the cache, and are not used."""
    tokens = tokens_of(60, seed=60)
    stepper = stepper_of(tiny_model())
    want = stepper.feed(stepper.start(tokens)).float()
    service = bounded(tiny_model(), chunk=25)
    found: list[object] = []
    for i in range(2):
        service.engine.add_prompt_logits(f"logits {i}", tokens, found.append)
        mates = ask_cold(service)
        got = torch.as_tensor(found[i])
        torch.testing.assert_close(got, want, rtol=2**-23, atol=2**-23)
        for mate, alone in zip(mates, cold, strict=True):
            if not mate.cached:
                assert_same(mate, alone)
        assert service.counters["replayed_tokens"] == sum(8 for n in COLD_LENGTHS if n > 15) * i
    decode_rows = 2 * 3 * len(COLD_LENGTHS)
    trimmed = 2 * sum(min(n, WINDOW) for n in COLD_LENGTHS)
    assert service.counters["upper_rows"] == 2 * 60 + trimmed + decode_rows


class Tagged:
    """What every index source chose, by layer, request and position."""

    def __init__(self) -> None:
        self.entries: dict[tuple[int, int, int], list[int]] = {}
        self.candidates: dict[tuple[int, int, int], list[int]] = {}

    def note(self, layer: int, step: StepRows, chosen: Selection) -> None:
        assert chosen.entries is not None
        slots = step.rows.slot[step.rows.req_of_row].tolist()
        for row, tag in enumerate(zip(slots, step.rows.pos.tolist(), strict=True)):
            entries = chosen.entries[row].tolist()
            self.entries[layer, *tag] = [entry for entry in entries if entry >= 0]
            if chosen.candidates is not None:
                blocks = chosen.candidates[row].tolist()
                self.candidates[layer, *tag] = [block for block in blocks if block >= 0]


@pytest.fixture
def tagged(monkeypatch: pytest.MonkeyPatch) -> Tagged:
    tags, select, model = Tagged(), Indexer.select, tiny_model()
    layer_of = {id(block.attn.indexer): block.layer for block in model.blocks}

    def noted(self: Indexer, *args: object) -> None:
        select(self, *args)  # type: ignore[arg-type]
        step, chosen = args[2], args[5]
        assert isinstance(step, StepRows)
        assert isinstance(chosen, Selection)
        tags.note(layer_of[id(self)], step, chosen)

    monkeypatch.setattr(Indexer, "select", noted)
    return tags


def test_31_upper_rows_have_selections_and_candidates_of_their_own(tagged: Tagged) -> None:
    """Those that untrimmed rows choose, for three requests whose upper rows lie apart."""

    def run(*, trim: bool) -> Tagged:
        tagged.entries, tagged.candidates = {}, {}
        stepper = stepper_of(tiny_model())
        parts = []
        for length, floor in ((100, 92), (120, 80), (90, 89)):
            sequence = stepper.start(tokens_of(length, seed=length))
            sequence.floor_up = floor
            parts.append((sequence, length))
        batch = stepper.batch(parts)
        if trim:
            batch = without_rows_below_the_floor(batch)
        with torch.inference_mode():
            forward(stepper.model, batch)
        found = Tagged()
        found.entries, found.candidates = tagged.entries, tagged.candidates
        return found

    trimmed, whole = run(trim=True), run(trim=False)
    upper = {tag for tag in trimmed.entries if tag[0] >= 4}
    assert len(upper) == 2 * (8 + 40 + 1)  # of the two index sources in the upper half
    for tag in upper:
        assert trimmed.entries[tag] == whole.entries[tag]
        assert len(trimmed.entries[tag]) == 16  # chosen, not simply all
        assert trimmed.candidates[tag] == whole.candidates[tag]
        assert len(trimmed.candidates[tag]) == 8  # blocks, of at least 12


def without_rows_below_the_floor(batch: ForwardBatch) -> ForwardBatch:
    kept = batch.pos >= batch.floor_up[batch.req_of_row]
    return trimmed(batch, kept.nonzero().squeeze(1))
