"""Faults that users of other engines reported, each reproduced here: E1 to E6 and R7.

E1 scales taken for numbers, E2 prompts over several steps, E3 NaN scores, E4 n-grams at a split,
E5 overflow blamed on a later layer, E6 loops in long chats, R7 prefix hits that corrupt the answer.
The other R's are about protocol: ``serving/test_user_reports.py``.
Every op of E5 on its own, at the official widths: ``kernels/reference/test_official_widths.py``.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from leadline.config.presets import TINY_WINDOW128
from leadline.core.errors import CheckpointError
from leadline.kernels import debug, ops
from leadline.kernels.debug import NonFiniteError
from leadline.kernels.packed import RecordField, WeightFormat
from leadline.models.deepseek_v41.model import DeepseekV41, Streams
from leadline.tools.random_checkpoint import write_random_checkpoint
from leadline.weights import formats
from leadline.weights.checkpoint import Checkpoint
from leadline.weights.load import CheckpointSource
from tests.replay.harness import (
    Answer,
    Service,
    assert_same,
    bounded,
    exact,
    stepper_of,
    tiny_model,
    tokens_of,
)
from tests.steps import Sequence, Stepper, make_stepper

GOLDEN = Path(__file__).parent / "golden"
DTYPES = [torch.bfloat16, torch.float32, torch.float64]
EXACT = functools.partial(torch.testing.assert_close, rtol=0, atol=1e-12)


def prompt(length: int) -> list[int]:
    return torch.randint(3, 500, (length,)).tolist()


# E1. Scale bytes copied as numbers.

E1_WEIGHTS = {
    WeightFormat.FP8_BLOCK32: "layers.0.attn.wq_a",
    WeightFormat.MXFP4: "layers.0.ffn.experts.1.w1",
    WeightFormat.FP8_ROW32: "layers.1.engram.embed",
}
every_class = pytest.mark.parametrize("format", E1_WEIGHTS)


@pytest.fixture(scope="module")
def far_scales(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose scales are far from 1: bytes 97 to 130, that is 2^-30 to 2^3."""
    folder = tmp_path_factory.mktemp("far") / "checkpoint"
    write_random_checkpoint(folder, TINY_WINDOW128)
    rewrite_scales(folder, lambda scale: torch.randint(97, 131, scale.shape))
    return folder


def rewrite_scales(
    folder: Path, make: Callable[[Tensor], Tensor], *, names: str = r"\.scale$"
) -> None:
    """Replace the scale tensors whose name matches; integers are UE8M0 bytes."""
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if re.search(names, name):
            made = make(tensor)
            is_bytes = not made.is_floating_point()
            tensors[name] = made.to(torch.uint8).view(torch.float8_e8m0fnu) if is_bytes else made
    save_file(tensors, folder / "model.safetensors")


def stored(folder: Path, name: str) -> tuple[Tensor, Tensor]:
    tensors = load_file(folder / "model.safetensors")
    codes, scales = tensors[f"{name}.weight"], tensors[f"{name}.scale"]
    return codes.view(torch.uint8), scales.view(torch.uint8)


def by_hand(format: WeightFormat, codes: Tensor, scales: Tensor) -> Tensor:
    """Float64 values of a matrix, from the definition of its format."""
    if format is WeightFormat.MXFP4:
        grid = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
        grid = torch.cat((grid, -grid))
        values = torch.stack((grid[codes.int() & 15], grid[codes.int() >> 4]), dim=-1).flatten(1)
    else:
        values = codes.view(torch.float8_e4m3fn).double()
    powers = torch.exp2(scales.double() - 127).repeat_interleave(32, dim=1)
    if format is WeightFormat.FP8_BLOCK32:
        powers = powers.repeat_interleave(32, dim=0)
    return values * powers[: values.shape[0], : values.shape[1]]


def load(folder: Path, format: WeightFormat, dtype: torch.dtype) -> Tensor:
    source = CheckpointSource(Checkpoint(folder), TINY_WINDOW128, show_progress=False)
    name = E1_WEIGHTS[format]
    match format:
        case WeightFormat.MXFP4:
            return source.experts("layers.0.ffn.experts", "w1", slice(0, 3), dtype).dense[1]
        case WeightFormat.FP8_ROW32:
            table = source.engram_table(name, dtype)
            return table.gather(torch.arange(table.num_rows))
        case _:
            return source.linear(name, dtype).dense


