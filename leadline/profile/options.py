"""What is to be profiled: flags of ``leadline profile``."""

from __future__ import annotations

from dataclasses import dataclass, fields

from leadline.core.errors import ConfigError
from leadline.profile.roofline import H200_MEASURED, MachineRates


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileOptions:
    """The steps, and the machine that they are held to.

    Attributes:
        batch_size: requests of a decode step.
        context: tokens of each of them.
        input_len: tokens of a prompt.
        steps: how many are measured, in each of up to three passes.
        warmup: how many run before.
        trace: file for the trace of the steps, .json or .json.gz; Perfetto shows it.
        json: file for all numbers.
        read_bytes_per_s: of the GPU, for bounds; benchmarks/kernels.py measures it, and what
            follows.
        bf16_flops: its FLOP/s.
        fp8_flops: the same.
        bound_fp8: prompts' bounds have products at the FP8 rate; otherwise at that of bf16.
    """

    batch_size: int = 1
    context: int = 8192
    input_len: int = 8192
    steps: int = 10
    warmup: int = 3
    trace: str | None = None
    json: str | None = None
    read_bytes_per_s: float = H200_MEASURED.read
    bf16_flops: float = H200_MEASURED.bf16
    fp8_flops: float = H200_MEASURED.fp8
    bound_fp8: bool = False

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            least = 0 if field.name == "warmup" else 1
            if isinstance(value, (int, float)) and field.name != "bound_fp8" and value < least:
                raise ConfigError(f"{field.name} is {value}; it must be at least {least}")
        if self.trace is not None and not self.trace.endswith((".json", ".json.gz")):
            raise ConfigError(f"trace is {self.trace!r}; its name must end in .json or .json.gz")

    @property
    def machine(self) -> MachineRates:
        """What bounds are computed with."""
        return MachineRates(self.read_bytes_per_s, self.bf16_flops, self.fp8_flops)
