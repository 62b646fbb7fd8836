"""Long contexts without their prefill: pages of noise that the prefix cache takes for prompts.

Requests with such prompts replay their last rows, which fills their windows, and decode. Every
request has pages of its own, as separate agents have; entries and keys are random, so that rows
select all over their contexts.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import torch

from leadline.core.request import Request, SamplingParams
from leadline.engine.engine import Engine
from leadline.kernels.packed import RecordField
from leadline.kernels.records import Record
from leadline.models.batch import CacheFields

# Scales of random codes, as bytes from .. to below: values of about 1, as normalised ones are.
_SCALES = {
    Record.FP8_32: (124, 127),  # UE8M0: 2^-3 to 2^-1
    Record.FP4_16: (0x28, 0x38),  # E4M3: 0.25 to 1
    Record.FP4_32: (124, 127),
}


def fill_with_noise(cache: CacheFields, seed: int = 0) -> None:
    """Write random entries and index keys to all pages."""
    for fields in (cache.kv, cache.index):
        for layer, field in fields.items():
            _fill(field, seed + layer)


def _fill(field: RecordField, seed: int) -> None:
    values, scales = field.values, field.scales
    draws = torch.Generator(values.device).manual_seed(seed)
    if scales is None:
        values.normal_(generator=draws)
        return
    values.random_(0, 256, generator=draws)
    if field.record is Record.FP8_32:
        values &= 0xBF  # without the exponent's highest bit there is no NaN
    scales.random_(*_SCALES[field.record], generator=draws)


def prompts(count: int, length: int, vocab_size: int, seed: int = 0) -> Iterator[tuple[int, ...]]:
    """So many prompts, one after the other: 128 of 100,000 tokens are large as Python's numbers."""
    for number in range(count):
        draw = np.random.default_rng((seed, number))
        yield tuple(draw.integers(64, vocab_size, size=length).tolist())


def remember(engine: Engine, texts: Iterable[Sequence[int]]) -> None:
    """Let an engine's prefix cache find the full pages of these prompts, whatever is in them.

    Raises:
        AssertionError: there are too few pages for all of them.
    """
    cache = engine.cache  # no request by itself leaves pages that were never computed
    wanted = cache.num_cached_pages
    for text in texts:
        request = Request("context", array("i", text), len(text), SamplingParams(), arrival=0.0)
        cache.admit(request, cache.lookup(request, 0))
        cache.grow(request, len(text))
        cache.commit(request, len(text))
        cache.release(request)
        wanted += len(text) // cache.page_size
    assert cache.num_cached_pages == wanted, f"contexts take {wanted} pages of {cache.num_pages}"