@every_class
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_E1_scale_bytes_are_never_numbers(
    far_scales: Path, format: WeightFormat, dtype: torch.dtype
) -> None:
    loaded = load(far_scales, format, dtype)
    assert loaded.dtype is dtype
    wanted = by_hand(format, *stored(far_scales, E1_WEIGHTS[format]))
    assert torch.equal(loaded.double(), wanted)  # exact even in bf16


@every_class
def test_E1_requantised_weights_have_their_values(far_scales: Path, format: WeightFormat) -> None:
    loaded = load(far_scales, format, torch.float32)
    again = formats.decode(format, *formats.encode(format, loaded))
    # A block under the encoder's floor on its largest value, 1e-4, keeps what FP8 can hold there.
    torch.testing.assert_close(again, loaded, rtol=0, atol=1e-4 * 2**-9)


@every_class
def test_E1_raw_bytes_stay_raw(far_scales: Path, format: WeightFormat) -> None:
    """What the reader hands out is the bytes of the file, whatever type its header names."""
    name = E1_WEIGHTS[format]
    _, scales = stored(far_scales, name)
    raw = torch.from_numpy(Checkpoint(far_scales).array(f"{name}.scale").copy())
    assert raw.dtype is torch.uint8
    assert torch.equal(raw, scales)


def test_E1_scales_copied_by_value_are_refused(tmp_path: Path) -> None:
    """A float tensor that holds 120.0 where the byte 120 was."""
    folder = tmp_path / "checkpoint"
    write_random_checkpoint(folder, TINY_WINDOW128)
    name = "layers.3.attn.wkv.scale"
    rewrite_scales(folder, lambda s: s.view(torch.uint8).float(), names=re.escape(name))
    with pytest.raises(CheckpointError, match=re.escape(name)):
        CheckpointSource(Checkpoint(folder), TINY_WINDOW128, show_progress=False)


@pytest.mark.parametrize("byte", [10, 200], ids=["2^-117", "2^73"])
@pytest.mark.parametrize("format", [WeightFormat.FP8_BLOCK32, WeightFormat.MXFP4])
def test_E1_implausible_magnitudes_name_the_tensor(
    tmp_path: Path, format: WeightFormat, byte: int
) -> None:
    folder = tmp_path / "checkpoint"
    write_random_checkpoint(folder, TINY_WINDOW128)
    name = E1_WEIGHTS[format]
    rewrite_scales(folder, lambda s: torch.full(s.shape, byte), names=re.escape(f"{name}.scale"))
    with pytest.raises(CheckpointError, match=re.escape(f"{name}.weight")):
        load(folder, format, torch.float32)


# E2. A prompt that spans two forward passes.

PLACES = {
    "after_the_first_token": [1],
    "inside_a_compression_group": [201],
    "between_compression_groups": [200],
    "before_a_page_border": [255],
    "at_a_page_border": [256],
    "inside_the_first_group_of_a_page": [257],
    "at_the_window": [128],
    "one_before_the_end": [299],
    "three_single_rows": [256, 257, 258],
    "everywhere": [1, 2, 127, 129, 200, 255, 257, 298, 299],
}


def feed_in_parts(stepper: Stepper, tokens: list[int], cuts: list[int]) -> Tensor:
    """Steps that end at the cuts, each with a row of another request in front."""
    sequence, neighbour = stepper.start(tokens), stepper.start(prompt(len(cuts) + 1))
    parts = []
    for end in (*cuts, len(tokens)):
        parts.append(stepper.step([(neighbour, 1), (sequence, end - sequence.fed)])[1])
    return torch.cat(parts)


@pytest.fixture(scope="module")
def unsplit() -> tuple[Stepper, list[int], Tensor]:
    """A float64 model, 300 tokens, and their logits out of a single step."""
    torch.manual_seed(2)
    stepper = make_stepper(GOLDEN / "v41-reference", dtype=torch.float64, num_slots=32)
    tokens = prompt(300)
    return stepper, tokens, stepper.feed(stepper.start(tokens))


@pytest.mark.parametrize("place", PLACES)
def test_E2_any_split_gives_the_result_of_none(
    unsplit: tuple[Stepper, list[int], Tensor], place: str
) -> None:
    stepper, tokens, whole = unsplit
    EXACT(feed_in_parts(stepper, tokens, PLACES[place]), whole)


@pytest.mark.slow
@pytest.mark.parametrize("checkpoint", ["v41-tiny", "v41-reference"])
def test_E2_prompt_of_1800_tokens(checkpoint: str) -> None:
    """As reported: two passes. Then page borders, open groups and one row before the end."""
    tokens = prompt(1800)
    stepper = make_stepper(GOLDEN / checkpoint, dtype=torch.float64)
    whole = stepper.feed(stepper.start(tokens))
    EXACT(feed_in_parts(stepper, tokens, [1024]), whole)
    EXACT(feed_in_parts(stepper, tokens, [255, 257, 512, 1001, 1536, 1799]), whole)


