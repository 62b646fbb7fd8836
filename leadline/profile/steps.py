"""What is profiled: the same work again and again, in an engine that does nothing else."""

from __future__ import annotations

import itertools
from typing import Protocol

from leadline.bench.measure import step
from leadline.bench.workload import random_prompts
from leadline.core.errors import ConfigError
from leadline.core.request import EngineRequest, SamplingParams
from leadline.engine.engine import Engine
from leadline.profile.synthetic import start_decoding


class Steps(Protocol):
    """Implemented by ``DecodeSteps`` and ``Prompts``.

    Attributes:
        unit: what ``run`` counts.
    """

    unit: str

    def run(self, count: int) -> None:
        """Do it so many times."""
        ...


class DecodeSteps:
    """Steps with one row of every request.

    Args:
        engine: idle.
        batch: requests.
        context: tokens of each at the start.
        seed: of their texts.
    """

    unit = "step"

    def __init__(self, engine: Engine, batch: int, context: int, seed: int) -> None:
        self._engine = engine
        start_decoding(engine, batch=batch, context=context, seed=seed)

    def run(self, count: int) -> None:
        """See ``Steps``.

        Raises:
            ConfigError: a request came to the end of the model's positions.
            LeadlineError: one failed.
        """
        for _ in range(count):
            if any(output.finish_reason is not None for output in step(self._engine)):
                raise ConfigError(
                    f"requests reached max_model_len {self._engine.limits.max_model_len} while "
                    "they were profiled; raise it, or lower context or steps"
                )


class Prompts:
    """Prompts that no cache knows, one by one, each with the first token of its answer.

    Args:
        engine: idle.
        length: tokens of each.
        seed: of their texts.
    """

    unit = "prompt"

    def __init__(self, engine: Engine, length: int, seed: int) -> None:
        self._engine, self._length, self._seed = engine, length, seed
        self._numbers = itertools.count()

    def run(self, count: int) -> None:
        """See ``Steps``.

        Raises:
            BadRequest: a prompt is longer than the model takes.
            LeadlineError: one failed.
        """
        vocab_size = self._engine.limits.vocab_size
        sampling = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
        for number in itertools.islice(self._numbers, count):
            [text] = random_prompts(1, self._length, vocab_size, f"{self._seed} {number}")
            self._engine.add(EngineRequest(f"prompt {number}", tuple(text), sampling))
            while self._engine.has_work:
                step(self._engine)
