"""No call of an op is of no component."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager

import pytest

from leadline.cli import bundled_model
from leadline.config.engine import CacheConfig, EngineConfig
from leadline.engine.launch import build_engine
from leadline.kernels import registry
from leadline.kernels.observe import observed
from leadline.profile.components import OF_CALLER, OF_OP, component_of
from leadline.profile.roofline import COMPONENTS
from leadline.profile.steps import Prompts


def test_every_op_has_a_component() -> None:
    assert set(registry._references) - {*OF_OP, *OF_CALLER} == set()
    named = {*OF_OP.values(), *(name for each in OF_CALLER.values() for name in each.values())}
    assert named <= set(COMPONENTS)


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "bfloat16"])
def test_a_prompt_calls_ops_of_all_components(kv_cache_dtype: str) -> None:
    """Its 300 tokens are more than candidates hold, and rings too."""
    engine = build_engine(
        EngineConfig(
            model=str(bundled_model()),
            device="cpu",
            max_model_len=512,
            cache=CacheConfig(kv_cache_dtype=kv_cache_dtype, kv_cache_memory_bytes=2**26),
        )
    )
    found = set()

    def around(op: str, caller: str) -> AbstractContextManager[None]:
        found.add(component_of(op, caller))
        return contextlib.nullcontext()

    with observed(around):
        Prompts(engine, 300, seed=0).run(1)
    assert found == set(COMPONENTS)
