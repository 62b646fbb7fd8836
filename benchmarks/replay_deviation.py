"""How far bounded replay moves logits: a distribution over prompts, for each half and for both.

Every prompt is answered in exact mode and then, behind a prefix hit, with one window of replay in
the lower layers, with the trim of the upper layers, and with both. The answer's tokens are those
of exact mode in every arm, so that logits of the same text are compared. In float64: what is left
is the approximation's own, not that of roundings. Prompts are random tokens, and v41-tiny has
random weights, which forget less than trained ones: the numbers bound a mechanism. What it costs
answers is for ``leadline eval`` to say.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from common import argument_parser, environment, print_table, write_json
from tokenizers import Tokenizer
from torch import Tensor

from leadline.cache.layout import cache_layout
from leadline.cache.manager import CacheManager
from leadline.cache.pool import CachePool
from leadline.cache.replay import ReplayPolicy
from leadline.cache.sizing import CacheSize
from leadline.config.engine import SchedulerConfig
from leadline.config.model import load_model_config
from leadline.core.request import EngineRequest, Request, SamplingParams
from leadline.engine.engine import Engine
from leadline.engine.sampler import Draw, SampledToken, Sampler
from leadline.models.common.parameters import Parameters
from leadline.models.deepseek_v41.engram import compressed_token_map
from leadline.models.deepseek_v41.model import DeepseekV41
from leadline.parallel.placement import Placement
from leadline.weights.checkpoint import Checkpoint
from leadline.weights.load import CheckpointSource

ROOT = Path(__file__).parents[1]
MODELS = {
    "v41-tiny": ROOT / "tests" / "golden" / "v41-tiny",
    "bundled": ROOT / "leadline" / "data" / "tiny",
}
ARMS = {"lower": (True, False), "upper": (False, True), "both": (True, True)}
BATCH = 8  # prompts that run side by side; they do not change each other's logits
QUANTILES = (0, 10, 25, 50, 75, 90, 100)


@dataclass(frozen=True)
class Sizes:
    """What is measured.

    Attributes:
        num_cached: tokens of each prompt that the cache knows, a page.
        most_new: tokens behind them at most; from 1 on, as many short as long ones.
        new_tokens: of each answer; the first one comes from the prompt's last row.
    """

    models: tuple[str, ...] = tuple(MODELS)
    prompts: int = 200
    num_cached: int = 256
    most_new: int = 128
    new_tokens: int = 3


QUICK = Sizes(models=("v41-tiny",), prompts=2, most_new=8, new_tokens=2)


class Script(Sampler):
    """Writes down the logits of every request, and goes on with the tokens that it is given."""

    def __init__(self, eos_token_id: int) -> None:
        super().__init__(eos_token_id)
        self.tokens: dict[str, list[int]] = {}
        self.logits: defaultdict[str, list[Tensor]] = defaultdict(list)

    def launch(self, logits: Tensor, requests: Sequence[Request]) -> Draw:
        best = super().launch(logits, requests).tokens()
        for i, (row, request) in enumerate(zip(logits, requests, strict=True)):
            self.logits[request.request_id].append(row.clone())
            if script := self.tokens.get(request.request_id):
                best[i] = SampledToken(script[request.num_output_tokens])
        return Draw.known(best, logits.device)


class Bench:
    """Engines of every arm around one model."""

    def __init__(self, folder: Path, sizes: Sizes) -> None:
        self.sizes = sizes
        self.config = load_model_config(folder)
        source = CheckpointSource(Checkpoint(folder), self.config, show_progress=False)
        params = Parameters(source, torch.float64, torch.device("cpu"), Placement())
        token_map = compressed_token_map(Tokenizer.from_file(str(folder / "tokenizer.json")))
        self.model = DeepseekV41(self.config, params, token_map=token_map)
        source.finish()

    def prompts(self) -> list[tuple[int, ...]]:
        """Seeded: the same prompts on every run."""
        draw, sizes = random.Random(0), self.sizes
        prompts = []
        for _ in range(sizes.prompts):
            num_new = round(math.exp(draw.uniform(0, math.log(sizes.most_new))))
            length = sizes.num_cached + num_new
            prompts.append(tuple(draw.randrange(64, self.config.vocab_size) for _ in range(length)))
        return prompts

    def run(
        self,
        prompts: Sequence[tuple[int, ...]],
        *,
        arm: str | None = None,
        script: Sequence[Tensor] | None = None,
    ) -> list[Tensor]:
        """Logits ``[new_tokens, V]`` behind each prompt; without an arm in exact mode and cold.

        Args:
            prompts: all of them run together.
            arm: which halves are bounded, behind a prefix hit.
            script: logits whose best tokens make the answers.
        """
        engine, sampler = self._engine(len(prompts), arm)
        num_cached = self.sizes.num_cached
        if arm is not None:
            for i, prompt in enumerate(prompts):
                _add(engine, f"cold {i}", prompt[: num_cached + 1], 1)
            _run(engine)
        for i, prompt in enumerate(prompts):
            _add(engine, str(i), prompt, self.sizes.new_tokens)
            if script is not None:
                sampler.tokens[str(i)] = script[i].argmax(-1).tolist()
        _run(engine)
        found = engine.stats().counters["prefix_cache_hits"]
        assert found == (num_cached * len(prompts) if arm else 0)
        return [torch.stack(sampler.logits[str(i)]) for i in range(len(prompts))]

    def _engine(self, num_prompts: int, arm: str | None) -> tuple[Engine, Script]:
        lower, upper = ARMS[arm] if arm else (False, False)
        config, layout = self.config, cache_layout(self.config)
        size = CacheSize(
            num_pages=1 + 4 * num_prompts,
            num_slots=1 + num_prompts,
            page_size=layout.page_size,
            num_snapshots=0 if lower else 4 * num_prompts,
        )
        pool = CachePool(
            layout,
            num_pages=size.num_pages,
            num_slots=size.num_slot_rows,
            step_rows=SchedulerConfig().max_num_batched_tokens,
            wide=self.model.wide,
        )
        self.model.bind_cache(pool)
        sampler = Script(config.eos_token_id)
        engine = Engine(
            self.model,
            sampler,
            CacheManager(size, enable_prefix_caching=arm is not None, needs_snapshot=not lower),
            pool.copy_slots,
            ReplayPolicy(
                lower=lower,
                upper=upper,
                length=config.sliding_window,
                window=config.sliding_window,
            ),
            SchedulerConfig(max_num_seqs=num_prompts),
            vocab_size=config.vocab_size,
            eos_token_id=config.eos_token_id,
            max_model_len=config.max_position_embeddings,
            num_history=config.engram_max_ngram_size - 1,
        )
        return engine, sampler


def _add(engine: Engine, name: str, tokens: tuple[int, ...], max_tokens: int) -> None:
    sampling = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    engine.add(EngineRequest(name, tokens, sampling))


def _run(engine: Engine) -> None:
    while engine.has_work:
        engine.step()


def compare(got: Tensor, want: Tensor) -> dict[str, float]:
    """One row of logits beside the exact one; deviations by the exact logits' spread."""
    difference = (got - want).abs() / want.std()
    ours, exact = got.log_softmax(-1), want.log_softmax(-1)
    return {
        "mean": float(difference.mean()),
        "max": float(difference.max()),
        "kl": float((exact.exp() * (exact - ours)).sum()),
        "same_best": float(got.argmax() == want.argmax()),
    }