# E3. NaN scores become wild indices.

E3_ROWS = {
    "nan": [math.nan] * 12,
    "some_nan": [math.nan, 1.0, math.nan, 2.0] * 3,
    "plus_inf": [math.inf] * 12,
    "minus_inf": [-math.inf] * 12,
    "mixed": [math.inf, -math.inf, math.nan, 0.0] * 3,
    "all_equal": [0.0] * 12,
    "fewer_valid_than_k": [1.0, 2.0] + [-math.inf] * 10,
    "one_valid": [-math.inf] * 11 + [-3.0],
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("kind", E3_ROWS)
def test_E3_chosen_entries_are_valid_or_minus_one(kind: str, dtype: torch.dtype) -> None:
    scores = torch.tensor([E3_ROWS[kind]], dtype=dtype)
    valid = {i for i, s in enumerate(E3_ROWS[kind]) if s > -math.inf}
    (chosen,) = ops.select_top_k(scores, 8).tolist()
    entries = [i for i in chosen if i != -1]
    assert chosen == entries + [-1] * (8 - len(entries))
    assert entries == sorted(set(entries) & valid)
    assert len(entries) == min(8, len(valid))


@pytest.mark.parametrize("kind", E3_ROWS)
@pytest.mark.parametrize("visible", [0, 1, 12])
def test_E3_candidate_blocks_hold_a_valid_or_the_newest_entry(kind: str, visible: int) -> None:
    scores = torch.tensor([E3_ROWS[kind]])
    scores[:, visible:] = -math.inf
    (blocks,) = ops.select_candidate_blocks(
        scores, torch.tensor([visible]), block_size=4, topk_blocks=2
    ).tolist()
    kept = [block for block in blocks if block >= 0]
    assert blocks == sorted(set(kept)) + [-1] * (2 - len(kept))
    for block in kept:
        part = scores[0, 4 * block : 4 * block + 4].tolist()
        assert any(s > -math.inf for s in part) or block == (visible - 1) // 4
    assert len(kept) <= (2 if visible else 0)


def poison(field: RecordField) -> None:
    """Bytes 255: NaN in every record (an e4m3 or UE8M0 scale, an e4m3 code, a plain value)."""
    for tensor in (field.values, field.scales):
        if tensor is not None:
            tensor.view(torch.uint8).fill_(0xFF)


@pytest.mark.parametrize(
    ("kv_cache_dtype", "dtype"),
    [
        ("auto", torch.bfloat16),
        ("auto", torch.float64),
        ("fp8", torch.bfloat16),
        ("bfloat16", torch.float32),
    ],
    ids=str,
)
def test_E3_memory_that_nobody_wrote_reaches_no_output(
    kv_cache_dtype: str, dtype: torch.dtype
) -> None:
    """NaN in every free page, slot and ring row, the null page and the padding slot included."""
    long, short = prompt(300), prompt(3)

    def run(*, poisoned: bool) -> list[Tensor]:
        stepper = make_stepper(
            GOLDEN / "v41-reference", dtype=dtype, kv_cache_dtype=kv_cache_dtype, num_pages=8
        )
        pool = stepper.pool
        if poisoned:
            for field in (*pool.kv.values(), *pool.index.values(), *pool.window):
                poison(field)
            for ring in pool.open_groups.values():
                ring.fill_(math.nan)
        one, other = stepper.start(long), stepper.start(short)
        steps: list[list[tuple[Sequence, int]]] = [
            [(other, 1), (one, 259)],  # a row that sees no entry, a chunk over the ring's end
            [(one, 40), (other, 1)],
            [(one, 1), (other, 1)],
        ]
        return [logits for parts in steps for logits in stepper.step(parts)]

    for got, wanted in zip(run(poisoned=True), run(poisoned=False), strict=True):
        assert got.isfinite().all()
        assert torch.equal(got, wanted)


@pytest.fixture
def broken_key() -> tuple[Stepper, Sequence]:
    """A decode row that comes upon one NaN index key of its own."""
    stepper = make_stepper(GOLDEN / "v41-reference", dtype=torch.bfloat16)
    sequence = stepper.start(prompt(100))
    stepper.step([(sequence, 99)])
    scales = stepper.pool.index[4].scales
    assert scales is not None
    scales[sequence.pages[0], 7] = 0xFF
    return stepper, sequence


def test_E3_a_nan_score_is_not_selected(broken_key: tuple[Stepper, Sequence]) -> None:
    stepper, sequence = broken_key
    assert stepper.step([(sequence, 1)])[0].isfinite().all()


def test_E3_the_switch_names_op_layer_and_row(
    broken_key: tuple[Stepper, Sequence], monkeypatch: pytest.MonkeyPatch
) -> None:
    stepper, sequence = broken_key
    monkeypatch.setattr(debug.switch, "enabled", True)
    neighbour = stepper.start(prompt(5))
    with pytest.raises(NonFiniteError) as caught:
        stepper.step([(neighbour, 5), (sequence, 1)])
    error = caught.value
    assert (error.op, error.layer, error.row) == ("index_logits", 4, 5)


# E4. Engram history at a split.


@pytest.mark.parametrize("offset", range(-3, 4))
@pytest.mark.parametrize("image", [False, True], ids=["text", "image_before_the_border"])
def test_E4_rows_depend_on_the_requests_own_history(offset: int, image: bool) -> None:
    """A split around position 256, another request and padding rows in front of the second part."""
    stepper = make_stepper(GOLDEN / "v41-tiny")
    assert stepper.model.prefetch is not None
    hashing = stepper.model.prefetch.hash
    tokens, border = prompt(270), 256
    if image:
        tokens[border - 5 : border - 1] = [stepper.config.image_token_id] * 4
    whole, live = hashing.rows(stepper.batch([(stepper.start(tokens), 270)]))
    other, padding, split = (stepper.start(t) for t in (prompt(40), [0] * 8, tokens))
    cut = border + offset
    first, first_live = hashing.rows(stepper.batch([(other, 11), (split, cut)]))
    second, second_live = hashing.rows(
        stepper.batch([(other, 2), (padding, 3), (split, 270 - cut)])
    )
    assert torch.equal(torch.cat((first[11:], second[5:])), whole)
    assert torch.equal(torch.cat((first_live[11:], second_live[5:])), live)


@pytest.mark.parametrize("chunk", [1, 2, 3])
def test_E4_chunks_shorter_than_an_ngram(chunk: int) -> None:
    stepper = make_stepper(GOLDEN / "v41-tiny")
    assert stepper.model.prefetch is not None
    hashing = stepper.model.prefetch.hash
    tokens = prompt(12)
    whole, _ = hashing.rows(stepper.batch([(stepper.start(tokens), 12)]))
    sequence = stepper.start(tokens)
    parts = [hashing.rows(stepper.batch([(sequence, chunk)]))[0] for _ in range(12 // chunk)]
    assert torch.equal(torch.cat(parts), whole)


# E5. Overflow blamed on the wrong layer.


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("layer", [0, 1, 4, 6], ids=["window", "engram", "cut", "reindex"])
def test_E5_streams_scaled_by_1e4_at_one_layer_stay_finite(
    layer: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No op of any layer overflows: the switch would name the first that does."""
    monkeypatch.setattr(debug.switch, "enabled", True)
    stepper = make_stepper(GOLDEN / "v41-reference", dtype=dtype)
    block = stepper.model.blocks[layer]
    begin = block.begin

    def scaled(streams: Streams, *rest: object) -> object:
        return begin(Streams(streams.x * 1e4, streams.carry), *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(block, "begin", scaled)
    assert stepper.feed(stepper.start(prompt(140)), 90).isfinite().all()


@pytest.mark.parametrize("layer", [0, 3, 4, 6])
@pytest.mark.parametrize("op", ["linear", "shared_expert"])
def test_E5_the_switch_points_at_the_producer(
    layer: int, op: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Finite but huge weights of one layer: their product is named, no victim above it."""
    stepper = make_stepper(GOLDEN / "v41-reference")
    block = stepper.model.blocks[layer]
    weight = {"linear": block.attn.wq_b, "shared_expert": block.ffn.shared_w2}[op].dense
    weight.mul_(3e38 / weight.abs().max())
    monkeypatch.setattr(debug.switch, "enabled", True)
    with pytest.raises(NonFiniteError, match=f"op {op} in layer {layer} "):
        stepper.feed(stepper.start(prompt(20)))


# E6. Loops only in long chats.

NUM_TURNS = 20


def chat(service: Service, tokens_a_turn: int) -> list[Answer]:
    """Turns of one conversation, each with the whole text so far as its prompt."""
    text, answers = tokens_of(tokens_a_turn, seed=0), []
    for turn in range(1, NUM_TURNS + 1):
        answers += service.ask(text, max_tokens=4)
        text = answers[-1].text + tokens_of(tokens_a_turn, seed=turn)
    assert all(answer.cached > 0 for answer in answers[2:])
    return answers


def deviations(model: DeepseekV41, answers: list[Answer]) -> list[Tensor]:
    """Of each turn: its logits less those of the same text in one prefill ``[n, V]``."""
    text = answers[-1].text
    stepper = stepper_of(model, num_pages=256, step_rows=len(text))
    once = stepper.feed(stepper.start(text)).log_softmax(-1)
    return [a.logprobs - once[len(a.prompt) - 1 : len(a.text) - 1] for a in answers]


E6_MODELS = pytest.mark.parametrize(
    ("window", "tokens_a_turn"), [(8, 9), pytest.param(128, 150, marks=pytest.mark.slow)]
)


@E6_MODELS
def test_E6_twenty_turns_equal_one_prefill_in_exact_mode(window: int, tokens_a_turn: int) -> None:
    model = tiny_model(window)
    for difference in deviations(model, chat(exact(model), tokens_a_turn)):
        EXACT(difference, torch.zeros_like(difference))


@E6_MODELS
def test_E6_the_deviation_of_replay_does_not_grow_over_turns(
    window: int, tokens_a_turn: int
) -> None:
    """Random weights make it large from the first hit on; the turns behind it add nothing."""
    model = tiny_model(window)
    answers = chat(bounded(model), tokens_a_turn)
    sizes = [float(d.square().mean().sqrt()) for d in deviations(model, answers)]
    hits = [size for size, answer in zip(sizes, answers, strict=True) if answer.replayed]
    first, last = hits[:5], hits[-5:]
    assert sum(last) < 2 * sum(first)


# R7. A prefix hit across requests corrupts the answer.

# Just below and above 128, 256, and multiples of the 64 tokens of a page.
R7_SHORT = (127, 129, 255, 257, 600)


def ask_thrice(service: Service, prompts: list[list[int]]) -> list[list[Answer]]:
    """Each prompt three times, other requests in between and beside."""
    rounds = []
    for i in range(3):
        answers = []
        for j, prompt in enumerate(prompts):
            service.ask(tokens_of(40, seed=100 * i + j), max_tokens=2)
            answers += service.ask(prompt, tokens_of(10, seed=j))[:1]
        rounds.append(answers)
    return rounds


def relative_deviation(got: Answer, want: Answer) -> float:
    """Of the first token's logits, by their spread: 1.4 would be two texts without relation."""
    return float((got.rows[0] - want.rows[0]).square().mean().sqrt() / want.rows[0].std())


@functools.cache
def without_prefix_caching() -> list[Answer]:
    service = exact(tiny_model(128), caching=False, page_size=64)
    return service.ask(*(tokens_of(n, seed=n) for n in R7_SHORT))


def test_R7_exact_mode_answers_three_times_as_without_caching() -> None:
    service = exact(tiny_model(128), page_size=64)
    for answers in ask_thrice(service, [tokens_of(n, seed=n) for n in R7_SHORT]):
        for got, want in zip(answers, without_prefix_caching(), strict=True):
            assert_same(got, want)
    assert [answer.cached for answer in answers] == [64, 128, 192, 256, 576]


def test_R7_bounded_replay_stays_near_and_repeats_itself() -> None:
    service = bounded(tiny_model(128), page_size=64)
    cold, second, third = ask_thrice(service, [tokens_of(n, seed=n) for n in R7_SHORT])
    # A hit within the window would be recomputed whole.
    assert [answer.cached for answer in second] == [0, 0, 192, 256, 576]
    for got, again, before, want in zip(second, third, cold, without_prefix_caching(), strict=True):
        assert_same(again, got)
        assert relative_deviation(before, want) < 0.3  # the trim alone
        assert relative_deviation(got, want) < 1.1  # large, for random weights forget nothing


@pytest.mark.slow
@pytest.mark.parametrize("length", [7000, 7424])
def test_R7_prompts_of_7k_to_8k_tokens(length: int) -> None:
    model = make_stepper(TINY_WINDOW128, dtype=torch.float64).model
    prompt = tokens_of(length, seed=length)
    [want] = exact(model, caching=False, page_size=256).ask(prompt)
    for answers in ask_thrice(exact(model, page_size=256), [prompt]):
        assert_same(answers[0], want)
    _, [second], [third] = ask_thrice(bounded(model, page_size=256), [prompt])
    assert second.cached == min(length // 256 * 256, length - 1)
    assert_same(third, second)
