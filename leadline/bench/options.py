"""What a benchmark is asked to run: its flags."""

from __future__ import annotations

from dataclasses import dataclass, fields

from leadline.core.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    """The requests and how often they run.

    Attributes:
        input_len: tokens of a prompt; prompts of a file are cut to it.
        output_len: tokens of every answer, end tokens or not.
        batch_size: requests at once, of latency.
        num_prompts: requests in all, of throughput; the scheduler's settings say how many run.
        dataset: prompts from a file instead of random tokens: JSON lines with "prompt" or "text",
            or a text that is cut into pieces.
        runs: how often it is measured.
        warmup: how often it runs before.
        bench_seed: of random tokens.
        json: file for all numbers.
    """

    input_len: int = 1024
    output_len: int = 128
    batch_size: int = 1
    num_prompts: int = 64
    dataset: str | None = None
    runs: int = 5
    warmup: int = 1
    bench_seed: int = 0
    json: str | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            least = 0 if field.name in ("warmup", "bench_seed") else 1
            if isinstance(value, int) and value < least:
                raise ConfigError(f"{field.name} is {value}; it must be at least {least}")
