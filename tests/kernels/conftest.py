"""Golden tensors that several kernel tests read, and the checkpoint they belong to."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file
from torch import Tensor

from leadline.cache.layout import KV_CACHE_DTYPES
from leadline.config.model import load_model_config
from leadline.weights.checkpoint import Checkpoint
from leadline.weights.load import CheckpointSource
from tests import interpreter  # noqa: F401  # before any kernel is imported

# Rows of V4, of which some channels are not quantised, have tests of their own.
V41_RECORDS = sorted({record for records in KV_CACHE_DTYPES.values() for record in records})


@pytest.fixture(scope="session")
def vectors(golden: Path) -> dict[str, Tensor]:
    """Tensors of ``golden/quant``."""
    return load_file(golden / "quant/vectors.safetensors")


@pytest.fixture(scope="session")
def units(golden: Path) -> dict[str, Tensor]:
    """``unit.*`` tensors of ``golden/v41-reference``."""
    tensors = load_file(golden / "v41-reference/cases.safetensors")
    return {name: tensor for name, tensor in tensors.items() if name.startswith("unit.")}


@pytest.fixture(scope="session")
def weights(golden: Path) -> CheckpointSource:
    """Weights of ``golden/v41-reference``."""
    folder = golden / "v41-reference"
    return CheckpointSource(Checkpoint(folder), load_model_config(folder), show_progress=False)
