"""Requests with long contexts that nobody had to compute.

The prefix cache is told that it knows a text, and the text's pages get random records. A request
with that text then takes the engine's own way: it hits, feeds the few rows that a hit leaves, and
decodes. Whatever the engine believes of its memory is true, but for what the records say.

    start_decoding(engine, batch=8, context=100_000)
    for _ in range(64):
        engine.step()  # one row of each of the 8

``remember`` alone is for prompts of one's own, which the caller then adds to the engine.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

import torch

from leadline.bench.measure import step
from leadline.bench.workload import random_prompts
from leadline.cache.prefix import num_full_pages
from leadline.core.errors import ConfigError
from leadline.core.request import EngineRequest, Request, SamplingParams, SnapshotKind
from leadline.engine.engine import Engine
from leadline.engine.launch import AnyModel
from leadline.kernels import ops
from leadline.kernels.packed import RecordField

# Rows that are made at once: of official heads, 128 MB in float32.
_ROWS_AT_ONCE = 2**16


def start_decoding(
    engine: Engine, *, batch: int, context: int, max_tokens: int | None = None, seed: int = 0
) -> list[str]:
    """Bring an idle engine to where each step decodes a row of every request.

    Without prefix caching that takes as long as the prompts do.

    Args:
        engine: of a model with weights.
        batch: greedy requests, whose texts share nothing.
        context: tokens of each prompt.
        max_tokens: of each answer, end tokens or not; at least the first is drawn here, and more
            of those that begin first. None is what ``max_model_len`` leaves.
        seed: of texts and records.

    Returns:
        The requests' ids.

    Raises:
        ConfigError: so many cannot run side by side.
        BadRequest: a prompt and its answer are longer than the model takes.
        LeadlineError: a request failed.
    """
    if max_tokens is None:
        max_tokens = max(1, engine.limits.max_model_len - context)
    _check_room(engine, batch, context + min(max_tokens, engine.cache.page_size))
    prompts = random_prompts(batch, context, engine.limits.vocab_size, str(seed))
    remember(engine, prompts, seed=seed)
    sampling = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    names = [f"decoding {number}" for number in range(batch)]
    for name, prompt in zip(names, prompts, strict=True):
        engine.add(EngineRequest(name, tuple(prompt), sampling))
    answered: set[str] = set()
    while len(answered) < batch:
        before = len(answered)
        answered |= {output.request_id for output in step(engine)}
        if before == len(answered) == engine.stats().num_running:
            raise ConfigError(
                f"{before} of {batch} requests of {context} tokens fit side by side beside the "
                "pages that the scheduler keeps free; give the cache more (kv_cache_memory_bytes)"
            )
    return names


def remember(engine: Engine, texts: Iterable[Sequence[int]], *, seed: int = 0) -> None:
    """Let the prefix cache of an engine find every whole page of these texts.

    Records are those of random rows, all different and of the size that norms leave. In exact mode
    a slot is saved in front of the last rows of each text, as long as there is room for any.

    Args:
        engine: of a model with weights; pages that nobody holds may be evicted.
        texts: token ids.
        seed: of the records.

    Raises:
        ConfigError: a text needs more pages than are free.
    """
    model, cache = engine.model, engine.cache
    assert isinstance(model, AnyModel)
    fields, config = model.cache, model.config
    records = _RandomRecords(seed, model.embed.device)
    for text in texts:
        request = Request("remembered", array("i", text), len(text), SamplingParams(), arrival=0.0)
        cache.lookup(request, 0)  # where the text's digests begin
        if not cache.grow(request, len(text)):
            raise ConfigError(
                f"a context of {len(text)} tokens needs {cache.pages_of(len(text))} pages, but "
                f"{cache.num_free_pages} are free; give the cache more (kv_cache_memory_bytes)"
            )
        for entries in fields.kv.values():
            records.fill(entries, request.pages, config.head_dim)
        for keys in fields.index.values():
            records.fill(keys, request.pages, config.index_head_dim)
        boundary = num_full_pages(len(text) - 1, cache.page_size) * cache.page_size
        if cache.takes_snapshots and boundary:
            slot = cache.save_snapshot(request, boundary, SnapshotKind.PROMPT_END)
            if slot is not None:
                for window in fields.window:
                    records.fill(window, [slot], config.head_dim)
        cache.commit(request, len(text))
        cache.release(request)


class _RandomRecords:
    """Seeded normal rows, packed as fields store them: no NaN, and no row twice."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self._draw = torch.Generator(device).manual_seed(seed)

    @torch.no_grad()
    def fill(self, field: RecordField, places: Sequence[int], channels: int) -> None:
        """Overwrite whole pages or slots."""
        num_rows, device = field.values.shape[1], self._draw.device
        for part in torch.tensor(places, device=device).split(max(1, _ROWS_AT_ONCE // num_rows)):
            shape = (len(part), num_rows, channels)
            rows = torch.randn(shape, generator=self._draw, device=device)
            values, scales = ops.pack_rows(rows, field.record, field.rotary)
            field.values[part] = values
            if field.scales is not None and scales is not None:
                field.scales[part] = scales


def _check_room(engine: Engine, batch: int, positions: int) -> None:
    cache = engine.cache
    if batch > cache.num_slots:
        raise ConfigError(
            f"{batch} requests are to decode at once, but {cache.num_slots} have slots; raise "
            "max_num_seqs, or give the cache more (kv_cache_memory_bytes)"
        )
    if (needed := batch * cache.pages_of(positions)) > cache.num_pages:
        raise ConfigError(
            f"{batch} requests of {positions} tokens need {needed} pages, but the cache has "
            f"{cache.num_pages}; give it more (kv_cache_memory_bytes)"
        )
