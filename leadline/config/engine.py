"""How the engine runs: one frozen tree of settings, named as vLLM's users type them."""

from __future__ import annotations

from dataclasses import dataclass, field

from leadline.config.checks import at_least, choice
from leadline.core.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """Cache memory.

    Attributes:
        kv_cache_dtype: records of window, compressed and index rows (``cache.layout``).
        block_size: token positions of a page; smaller ones than 256 suit tiny models.
        gpu_memory_utilization: share of a GPU's memory for everything: weights, the largest step
            and graphs, which are measured at start, and the cache, which gets the rest.
        kv_cache_memory_bytes: bytes for pages and slots, and nothing is measured; None takes what
            the device leaves (on a CPU the smaller of 2 GiB and a tenth of memory).
        enable_prefix_caching: pages of ended requests are found again by their tokens.
        swa_bounded_replay: window KV is not cached but rebuilt from the last rows before a hit,
            and layers above the cut run on the last rows of a prompt only. An approximation by
            the model's makers; off is exact mode, where hits need snapshots. None is on, but for
            DeepSeek-V4, which has exact mode only.
        swa_replay_lower: the same for the lower layers alone; None follows the switch above.
        swa_replay_upper: the same for the layers above the cut alone.
        swa_replay_length: rows that are replayed; None is the model's window.
        snapshot_interval: exact mode saves a slot every so many tokens of a prompt; 0 saves the
            ends of prompts and turns only.
        snapshot_memory_fraction: exact mode's share of cache memory for snapshots.
        hot_slots: finished requests with a session whose slots are kept, at most, so that the
            session's next turn replays nothing; requests that need the memory take it.
    """

    kv_cache_dtype: str = "auto"
    block_size: int = 256
    gpu_memory_utilization: float = 0.9
    kv_cache_memory_bytes: int | None = None
    enable_prefix_caching: bool = True
    swa_bounded_replay: bool | None = None
    swa_replay_lower: bool | None = None
    swa_replay_upper: bool | None = None
    swa_replay_length: int | None = None
    snapshot_interval: int = 16384
    snapshot_memory_fraction: float = 0.2
    hot_slots: int = 0

    def __post_init__(self) -> None:
        share = self.gpu_memory_utilization
        if not isinstance(share, (int, float)) or not 0 < share <= 1:
            raise ConfigError(f"gpu_memory_utilization is {share!r}; it must lie in (0, 1]")
        at_least(self, 1, "kv_cache_memory_bytes", "block_size")
        at_least(self, 1, "swa_replay_length")
        at_least(self, 0, "snapshot_interval", "hot_slots")
        share = self.snapshot_memory_fraction
        if not isinstance(share, (int, float)) or not 0 <= share < 1:
            raise ConfigError(f"snapshot_memory_fraction is {share!r}; it must lie in [0, 1)")


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Budgets of one step (cache-and-scheduling 5.2, 5.3, 5.5).

    Attributes:
        max_num_batched_tokens: T, rows of one step.
        max_num_seqs: N, running requests at most; slots may be fewer when memory is short.
        max_prefill_rows: P_max, prefill rows of a step in which decode rows run too.
        max_prefills: M, requests in prefill at the same time.
        max_bypass: times that smaller requests may pass a waiting one that does not fit.
        long_prefill_threshold: rows of one prompt in a step at most, so that several long ones
            share it; None is no bound.
        priority_aging_seconds: a request that waits this long improves its priority by one; None
            never does.
        max_num_queued_reqs: requests, running or waiting, before new ones are refused; 0 is no
            bound.
        max_num_queued_tokens: prompt tokens that no step has fed yet, before new requests are
            refused; 0 is no bound.
        rows_per_decode: query rows of a decode group, 1 + the longest draft; rings and batches
            are sized for it.
    """

    max_num_batched_tokens: int = 8192
    max_num_seqs: int = 256
    max_prefill_rows: int = 2048
    max_prefills: int = 8
    max_bypass: int = 16
    long_prefill_threshold: int | None = None
    priority_aging_seconds: float | None = 30.0
    max_num_queued_reqs: int = 1024
    max_num_queued_tokens: int = 0
    rows_per_decode: int = 6

    def __post_init__(self) -> None:
        at_least(
            self,
            1,
            "max_num_batched_tokens",
            "max_num_seqs",
            "max_prefill_rows",
            "max_prefills",
            "long_prefill_threshold",
            "rows_per_decode",
        )
        at_least(self, 0, "max_bypass", "max_num_queued_reqs", "max_num_queued_tokens")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) is below max_num_seqs "
                f"({self.max_num_seqs}): a step must hold one row of every running request"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Everything that an engine process needs to start.

    Presets of ``optimization`` are applied by ``config.optimization.make_engine_config``, before
    this is made: only there is it known which settings were given.

    Attributes:
        model: a checkpoint folder, a hub id, or a preset's name with ``load_format="dummy"``.
        revision: hub revision.
        dtype: ``auto`` (float32 on a CPU, bfloat16 on a GPU), ``float32``, ``bfloat16`` or
            ``float64``.
        device: ``auto``, ``cpu`` or ``cuda``.
        load_format: ``auto`` reads safetensors, ``dummy`` makes seeded random weights.
        engram_tables: where n-gram tables are gathered from: ``mmap`` is the checkpoint's files as
            the system caches them, ``memory`` a copy that is made at start, in huge pages where
            the system grants them, which kernels of a GPU read themselves; ``auto`` is ``memory``
            where such kernels run and host memory suffices.
        engram_shared_memory: folder on a file system in memory (``/dev/shm``, or a hugetlbfs) for
            that copy: engines of one host share it, and it stays there until its files are removed.
        optimization: a preset: ``all`` are the defaults; ``day0`` is the plainest engine that is
            right: exact mode (no bounded replay), fp8 caches, no fusions, side streams or Engram
            prefetch, graphs of decode rows only, no step planned ahead. Flags that are given win.
        kernel_backend: what runs the operations of a forward: ``auto`` takes what is fastest and
            installed, ``reference`` is plain torch, ``numba`` is float32 on a CPU, ``triton``
            bfloat16 on a GPU; behind it ``OP=BACKEND`` for single ones, as in
            ``auto,route=reference``. ``flashinfer`` has ``routed_experts`` only, for Hopper, and
            does not round their inputs to MXFP8.
        batch_invariant: what a token's forward gives does not depend on what else is in the step,
            to the last bit, so that answers can be repeated under any load; ``triton`` only. Steps
            of few rows take as long as those of 128, and prompts several times as long. Reuse of
            cached prefixes still counts: bounded replay approximates.
        fusions: groups of operations that run as fused kernels: ``all``, ``none``, or some of
            ``mhc``, ``gate``, ``insert`` (norms and stores of windows), ``window`` (their
            addresses, and angles), ``compressor``, ``indexer`` (candidates and selections; without
            it every entry is scored), ``attention``, ``wo_a``, ``engram`` and ``sampling``,
            separated by commas; behind ``all``, ``-GROUP`` takes one out. Others run as separate
            steps in torch, with the same meaning; products of weights have no such form.
        side_streams: parts that run beside what does not wait for them, in steps of few rows on a
            GPU: ``all``, ``none``, or some of ``mixing`` (V4.1's coefficients, beside attention and
            experts, up to 64 rows) and, up to 16, ``compressor`` (beside windows), ``indexer``
            (beside queries) and ``shared_expert`` (beside the routed ones), separated by commas;
            behind ``all``, ``-PART`` takes one out. The tokens are the same.
        engram_prefetch: rows of n-gram tables are gathered beside the layers in front of those
            that read them; off, these wait for them. The tokens are the same.
        max_model_len: longest sequence; None takes the checkpoint's, lowered to what fits.
        quantize_activations: whether inputs of packed weights are quantised to MXFP8 as the
            model specification says; off is for parity runs.
        moe_activations: how inputs of the routed experts' products are scaled: ``mxfp8`` by 32
            channels, as the model specification says; ``fp8`` by rows, so that FP8 tensor cores can
            multiply long prompts. An approximation, which no evaluation of a whole model has
            cleared yet: channels below 2^-14 of their row's largest lose bits, and products of 128
            channels are summed with 14 bits. Steps of few rows stay as they are on a GPU. Hopper's
            kernels for ``mxfp8`` are faster (docs/kernels.md).
        align_scales: give FP8 matrices that stay packed one scale for 32 rows and 128 columns,
            where that moves a matrix by less than a thousandth of its norm: products of up to 8
            tokens take up to a fifth less time on Hopper. Off, weights are as published.
        exact_rounding: bfloat16 only: round where the reference program rounds, including the
            64-slot blocks of attention.
        debug_nonfinite: check every op's output and name the first op, layer and request with
            a non-finite value.
        cuda_graphs: which forwards are captured at start and replayed, on a GPU with kernels that
            allow it: ``decode`` those of decode rows only, ``lower`` of prompts too up to the cut,
            ``all`` above it too, ``off`` none; ``auto`` is ``all`` where that is possible, and
            ``auto-decode`` is ``decode`` there. The tokens are the same.
        async_scheduling: plan the next step while one runs; None does so on a GPU. The tokens are
            the same.
        check_integrity: prove the books of pages and slots after every step.
        seed: of requests that bring none.
    """

    model: str
    revision: str | None = None
    dtype: str = "auto"
    device: str = "auto"
    load_format: str = "auto"
    engram_tables: str = "auto"
    engram_shared_memory: str | None = None
    optimization: str = "all"
    kernel_backend: str = "auto"
    batch_invariant: bool = False
    fusions: str = "all"
    side_streams: str = "all"
    engram_prefetch: bool = True
    max_model_len: int | None = None
    quantize_activations: bool = True
    moe_activations: str = "mxfp8"
    align_scales: bool = False
    exact_rounding: bool = True
    debug_nonfinite: bool = False
    cuda_graphs: str = "auto"
    async_scheduling: bool | None = None
    check_integrity: bool = False
    seed: int = 0
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)

    def __post_init__(self) -> None:
        choice(self, "dtype", "auto", "float32", "bfloat16", "float64")
        choice(self, "device", "auto", "cpu", "cuda")
        choice(self, "load_format", "auto", "safetensors", "dummy")
        choice(self, "optimization", "all", "day0")
        choice(self, "cuda_graphs", "auto", "auto-decode", "off", "decode", "lower", "all")
        choice(self, "moe_activations", "mxfp8", "fp8")
        if self.moe_activations == "fp8" and not self.quantize_activations:
            raise ConfigError(
                "moe_activations is 'fp8', but quantize_activations is off; drop one of them"
            )
        choice(self, "engram_tables", "auto", "memory", "mmap")
        if self.engram_shared_memory is not None and self.engram_tables == "mmap":
            raise ConfigError(
                f"engram_shared_memory is {self.engram_shared_memory!r}, but engram_tables 'mmap' "
                "copies nothing there; leave one of them out"
            )
        if not isinstance(self.model, str) or not self.model:
            raise ConfigError(
                f"model is {self.model!r}; name a checkpoint folder, a hub id or a preset"
            )
        at_least(self, 2, "max_model_len")  # one token of prompt, one of answer
        at_least(self, -(2**63), "seed")
