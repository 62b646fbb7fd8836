"""One run: all requests at once through an engine, and when their tokens came."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from leadline.core.errors import LeadlineError
from leadline.core.request import EngineRequest, SamplingParams, TokenOutput
from leadline.engine.engine import Engine


def step(engine: Engine) -> list[TokenOutput]:
    """One step of an engine whose requests must not fail.

    Raises:
        LeadlineError: one did.
    """
    outputs = engine.step()
    for output in outputs:
        if output.error is not None:
            raise LeadlineError(f"request {output.request_id}: {output.error}")
    return outputs


@dataclass(frozen=True, slots=True)
class Run:
    """Seconds of one run.

    Attributes:
        ttft: of each request, from the start of the run to its first token.
        gaps: between the tokens of a request, all of them.
        seconds: from the start to the last token.
        input_tokens, output_tokens: of all requests.
    """

    ttft: tuple[float, ...]
    gaps: tuple[float, ...]
    seconds: float
    input_tokens: int
    output_tokens: int


def run(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    output_len: int,
    clock: Callable[[], float] = time.perf_counter,
) -> Run:
    """Let an idle engine answer all prompts, from an empty prefix cache.

    Raises:
        BadRequest: a prompt and its answer are longer than the model takes.
        LeadlineError: a request failed.
    """
    engine.reset_prefix_cache()
    sampling = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True)
    start = clock()
    for number, prompt in enumerate(prompts):
        engine.add(EngineRequest(str(number), tuple(prompt), sampling))
    came: dict[str, list[float]] = {str(number): [] for number in range(len(prompts))}
    while engine.has_work:
        outputs = step(engine)
        now = clock()
        for output in outputs:
            came[output.request_id] += [now] * len(output.token_ids)
    return Run(
        ttft=tuple(times[0] - start for times in came.values()),
        gaps=tuple(b - a for times in came.values() for a, b in pairwise(times)),
        seconds=max(times[-1] for times in came.values()) - start,
        input_tokens=sum(map(len, prompts)),
        output_tokens=sum(map(len, came.values())),
    )
