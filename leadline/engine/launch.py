"""From settings to a running engine: the one place where model, memory and scheduler are wired."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from leadline.cache.layout import cache_layout
from leadline.cache.manager import CacheManager
from leadline.cache.pool import CachePool
from leadline.cache.prefix import root_digest
from leadline.cache.sizing import CacheSize, size_cache
from leadline.config.engine import EngineConfig
from leadline.config.families import AnyConfig, load_any_config
from leadline.config.model import ModelConfig
from leadline.config.presets import PRESETS, any_preset
from leadline.config.v4 import V4Config
from leadline.core.errors import CheckpointError, ConfigError
from leadline.engine.batch_builder import BatchBuilder
from leadline.engine.engine import Engine
from leadline.engine.forwards import Capture, CudaCapture, GraphLimits, GraphMode, Graphs
from leadline.engine.memory import (
    GIB,
    CudaMemory,
    DeviceMemory,
    cache_budget_bytes,
    graphs_do_not_fit,
    log_use,
    profile,
)
from leadline.engine.rehearsal import Rehearsal
from leadline.engine.sampler import Sampler
from leadline.engine.settings import (
    expert_row_scales,
    obstacle_to_graphs,
    resolve_device,
    resolve_dtype,
    resolve_graph_mode,
    resolve_max_model_len,
    resolve_policy,
    resolve_table_memory,
)
from leadline.kernels import preparation
from leadline.kernels.debug import switch
from leadline.kernels.records import Record
from leadline.kernels.registry import Kernels, choose
from leadline.models.common.parameters import Parameters
from leadline.models.deepseek_v4.model import DeepseekV4
from leadline.models.deepseek_v41.engram import compressed_token_map
from leadline.models.deepseek_v41.model import DeepseekV41
from leadline.parallel.placement import Placement
from leadline.weights.checkpoint import Checkpoint, resolve_checkpoint
from leadline.weights.load import CheckpointSource, DummySource

if TYPE_CHECKING:
    from leadline.engine.grammar import GrammarCompiler

logger = logging.getLogger(__name__)

AnyModel = DeepseekV41 | DeepseekV4
"""That can be served."""


def memory_of(device: torch.device) -> DeviceMemory | None:
    """What measures a device's memory; None where nothing is measured."""
    return CudaMemory(device) if device.type == "cuda" else None


