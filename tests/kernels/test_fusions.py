"""Groups of fused kernels: what turning one off leaves, and that it means the same."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from leadline.core.errors import ConfigError
from leadline.kernels import unfused
from leadline.kernels.fusions import FUSED, FUSIONS, separate
from leadline.kernels.registry import Kernels, choose, unfuse
from tests.interpreter import interpreter
from tests.models.test_triton_backend import held_to_reference
from tests.models.test_triton_backend import run as run_of_all_mechanisms


@pytest.fixture
def triton() -> dict[str, str]:
    """The choice of all of Triton's kernels."""
    pytest.importorskip("triton")
    with interpreter():
        from leadline.kernels.triton import IMPLEMENTATIONS
    return dict.fromkeys(IMPLEMENTATIONS, "triton")


def test_every_op_of_a_group_is_an_op_with_a_kernel_and_in_no_other(
    triton: dict[str, str],
) -> None:
    assert set(Counter(name for group in FUSIONS.values() for name in group).values()) == {1}
    # Norms alone, reads of tables and what has weights or all scores in it are no fusions.
    products = {"linear", "wide_linear", "grouped_linear", "shared_expert", "routed_experts"}
    assert triton.keys() - FUSED == products | {"rms_norm", "gather_rows", "index_logits"}
    assert triton.keys() >= FUSED
    assert unfused.IMPLEMENTATIONS.keys() <= FUSED


@pytest.mark.parametrize(
    ("wanted", "off"),
    [
        ("all", set()),
        ("none", set(FUSED)),
        ("all,-gate", {"route", "hash_route"}),
        ("all,-gate,-wo_a", {"route", "hash_route", "output_projection"}),
        ("all,-gate,gate", set()),
        (",".join(sorted(set(FUSIONS) - {"attention"})), {"sparse_attention"}),
        ("gate", FUSED - {"route", "hash_route"}),
    ],
)
def test_groups_are_kept_or_taken_out_by_name(wanted: str, off: set[str]) -> None:
    assert separate(wanted) == off


@pytest.mark.parametrize("wanted", ["", "some", "all,-router", "mhc,,gate"])
def test_a_group_that_there_is_not_is_refused(wanted: str) -> None:
    with pytest.raises(ConfigError, match=r"fusions has '.*'; write all, none, or some of mhc"):
        separate(wanted)


def test_what_is_named_for_an_op_wins_over_its_group() -> None:
    pytest.importorskip("numba", reason="the extra 'cpu' is not installed")
    cpu, dtype = torch.device("cpu"), torch.float32
    chosen = choose("numba,route=numba", cpu, dtype, fusions="none").backend_of
    assert chosen["route"] == chosen["linear"] == "numba"
    assert chosen["sparse_attention"] == "unfused"
    assert "mhc_expand" not in chosen


def test_separate_steps_do_what_definitions_do_on_all_that_models_call_them_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = set[str]()
    for name, implementation in unfused.IMPLEMENTATIONS.items():
        held = held_to_reference(name, implementation, seen)
        monkeypatch.setitem(unfused.IMPLEMENTATIONS, name, held)
    with Kernels(dict.fromkeys(unfused.IMPLEMENTATIONS, "unfused")).active():
        assert run_of_all_mechanisms().isfinite().all()
    assert seen == unfused.IMPLEMENTATIONS.keys()


@pytest.mark.parametrize("fusions", ["none", *(f"all,-{name}" for name in FUSIONS)])
def test_graphs_hold_steps_of_any_groups(fusions: str, triton: dict[str, str]) -> None:
    kernels = Kernels(unfuse(triton, fusions))
    assert not kernels.waiting
    assert kernels.reads_packed


def test_what_may_wait_for_the_host_is_told(triton: dict[str, str]) -> None:
    references = ("route", "store_entries", "index_logits")
    kernels = Kernels({name: "triton" for name in triton if name not in references})
    assert kernels.waiting == ["store_entries", "index_logits"]
