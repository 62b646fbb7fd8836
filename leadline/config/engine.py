"""How the engine runs: one frozen tree of settings, named as vLLM's users type them."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

from leadline.core.errors import ConfigError, NotSupported


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """Cache memory.

    Attributes:
        kv_cache_dtype: records of window, compressed and index rows (``cache.layout``).
        block_size: token positions of a page; smaller ones than 256 suit tiny models.
        gpu_memory_utilization: share of a GPU's memory for weights and cache together.
        kv_cache_memory_bytes: bytes for pages and slots; None takes what the device leaves
            (on a CPU the smaller of 2 GiB and a tenth of memory).
        enable_prefix_caching: None is the best this version has: off.
        swa_bounded_replay: None is the best this version has: off (exact mode).
    """

    kv_cache_dtype: str = "auto"
    block_size: int = 256
    gpu_memory_utilization: float = 0.9
    kv_cache_memory_bytes: int | None = None
    enable_prefix_caching: bool | None = None
    swa_bounded_replay: bool | None = None

    def __post_init__(self) -> None:
        share = self.gpu_memory_utilization
        if not isinstance(share, (int, float)) or not 0 < share <= 1:
            raise ConfigError(f"gpu_memory_utilization is {share!r}; it must lie in (0, 1]")
        _integers(self, 1, "kv_cache_memory_bytes", "block_size")
        if self.enable_prefix_caching:
            raise NotSupported("enable_prefix_caching: prefix caching does not exist yet")
        if self.swa_bounded_replay:
            raise NotSupported("swa_bounded_replay: bounded replay does not exist yet")


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Budgets of one step (cache-and-scheduling 5.2, 5.3, 5.5).

    Attributes:
        max_num_batched_tokens: T, rows of one step.
        max_num_seqs: N, running requests at most; slots may be fewer when memory is short.
        max_prefill_rows: P_max, prefill rows of a step in which decode rows run too.
        max_prefills: M, requests in prefill at the same time.
        max_bypass: times that smaller requests may pass a waiting one that does not fit.
        max_num_queued_reqs: waiting requests before new ones are refused; None is no bound.
        rows_per_decode: query rows of a decode group, 1 + the longest draft; rings and batches
            are sized for it.
    """

    max_num_batched_tokens: int = 8192
    max_num_seqs: int = 256
    max_prefill_rows: int = 2048
    max_prefills: int = 8
    max_bypass: int = 16
    max_num_queued_reqs: int | None = None
    rows_per_decode: int = 6

    def __post_init__(self) -> None:
        _integers(
            self,
            1,
            "max_num_batched_tokens",
            "max_num_seqs",
            "max_prefill_rows",
            "max_prefills",
            "max_num_queued_reqs",
            "rows_per_decode",
        )
        _integers(self, 0, "max_bypass")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) is below max_num_seqs "
                f"({self.max_num_seqs}): a step must hold one row of every running request"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Everything that an engine process needs to start.

    Attributes:
        model: a checkpoint folder, a hub id, or a preset's name with ``load_format="dummy"``.
        revision: hub revision.
        dtype: ``auto`` (float32 on a CPU, bfloat16 on a GPU), ``float32``, ``bfloat16`` or
            ``float64``.
        device: ``auto``, ``cpu`` or ``cuda``.
        load_format: ``auto`` reads safetensors, ``dummy`` makes seeded random weights.
        max_model_len: longest sequence; None takes the checkpoint's, lowered to what fits.
        quantize_activations: whether inputs of packed weights are quantised to MXFP8 as the
            model specification says; off is for parity runs.
        exact_rounding: bfloat16 only: round where the reference program rounds, including the
            64-slot blocks of attention.
        debug_nonfinite: check every op's output and name the first op, layer and request with
            a non-finite value.
        seed: of requests that bring none.
    """

    model: str
    revision: str | None = None
    dtype: str = "auto"
    device: str = "auto"
    load_format: str = "auto"
    max_model_len: int | None = None
    quantize_activations: bool = True
    exact_rounding: bool = True
    debug_nonfinite: bool = False
    seed: int = 0
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)

    def __post_init__(self) -> None:
        _choice("dtype", self.dtype, ("auto", "float32", "bfloat16", "float64"))
        _choice("device", self.device, ("auto", "cpu", "cuda"))
        _choice("load_format", self.load_format, ("auto", "safetensors", "dummy"))
        if not isinstance(self.model, str) or not self.model:
            raise ConfigError(
                f"model is {self.model!r}; name a checkpoint folder, a hub id or a preset"
            )
        _integers(self, 2, "max_model_len")  # one token of prompt, one of answer
        _integers(self, -(2**63), "seed")


def _choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{name} is {value!r}; choose one of {', '.join(choices)}")


def _integers(config: object, low: int, *names: str) -> None:
    """Every named field is an integer from ``low`` on, or None where None is its default."""
    defaults = {field.name: field.default for field in fields(config)}  # type: ignore[arg-type]
    for name in names:
        value = getattr(config, name)
        if value is None and defaults[name] is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < low:
            raise ConfigError(f"{name} is {value!r}; it must be an integer of at least {low}")
