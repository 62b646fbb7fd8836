"""Decode and prefill of the 22 M model on a CPU, beside plain torch ops and a plain forward.

Ours is the engine: paged packed cache, continuous batching, one row per request and step, and the
fastest kernels that are installed. Eager is the same engine over the reference ops. Plain is the
same model object over the reference ops and without a cache: for one new token of every sequence it
runs all rows of all sequences. All are greedy; runs of the three alternate.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from common import (
    PRESET,
    Decoding,
    argument_parser,
    environment,
    print_table,
    random_prompts,
    summary,
    write_json,
)
from roofline import StepWeights, measure_machine, tokens_per_second
from torch import Tensor

from leadline.cache.layout import cache_layout
from leadline.cache.manager import CacheManager
from leadline.cache.pool import CachePool
from leadline.cache.replay import ReplayPolicy
from leadline.cache.sizing import CacheSize
from leadline.config.engine import SchedulerConfig
from leadline.config.presets import preset
from leadline.core.request import Request, SamplingParams
from leadline.engine.batch_builder import BatchBuilder
from leadline.engine.engine import Engine
from leadline.engine.plan import RowGroup, RowKind
from leadline.engine.sampler import Sampler
from leadline.kernels.registry import REFERENCE, choose
from leadline.models.batch import forward_sampled
from leadline.models.common.parameters import Parameters
from leadline.models.deepseek_v41.model import DeepseekV41
from leadline.parallel.placement import Placement
from leadline.weights.load import DummySource


@dataclass(frozen=True)
class Sizes:
    """What is measured.

    Attributes:
        warm_up: decode steps before the clock starts.
        new_tokens: decode steps of one run.
        runs: of each way in turn. The plain way computes one token of every sequence, the middle
            one of those steps: each costs it a whole forward.
    """

    concurrency: tuple[int, ...] = (1, 8, 32)
    prompts: tuple[int, ...] = (64, 512)
    prefill: int = 2048
    warm_up: int = 4
    new_tokens: int = 32
    runs: int = 5


QUICK = Sizes(concurrency=(1, 2), prompts=(16,), prefill=64, warm_up=1, new_tokens=2, runs=1)


class Plain:
    """The model without a cache: every call recomputes whole sequences.

    Its slots and pages come from the engine's own cache, which is empty between two runs.
    """

    def __init__(self, model: DeepseekV41, cache: CacheManager, builder: BatchBuilder) -> None:
        self._model, self._cache, self._builder = model, cache, builder

    @torch.inference_mode()
    def next_logits(self, sequences: Sequence[Sequence[int]]) -> Tensor:
        """Logits ``[sequences, V]`` behind the last token of each sequence."""
        groups = []
        for number, tokens in enumerate(sequences):
            request = Request(
                str(number), array("i", tokens), len(tokens), SamplingParams(), arrival=0.0
            )
            self._cache.take_slot(request)
            self._cache.grow(request, len(tokens))
            groups.append(
                RowGroup(request, RowKind.PREFILL, 0, len(tokens), len(tokens), num_sampled=1)
            )
        batch = self._builder.build(groups)
        logits = self._model.logits(forward_sampled(self._model, batch))
        for group in groups:
            self._cache.release(group.request)
        return logits


class Agreement:
    """Whether the tokens of the engine are the best ones of the plain forward.

    The two add in another order, so a rounding to FP8 or FP4 may fall to the other side, which can
    move a logit far: now and then a token differs. Without quantisers that would be a fault.

    Attributes:
        largest_gap: the most that a token of ours lies below the best one of plain, in logits.
    """

    def __init__(self) -> None:
        self.tokens = self.same = 0
        self.largest_gap = 0.0

    def add(self, logits: Tensor, tokens: Sequence[int]) -> None:
        """Compare one token per row of ``logits [rows, V]``."""
        gaps = logits.amax(-1) - logits[range(len(tokens)), list(tokens)]
        self.tokens += len(tokens)
        self.same += int((gaps == 0).sum())
        self.largest_gap = max(self.largest_gap, float(gaps.max()))


class Bench:
    """All ways around one model."""

    def __init__(self, sizes: Sizes, *, quantized: bool) -> None:
        self.sizes, self.quantized = sizes, quantized
        self.config = config = preset(PRESET)
        source, cpu = DummySource(config), torch.device("cpu")
        params = Parameters(source, torch.float32, cpu, Placement(), quantize_activations=quantized)
        model = DeepseekV41(config, params, token_map=None)
        source.finish()
        num_seqs = max(sizes.concurrency)
        layout = cache_layout(config, kv_cache_dtype="auto" if quantized else "float32")
        size = CacheSize(num_pages=1024, num_slots=num_seqs + 1, page_size=layout.page_size)
        pool = CachePool(
            layout,
            num_pages=size.num_pages,
            num_slots=size.num_slots,
            # A plain forward is over all rows of all sequences.
            step_rows=max(
                sizes.prefill,
                num_seqs * (max(sizes.prompts) + sizes.warm_up + sizes.new_tokens + 1),
            ),
        )
        model.bind_cache(pool)
        # Every row runs every layer, as in the plain forward.
        window = config.sliding_window
        policy = ReplayPolicy(lower=False, upper=False, length=window, window=window)
        cache, num_history = CacheManager(size), config.engram_max_ngram_size - 1
        self.plain = Plain(model, cache, BatchBuilder(num_history=num_history, device=cpu))
        self.kernels = choose("auto", cpu, torch.float32)
        self.engine, self.eager = (
            Engine(
                model,
                Sampler(config.eos_token_id),
                cache,
                pool.copy_slots,
                policy,
                SchedulerConfig(max_num_seqs=num_seqs),
                vocab_size=config.vocab_size,
                eos_token_id=config.eos_token_id,
                max_model_len=config.max_position_embeddings,
                num_history=num_history,
                kernels=kernels,
            )
            for kernels in (self.kernels, REFERENCE)
        )
        self.weights, self.machine = StepWeights.of(model), measure_machine()

    def decode(self, concurrency: int, prompt_tokens: int) -> dict[str, Any]:
        """Tokens/s of ``concurrency`` requests behind prompts of ``prompt_tokens``."""
        sizes, agreement = self.sizes, Agreement()
        prompts = random_prompts(concurrency, prompt_tokens, self.config.vocab_size)
        middle = sizes.warm_up + sizes.new_tokens // 2
        ours, eager, plain = [], [], []
        for _ in range(sizes.runs):
            speed, _ = self._decode_run(self.eager, prompts)
            eager.append(speed)
            speed, answers = self._decode_run(self.engine, prompts)
            ours.append(speed)
            known = [p + a[:middle] for p, a in zip(prompts, answers, strict=True)]
            start = time.perf_counter()
            logits = self.plain.next_logits(known)
            plain.append(concurrency / (time.perf_counter() - start))
            agreement.add(logits, [answer[middle] for answer in answers])
        roof = tokens_per_second(self.machine, self.weights, concurrency)
        case = _case("decode", concurrency, prompt_tokens, ours, eager, plain, agreement)
        return {**case, "roof": roof}

    def _decode_run(
        self, engine: Engine, prompts: list[list[int]]
    ) -> tuple[float, list[list[int]]]:
        """Tokens/s behind the warm-up, and every token of each prompt's answer."""
        sizes = self.sizes
        decoding = Decoding(engine, prompts, max_tokens=10 * (sizes.warm_up + sizes.new_tokens))
        for _ in range(sizes.warm_up):
            decoding.step()
        start = time.perf_counter()
        for _ in range(sizes.new_tokens):
            decoding.step()
        seconds = time.perf_counter() - start
        decoding.stop()
        return len(prompts) * sizes.new_tokens / seconds, list(decoding.tokens.values())

    def prefill(self) -> dict[str, Any]:
        """Prompt tokens/s of one request, up to its first token."""
        agreement, length = Agreement(), self.sizes.prefill
        prompts = random_prompts(1, length, self.config.vocab_size)
        ours, eager, plain = [], [], []
        for _ in range(self.sizes.runs):
            for engine, speeds in ((self.eager, eager), (self.engine, ours)):
                start = time.perf_counter()
                decoding = Decoding(engine, prompts, max_tokens=8)
                speeds.append(length / (time.perf_counter() - start))
                decoding.stop()
            start = time.perf_counter()
            logits = self.plain.next_logits(prompts)
            plain.append(length / (time.perf_counter() - start))
            agreement.add(logits, [answer[0] for answer in decoding.tokens.values()])
        return _case("prefill", 1, length, ours, eager, plain, agreement)


