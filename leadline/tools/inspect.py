"""``leadline inspect``: a model's layers, parameters, cache bytes and what fits in a memory.

Numbers come from the configuration alone; a checkpoint folder has its headers checked as well.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from rich.console import Console
from rich.table import Table

from leadline.cache.layout import CacheLayout, cache_layout
from leadline.cache.sizing import pages_of
from leadline.config.args import parse_count
from leadline.config.families import AnyConfig, load_any_config
from leadline.config.model import LayerMode, ModelConfig
from leadline.config.presets import PRESETS, any_preset
from leadline.config.v4 import V4LayerMode
from leadline.core.errors import ConfigError
from leadline.kernels.packed import WeightFormat
from leadline.weights.checkpoint import INDEX_FILE, Checkpoint
from leadline.weights.formats import scale_name
from leadline.weights.names import expected_tensors, model_weights, vision_totals
from leadline.weights.table import Part, Role, WeightSpec
from leadline.weights.verify import Contents, verify, verify_index

SESSION_TOKENS = 100_000

Kind = TypeVar("Kind", WeightFormat, Role)


@dataclass(frozen=True, slots=True)
class LayerRow:
    """One line of the layer table (v41-model 2.5, v4-model 1.2)."""

    layer: int
    mode: LayerMode | V4LayerMode
    ratio: int
    kv_source: int | None
    index_source: int | None
    notes: str


@dataclass(frozen=True, slots=True)
class Stored:
    """Weights of one kind: tensors (scales included), parameters and bytes as stored."""

    tensors: int
    parameters: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Fit:
    """What a memory holds beside the packed weights; all zero where those alone are too large.

    Attributes:
        pages: if all that is left becomes pages, with ``tokens`` positions in them.
        sessions: running requests of ``SESSION_TOKENS`` tokens, a slot each.
    """

    memory_bytes: int
    weight_bytes: int
    pages: int
    tokens: int
    sessions: int


@dataclass(frozen=True, slots=True)
class ModelReport:
    """Everything that ``leadline inspect`` prints.

    Attributes:
        parameters: of the backbone.
        active_prefill: parameters that a prompt token runs through (v41-model 5.5).
        active_decode: the same for a generated token.
        by_format: backbone weights by how they are stored.
        by_role: backbone weights by what they do.
        skipped: tensors of parts that this version does not use, by part.
        skipped_bytes: of all of these.
        longest: token positions of the longest sequence.
        fit: None where no memory was given.
    """

    layers: list[LayerRow]
    parameters: int
    active_prefill: int
    active_decode: int
    by_format: dict[WeightFormat, Stored]
    by_role: dict[Role, Stored]
    skipped: dict[str, int]
    skipped_bytes: int
    longest: int
    cache: CacheLayout
    fit: Fit | None

    @property
    def num_tensors(self) -> int:
        """Tensors of the backbone."""
        return sum(stored.tensors for stored in self.by_format.values())

    @property
    def num_bytes(self) -> int:
        """Bytes of the backbone as stored."""
        return sum(stored.nbytes for stored in self.by_format.values())


def inspect_main(target: str, memory: str | None = None, kv_cache_dtype: str = "auto") -> None:
    """Print the report of a checkpoint folder, a configuration or a preset.

    Args:
        target: a folder (its tensors are checked, or the names in its index where no shard is
            there), a ``config.json``, or a preset's name.
        memory: of one device, such as ``141GiB``; None leaves out what fits.
        kv_cache_dtype: records of the cache.

    Raises:
        ConfigError: the target is neither, or an argument is wrong.
        CheckpointError: the folder's files do not match its configuration.
    """
    folder = Path(target)
    contents = checked = None
    if folder.exists():
        config = load_any_config(folder)
        if any(folder.glob("*.safetensors")):
            contents = verify(Checkpoint(folder), config)
            checked = f"The files hold every tensor of the backbone: {folder}"
        elif (folder / INDEX_FILE).is_file():
            verify_index(folder, config)
            checked = f"The index names every tensor, and has their bytes: {folder / INDEX_FILE}"
    elif target in PRESETS:
        config = any_preset(target)
    else:
        raise ConfigError(f"{target!r} is neither a folder nor a preset ({', '.join(PRESETS)})")
    try:
        memory_bytes = None if memory is None else parse_count(memory)
    except ValueError as error:
        raise ConfigError(f"memory: {error}") from error
    report = inspect_model(
        config, contents=contents, kv_cache_dtype=kv_cache_dtype, memory_bytes=memory_bytes
    )
    console = Console()
    print_report(report, title=target, console=console)
    if checked is not None:
        console.print(checked)
    if (card := folder / "README.md").is_file():
        console.print(f"What the model is for: {card}")


def inspect_model(
    config: AnyConfig,
    *,
    contents: Contents | None = None,
    kv_cache_dtype: str = "auto",
    memory_bytes: int | None = None,
) -> ModelReport:
    """The report of a configuration, or of the files that ``verify`` found for it."""
    weights = model_weights(config)
    if contents is None:
        official = expected_tensors(config)
        sizes = {name: tensor.nbytes for name, tensor in official.items()}
        formats = {name: spec.format for name, spec in weights.items()}
        drafts = [tensor.nbytes for tensor in official.values() if tensor.part is Part.DRAFT]
        vision_tensors, vision_bytes = vision_totals(config)
        skipped = {"draft": len(drafts), "vision": vision_tensors}
        skipped_bytes = sum(drafts) + vision_bytes
    else:
        sizes = {entry.name: entry.nbytes for entry in contents.used}
        formats, skipped = contents.formats, contents.skipped
        skipped_bytes = contents.skipped_bytes
    backbone = [spec for spec in weights.values() if spec.part is Part.BACKBONE]
    prefill, decode = active_parameters(config)
    layout = cache_layout(config, kv_cache_dtype=kv_cache_dtype)
    by_role = _sum_by({spec.name: spec.role for spec in backbone}, backbone, sizes)
    return ModelReport(
        layers=[_layer_row(config, layer) for layer in range(config.num_hidden_layers)],
        parameters=sum(spec.num_parameters for spec in backbone),
        active_prefill=prefill,
        active_decode=decode,
        by_format=_sum_by(formats, backbone, sizes),
        by_role=by_role,
        skipped={part: count for part, count in skipped.items() if count},
        skipped_bytes=skipped_bytes,
        longest=config.max_position_embeddings,
        cache=layout,
        fit=None if memory_bytes is None else _fit(by_role, layout, memory_bytes),
    )


def active_parameters(config: AnyConfig) -> tuple[int, int]:
    """Parameters that one token runs through: (prefill, decode), v41-model 5.5.

    A prompt token needs the layers before the cut (all, in V4) and what makes the cut's caches; a
    generated one needs every layer and the head. Rows looked up in a table count nothing.
    """
    at_cut = tuple(
        f"layers.{config.cut}.{name}" for name in ("attn_norm", "attn.wkv", "attn.kv_norm")
    )
    prefill = decode = 0.0
    for spec in model_weights(config).values():
        if spec.part is Part.DRAFT or spec.role in (Role.EMBEDDING, Role.ENGRAM_TABLE):
            continue
        count: float = spec.num_parameters
        if spec.role is Role.ROUTED_EXPERT:
            count *= config.num_experts_per_tok / config.n_routed_experts
        decode += count
        before_cut = spec.layer is not None and spec.layer < config.cut
        makes_cache = spec.layer == config.cut and spec.role is Role.COMPRESSED_KV
        if before_cut or makes_cache or spec.name.startswith(at_cut):
            prefill += count
    return round(prefill), round(decode)


def _layer_row(config: AnyConfig, layer: int) -> LayerRow:
    notes: list[str] = []
    if isinstance(config, ModelConfig):
        notes += _v41_notes(config, layer)
    elif layer < config.num_hash_layers:
        notes.append("experts by token id")
    if config.num_nextn_predict_layers and layer in config.dspark_target_layer_ids:
        notes.append("feeds the draft")
    return LayerRow(
        layer=layer,
        mode=config.mode(layer),
        ratio=config.compress_ratios[layer],
        kv_source=config.kv_source(layer),
        index_source=config.index_source(layer),
        notes=", ".join(notes),
    )


def _v41_notes(config: ModelConfig, layer: int) -> Iterator[str]:
    source = config.candidate_source_layer_id
    if layer in config.engram_layer_ids:
        yield "engram"
    if layer == config.cut:
        yield "cut"
    if layer == source:
        yield "picks candidate blocks"
    elif config.mode(layer) is LayerMode.REINDEX and config.kv_source(layer) == source:
        yield "within candidate blocks"


def _sum_by(
    keys: Mapping[str, Kind], backbone: list[WeightSpec], sizes: Mapping[str, int]
) -> dict[Kind, Stored]:
    tensors: Counter[Kind] = Counter()
    parameters: Counter[Kind] = Counter()
    nbytes: Counter[Kind] = Counter()
    for spec in backbone:
        key = keys[spec.name]
        stored = [name for name in (spec.name, scale_name(spec.name)) if name in sizes]
        tensors[key] += len(stored)
        parameters[key] += spec.num_parameters
        nbytes[key] += sum(sizes[name] for name in stored)
    return {key: Stored(tensors[key], parameters[key], nbytes[key]) for key in tensors}


def _fit(by_role: Mapping[Role, Stored], layout: CacheLayout, memory_bytes: int) -> Fit:
    # Engram tables stay in host memory.
    weights = sum(s.nbytes for role, s in by_role.items() if role is not Role.ENGRAM_TABLE)
    left = max(0, memory_bytes - weights)
    session = layout.slot_bytes + pages_of(SESSION_TOKENS, layout.page_size) * layout.page_bytes
    pages = left // layout.page_bytes
    return Fit(memory_bytes, weights, pages, pages * layout.page_size, left // session)


def print_report(report: ModelReport, *, title: str, console: Console) -> None:
    """Render a report as tables."""
    layers = Table("layer", "mode", "ratio", "KV of", "top-k of", "notes", title=title)
    for row in report.layers:
        sources = ("-" if s is None else str(s) for s in (row.kv_source, row.index_source))
        layers.add_row(str(row.layer), row.mode, str(row.ratio), *sources, row.notes)
    console.print(layers)

    for name, stored in (("format", report.by_format), ("role", report.by_role)):
        weights = Table(name, "tensors", "parameters", "bytes", "size", title=f"weights by {name}")
        for column in weights.columns[1:]:
            column.justify = "right"
        for key, kind in stored.items():
            counts = (f"{n:,}" for n in (kind.tensors, kind.parameters, kind.nbytes))
            weights.add_row(key, *counts, _size(kind.nbytes))
        console.print(weights)

    total = report.num_tensors + sum(report.skipped.values())
    skipped = ", ".join(f"{n:,} {part}" for part, n in report.skipped.items()) or "none"
    cache = report.cache
    total_bytes = report.num_bytes + report.skipped_bytes
    sequence = cache.sequence_bytes(report.longest)
    lines = [
        ("tensors", f"{total:,}: {report.num_tensors:,} used, skipped {skipped}"),
        ("bytes", f"{total_bytes:,}: {report.num_bytes:,} used"),
        ("parameters", f"{_billions(report.parameters)} in the backbone"),
        ("active in prefill", _billions(report.active_prefill)),
        ("active in decode", _billions(report.active_decode)),
        ("cache records", f"{cache.window_record}, {cache.kv_record}, {cache.index_record}"),
        ("KV bytes per token", f"{cache.bytes_per_token:,g}"),
        (f"KV of {report.longest:,} tokens", f"{sequence:,} ({_binary(sequence)})"),
        ("bytes per page", f"{cache.page_bytes:,} ({cache.page_size} tokens)"),
        ("bytes per slot", f"{cache.slot_bytes:,}; {cache.snapshot_bytes:,} of it in a snapshot"),
    ]
    if report.fit is not None:
        lines += _fit_lines(report.fit)
    summary = Table(show_header=False, box=None)
    for line in lines:
        summary.add_row(*line)
    console.print(summary)


def _fit_lines(fit: Fit) -> list[tuple[str, str]]:
    weights = f"{fit.weight_bytes / 2**30:.1f} GiB packed, without Engram tables"
    memory = f"{fit.memory_bytes / 2**30:.1f} GiB"
    if fit.weight_bytes > fit.memory_bytes:
        return [(f"in {memory}", f"does not fit: weights alone take {weights}")]
    return [
        (f"in {memory}", f"weights {weights}"),
        ("pages", f"{fit.pages:,}, or {fit.tokens:,} tokens"),
        (f"sessions of {SESSION_TOKENS:,}", f"{fit.sessions:,}"),
    ]


def _size(nbytes: int) -> str:
    return f"{nbytes / 1e9:.1f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:.1f} MB"


def _binary(nbytes: int) -> str:
    return f"{nbytes / 2**30:.2f} GiB" if nbytes >= 2**30 else f"{nbytes / 2**20:.2f} MiB"


def _billions(count: int) -> str:
    return f"{count / 1e9:.1f}B" if count >= 1e9 else f"{count / 1e6:.1f}M"