def build_engine(
    config: EngineConfig,
    *,
    make_sampler: Callable[[int], Sampler] = Sampler,
    make_capture: Callable[[], Capture] = CudaCapture,
    memory_of: Callable[[torch.device], DeviceMemory | None] = memory_of,
) -> Engine:
    """Load the model, size its cache by what memory is left, and put an engine around them.

    Args:
        config: all settings.
        make_sampler: of the model's end token; evaluation has one that knows the answers.
        make_capture: of graphs, where there are any; profiles have one that can do without them.
        memory_of: measures the memory of the device.

    Raises:
        ConfigError: the settings do not fit the model or the memory.
        CheckpointError: the checkpoint does not hold what its configuration promises.
    """
    return engine_around(
        load_model(config),
        config,
        make_sampler=make_sampler,
        make_capture=make_capture,
        memory_of=memory_of,
    )


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model with its weights, and what an engine around it has to know of them.

    Attributes:
        kernels: what runs its ops.
        device: where it is.
        dtype: of activations.
        wide: of what is accumulated.
        tokenizer_file: None where the model has none.
    """

    model: AnyModel
    kernels: Kernels
    device: torch.device
    dtype: torch.dtype
    wide: torch.dtype
    tokenizer_file: Path | None


def load_model(config: EngineConfig) -> LoadedModel:
    """The weights alone; settings of cache, scheduler and graphs do not matter here.

    Raises:
        ConfigError: the settings do not fit the model or the machine.
        CheckpointError: the checkpoint does not hold what its configuration promises.
    """
    device = resolve_device(config.device)
    dtype = resolve_dtype(config.dtype, device)
    kernels = choose(
        config.kernel_backend,
        device,
        dtype,
        fusions=config.fusions,
        batch_invariant=config.batch_invariant,
    )
    weights = _open_weights(config, device, kernels)
    params = Parameters(
        weights.source,
        dtype=dtype,
        device=device,
        placement=Placement(),
        quantize_activations=config.quantize_activations,
        expert_row_scales=expert_row_scales(config, kernels, device),
        packed=kernels.reads_packed,
        aligned=config.align_scales,
        arrange_experts=kernels.arrange_experts,
        batch_invariant=config.batch_invariant,
    )
    model = _make_model(config, weights, params)
    weights.source.finish()
    return LoadedModel(model, kernels, device, dtype, params.wide, weights.tokenizer_file)


def _make_model(config: EngineConfig, weights: _Weights, params: Parameters) -> AnyModel:
    rounding, streams = config.exact_rounding, config.side_streams
    if isinstance(weights.config, V4Config):
        return DeepseekV4(weights.config, params, exact_rounding=rounding, side_streams=streams)
    return DeepseekV41(
        weights.config,
        params,
        token_map=weights.token_map,
        exact_rounding=rounding,
        side_streams=streams,
        engram_prefetch=config.engram_prefetch,
    )


@preparation.logged()
def engine_around(
    loaded: LoadedModel,
    config: EngineConfig,
    *,
    make_sampler: Callable[[int], Sampler] = Sampler,
    make_capture: Callable[[], Capture] = CudaCapture,
    memory_of: Callable[[torch.device], DeviceMemory | None] = memory_of,
) -> Engine:
    """Size a cache for a loaded model, bind it, and put an engine around both.

    A model has one cache: an engine that was put around it before must not run any more.

    Args:
        loaded: by settings that agree with ``config`` in what ``load_model`` reads.
        config: all settings.
        make_sampler: as for ``build_engine``.
        make_capture: likewise.
        memory_of: likewise.

    Raises:
        ConfigError: the settings do not fit the model or the memory.
    """
    model, kernels, device = loaded.model, loaded.kernels, loaded.device
    model.bind_cache(None)  # of an engine before: there may be no room for two
    model_config = model.config
    switch.enabled = config.debug_nonfinite
    layout = cache_layout(
        model_config,
        kv_cache_dtype=config.cache.kv_cache_dtype,
        block_size=config.cache.block_size,
        rows_per_decode=config.scheduler.rows_per_decode,
    )
    if config.batch_invariant and layout.index_record is not Record.FP4_32:
        raise ConfigError(
            f"kv_cache_dtype is {config.cache.kv_cache_dtype!r}, whose index keys have no "
            "batch-invariant kernels; choose 'auto', or leave batch_invariant out"
        )
    obstacle = obstacle_to_graphs(config, device, kernels, layout) or model.obstacle_to_graphs
    graph_mode = resolve_graph_mode(config.cuda_graphs, obstacle)
    builder = BatchBuilder(num_history=model.num_history, device=device)
    limits = GraphLimits(
        max_num_seqs=config.scheduler.max_num_seqs,
        max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
        max_len=config.max_model_len or model_config.max_position_embeddings,
        vocab_size=model_config.vocab_size,
    )
    memory, use = memory_of(device), None
    if memory is not None and config.cache.kv_cache_memory_bytes is None:
        rehearsal = Rehearsal(model, kernels, builder, layout, loaded.wide, limits, graph_mode)
        staging_bytes = layout.staging_bytes(config.scheduler.max_num_batched_tokens)
        use = profile(memory, rehearsal, config, staging=staging_bytes)
    budget_bytes = cache_budget_bytes(config, use)
    max_model_len = resolve_max_model_len(config, model_config, layout, budget_bytes)
    policy = resolve_policy(config.cache, model_config)
    takes_snapshots = policy.needs_snapshot and config.cache.enable_prefix_caching
    snapshots = config.cache.snapshot_memory_fraction if takes_snapshots else 0.0
    size = size_cache(
        layout,
        budget_bytes=budget_bytes,
        max_num_seqs=config.scheduler.max_num_seqs,
        max_model_len=max_model_len,
        snapshot_memory_fraction=snapshots,
    )
    pool = CachePool(
        layout,
        num_pages=size.num_pages,
        num_slots=size.num_slot_rows,
        num_snapshots=size.num_snapshots,
        step_rows=config.scheduler.max_num_batched_tokens,
        wide=loaded.wide,
        device=device,
    )
    model.bind_cache(pool)
    logger.info(
        "cache: %d pages of %d tokens, %d slots, %.3g GiB; max_model_len %d",
        size.num_pages - 1,
        size.page_size,
        size.num_slots - 1,
        size.num_bytes(layout) / GIB,
        max_model_len,
    )
    if use is not None:
        log_use(use, size.num_bytes(layout))
    # Whatever changes what a page holds makes its digests different.
    parts = (config.model, config.revision or "", str(loaded.dtype), *map(str, (layout, policy)))
    cache = CacheManager(
        size,
        root=root_digest(*parts),
        enable_prefix_caching=config.cache.enable_prefix_caching,
        needs_snapshot=policy.needs_snapshot,
        hot_slots=config.cache.hot_slots,
    )
    limits = replace(limits, max_num_seqs=size.num_slots - 1, max_len=max_model_len)
    graphs = _capture_graphs(model, kernels, builder, limits, graph_mode, size, make_capture)
    asynchronous = config.async_scheduling
    return Engine(
        model,
        make_sampler(model_config.eos_token_id),
        cache,
        pool.copy_slots,
        policy,
        config.scheduler,
        vocab_size=model_config.vocab_size,
        eos_token_id=model_config.eos_token_id,
        max_model_len=max_model_len,
        num_history=builder.num_history,
        graphs=graphs,
        page_bytes=layout.page_bytes,
        slot_bytes=layout.slot_bytes,
        device=device,
        seed=config.seed,
        grammars=_grammar_compiler(loaded.tokenizer_file, model_config),
        kernels=kernels,
        asynchronous=device.type == "cuda" if asynchronous is None else asynchronous,
        checks_integrity=config.check_integrity,
    )


def _capture_graphs(
    model: AnyModel,
    kernels: Kernels,
    builder: BatchBuilder,
    limits: GraphLimits,
    mode: GraphMode,
    size: CacheSize,
    make_capture: Callable[[], Capture],
) -> Graphs | None:
    if mode is GraphMode.OFF:
        return None
    graphs = Graphs(model, builder, make_capture(), mode, limits, size)
    try:
        with kernels.active():
            graphs.capture()
    except torch.OutOfMemoryError as error:
        raise graphs_do_not_fit("weights and cache", error) from error
    return graphs


@dataclass(frozen=True, slots=True)
class _Weights:
    """A model's configuration, where its weights come from, and what its tokenizer says.

    Attributes:
        tokenizer_file: None where the model has none.
        token_map: Engram classes of token ids, where the model needs them.
    """

    config: AnyConfig
    source: CheckpointSource | DummySource
    tokenizer_file: Path | None
    token_map: Sequence[int] | None


def _open_weights(config: EngineConfig, device: torch.device, kernels: Kernels) -> _Weights:
    if config.load_format == "dummy":
        named = config.model in PRESETS
        folder = None if named else resolve_checkpoint(config.model)
        model_config = any_preset(config.model) if folder is None else load_any_config(folder)
        tables = resolve_table_memory(config, model_config, device, kernels)
        dummy = DummySource(model_config, seed=config.seed, device=device, table_memory=tables)
        return _Weights(model_config, dummy, _tokenizer_file(folder), None)
    folder = resolve_checkpoint(config.model, config.revision)
    model_config, file = load_any_config(folder), _tokenizer_file(folder)
    has_engram = isinstance(model_config, ModelConfig) and model_config.engram_layer_ids
    token_map = _token_map(folder, file) if has_engram else None
    tables = resolve_table_memory(config, model_config, device, kernels)
    source = CheckpointSource(Checkpoint(folder), model_config, device=device, table_memory=tables)
    return _Weights(model_config, source, file, token_map)


def _tokenizer_file(folder: Path | None) -> Path | None:
    file = folder / "tokenizer.json" if folder else None
    return file if file and file.is_file() else None


def _grammar_compiler(tokenizer_file: Path | None, model: AnyConfig) -> GrammarCompiler | None:
    if tokenizer_file is None:
        return None
    try:
        from leadline.engine.grammar import GrammarCompiler, TokenizerFile
    except ModuleNotFoundError:  # machines that only run token ids may lack llguidance
        return None
    return GrammarCompiler(TokenizerFile(tokenizer_file, model.vocab_size, model.eos_token_id))


def _token_map(folder: Path, file: Path | None) -> Sequence[int]:
    """Engram classes of the checkpoint's own tokenizer."""
    from tokenizers import Tokenizer

    if file is None:
        raise CheckpointError(
            f"{folder} has no tokenizer.json, but the model has Engram layers, whose hashes come "
            "from the tokenizer's texts; put the model's own file there"
        )
    return compressed_token_map(Tokenizer.from_file(str(file)))
