"""No call of an op is of no component."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from typing import Any

import pytest

from leadline.cli import bundled_model
from leadline.config.engine import CacheConfig, EngineConfig
from leadline.engine.launch import build_engine
from leadline.kernels import registry
from leadline.kernels.observe import observed
from leadline.profile.components import OF_CALLER, OF_OP, component_of
from leadline.profile.roofline import CANDIDATE_LOGITS, COMPONENTS, ENGRAM
from leadline.profile.steps import Prompts


def test_every_op_has_a_component() -> None:
    assert set(registry._references) - {*OF_OP, *OF_CALLER} == set()
    named = {*OF_OP.values(), *(name for each in OF_CALLER.values() for name in each.values())}
    assert named <= set(COMPONENTS)


def components_of(model: str, kv_cache_dtype: str, **settings: Any) -> set[str]:
    """What a prompt of 300 tokens calls ops of: more than candidates hold, and rings too."""
    engine = build_engine(
        EngineConfig(
            model=model,
            device="cpu",
            max_model_len=512,
            cache=CacheConfig(kv_cache_dtype=kv_cache_dtype, kv_cache_memory_bytes=2**26),
            **settings,
        )
    )
    found = set()

    def around(op: str, caller: str) -> AbstractContextManager[None]:
        found.add(component_of(op, caller))
        return contextlib.nullcontext()

    with observed(around):
        Prompts(engine, 300, seed=0).run(1)
    return found


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "bfloat16"])
def test_a_prompt_calls_ops_of_all_components(kv_cache_dtype: str) -> None:
    assert components_of(str(bundled_model()), kv_cache_dtype) == set(COMPONENTS)


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "bfloat16"])
def test_a_prompt_of_a_v4_calls_ops_of_all_that_it_has(kv_cache_dtype: str) -> None:
    found = components_of("tiny-v4", kv_cache_dtype, load_format="dummy")
    assert found == set(COMPONENTS) - {ENGRAM, CANDIDATE_LOGITS}