def distribution(values: Sequence[float]) -> dict[str, float]:
    """Mean and quantiles."""
    sample = torch.tensor(values, dtype=torch.float64)
    levels = torch.tensor(QUANTILES, dtype=torch.float64) / 100
    named = zip(QUANTILES, sample.quantile(levels).tolist(), strict=True)
    return {"mean": float(sample.mean()), **{f"p{q}": value for q, value in named}}


def measure(name: str, sizes: Sizes) -> list[dict[str, Any]]:
    """Cases of one model: each arm, at the first token and at later ones."""
    bench = Bench(MODELS[name], sizes)
    rows = defaultdict[tuple[str, str], list[dict[str, float]]](list)
    prompts = bench.prompts()
    for start in range(0, len(prompts), BATCH):
        batch = prompts[start : start + BATCH]
        exact = bench.run(batch)
        for arm in ARMS:
            got = bench.run(batch, arm=arm, script=exact)
            for ours, want in zip(got, exact, strict=True):
                for i in range(sizes.new_tokens):
                    rows[arm, "decode" if i else "first"].append(compare(ours[i], want[i]))
    return [
        {
            "model": name,
            "arm": arm,
            "tokens": tokens,
            "count": len(found),
            "mean_deviation": distribution([row["mean"] for row in found]),
            "max_deviation": distribution([row["max"] for row in found]),
            "kl": distribution([row["kl"] for row in found]),
            "same_best_percent": 100 * sum(row["same_best"] for row in found) / len(found),
        }
        for (arm, tokens), found in rows.items()
    ]


def main() -> None:
    args = argument_parser(__doc__).parse_args()
    torch.set_num_threads(args.threads)
    sizes = QUICK if args.quick else Sizes()
    record = {**environment(), "preset": list(sizes.models), "dtype": "float64"}
    cases = [case for name in sizes.models for case in measure(name, sizes)]
    print(f"{sizes.prompts} prompts on {record['device']}; deviations in standard deviations\n")
    print_table(
        ("model", "arm", "tokens", "mean", "median", "p90", "max", "KL median", "same best"),
        [
            (
                case["model"],
                case["arm"],
                case["tokens"],
                *(f"{case['mean_deviation'][key]:.3f}" for key in ("mean", "p50", "p90")),
                f"{case['max_deviation']['p100']:.2f}",
                f"{case['kl']['p50']:.3f}",
                f"{case['same_best_percent']:.0f} %",
            )
            for case in cases
        ],
    )
    write_json(args.json, {**record, "sizes": asdict(sizes), "cases": cases})


if __name__ == "__main__":
    main()