def _case(
    name: str,
    concurrency: int,
    prompt_tokens: int,
    ours: list[float],
    eager: list[float],
    plain: list[float],
    agreement: Agreement,
) -> dict[str, Any]:
    return {
        "case": name,
        "concurrency": concurrency,
        "prompt_tokens": prompt_tokens,
        "unit": "tokens/s",
        "ours": summary(ours),
        "eager": summary(eager),
        "plain": summary(plain),
        "over_eager": summary([a / b for a, b in zip(ours, eager, strict=True)]),
        "ratio": summary([a / b for a, b in zip(ours, plain, strict=True)]),
        "same_tokens": agreement.same,
        "compared_tokens": agreement.tokens,
        "largest_gap": agreement.largest_gap,
    }


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument(
        "--unquantized",
        action="store_true",
        help="plain float32 caches and activations: a token that differs is then a fault",
    )
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    bench = Bench(QUICK if args.quick else Sizes(), quantized=not args.unquantized)
    record = environment()
    cases = [
        bench.decode(concurrency, prompt)
        for prompt in bench.sizes.prompts
        for concurrency in bench.sizes.concurrency
    ]
    cases.append(bench.prefill())
    print(f"{PRESET} on {record['device']}, {record['threads']} thread(s), tokens/s\n")
    print_table(
        (
            "case",
            "concurrency",
            "prompt",
            "ours",
            "roof",
            "eager",
            "ours/eager",
            "plain",
            "ours/plain",
            "same",
            "gap",
        ),
        [
            (
                case["case"],
                str(case["concurrency"]),
                str(case["prompt_tokens"]),
                f"{case['ours']['median']:.1f}",
                f"{case['roof']:.0f}" if "roof" in case else "",
                f"{case['eager']['median']:.1f}",
                f"{case['over_eager']['median']:.2f}x",
                f"{case['plain']['median']:.1f}",
                f"{case['ratio']['median']:.2f}x",
                f"{case['same_tokens']}/{case['compared_tokens']}",
                f"{case['largest_gap']:.1e}",
            )
            for case in cases
        ],
    )
    write_json(
        args.json,
        {
            **record,
            "quantized": bench.quantized,
            "kernels": bench.kernels.backend_of,
            "machine": asdict(bench.machine),
            "step_weights": asdict(bench.weights),
            "sizes": asdict(bench.sizes),
            "cases": cases,
        },
    )


if __name__ == "__main__":
    main()
