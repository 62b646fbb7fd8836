"""The choice of kernels: what runs, and what is refused by name."""

from __future__ import annotations

import logging
import sys
from types import ModuleType

import pytest
import torch
from torch import Tensor

from leadline.core.errors import ConfigError
from leadline.kernels import batch_invariance, ops, registry
from leadline.kernels.reference import norm
from leadline.kernels.registry import Backend, Kernels, choose

CPU, F32 = torch.device("cpu"), torch.float32


def doubled_norm(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    return 2 * norm.rms_norm(x, weight, eps=eps)


@pytest.fixture(autouse=True)
def backends(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that doubles the norm, one whose package is not there, one of another device."""
    found = {
        "double": Backend("cpu", frozenset({F32}), "double", package="math", extra="x"),
        "absent": Backend("cpu", frozenset({F32}), "absent", package="no_such", extra="fast"),
        "device": Backend("cuda", frozenset({F32}), "device", package="math", extra="x"),
        "unfused": registry.BACKENDS["unfused"],
    }
    module = ModuleType("double")
    module.IMPLEMENTATIONS = {"rms_norm": doubled_norm}  # type: ignore[attr-defined]
    monkeypatch.setattr(registry, "BACKENDS", found)
    monkeypatch.setitem(sys.modules, "double", module)


def norm_of_ones() -> float:
    return float(ops.rms_norm(torch.ones(1, 4), torch.ones(4), eps=0.0)[0, 0])


def test_ops_run_by_the_active_choice_and_by_reference_outside() -> None:
    kernels = choose("double", CPU, F32)
    assert norm_of_ones() == 1
    with kernels.active():
        assert norm_of_ones() == 2
        with Kernels({}).active():
            assert norm_of_ones() == 1
        assert norm_of_ones() == 2
    assert norm_of_ones() == 1


def test_the_choice_ends_with_an_error_too() -> None:
    with pytest.raises(ZeroDivisionError), choose("double", CPU, F32).active():
        1 / 0  # noqa: B018
    assert norm_of_ones() == 1


@pytest.mark.parametrize(
    ("wanted", "chosen"),
    [
        ("auto", {"rms_norm": "double"}),
        ("reference", {}),
        ("double,rms_norm=reference", {}),
        ("reference,rms_norm=double", {"rms_norm": "double"}),
        ("rms_norm=double", {"rms_norm": "double"}),
    ],
    ids=str,
)
def test_settings_choose(wanted: str, chosen: dict[str, str]) -> None:
    assert choose(wanted, CPU, F32).backend_of == chosen


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_auto_is_the_reference_where_no_backend_runs(dtype: torch.dtype) -> None:
    assert choose("auto", CPU, dtype).backend_of == {}


def test_auto_leaves_what_has_to_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Backend("cpu", frozenset({F32}), "double", "math", "x", automatic=False)
    monkeypatch.setitem(registry.BACKENDS, "double", asked)
    assert choose("auto", CPU, F32).backend_of == {}
    assert choose("double", CPU, F32).backend_of == {"rms_norm": "double"}


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ("dubble", "choose one of auto, reference, double, absent, device"),
        ("double,reference", "names double and reference; choose one"),
        ("absent", r"No module named 'no_such'; pip install 'leadline\[fast\]'"),
        ("device", "runs on device 'cuda', and this is 'cpu'"),
        ("rms_norn=double", "no op is called 'rms_norn'"),
        ("linear=double", "double does not implement linear"),
        ("linear=absent", "No module named 'no_such'"),
    ],
    ids=str,
)
def test_what_cannot_run_is_refused(wanted: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        choose(wanted, CPU, F32)


def test_batch_invariance_wants_all_ops_by_kernels_that_have_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    able = Backend("cpu", frozenset({F32}), "able", "math", "x", batch_invariant=True)
    module = ModuleType("able")
    module.IMPLEMENTATIONS = {  # type: ignore[attr-defined]
        "rms_norm": lambda *_, **__: torch.tensor(batch_invariance.switch.enabled),
        "linear": print,
    }
    monkeypatch.setitem(sys.modules, "able", module)
    monkeypatch.setitem(registry.BACKENDS, "able", able)
    kernels = choose("able", CPU, F32, batch_invariant=True)
    for chosen, enabled in ((kernels, True), (choose("able", CPU, F32), False)):
        with chosen.active():
            assert ops.rms_norm(torch.ones(1, 4), torch.ones(4), eps=0.0) == enabled
    for wanted, found in (
        ("reference", "kernel_backend does not choose it; change one of the two"),
        ("double", "kernel_backend does not choose it; change one of the two"),
        ("able,linear=reference", "kernel_backend would run linear by reference; change one"),
        ("able,rms_norm=double", "kernel_backend would run rms_norm by double; change one"),
    ):
        with pytest.raises(ConfigError, match=f"needs all ops by able, and {found}"):
            choose(wanted, CPU, F32, batch_invariant=True)


def test_batch_invariance_wants_all_fusions() -> None:
    """As with ``--optimization day0``, where nobody has said anything of backends."""
    with pytest.raises(ConfigError, match=r"needs all fusions, and fusions is 'all,-gate'"):
        choose("double", CPU, F32, fusions="all,-gate", batch_invariant=True)


def test_a_backend_of_another_dtype_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"computes in torch\.float32, and this is torch\.float64"
    ):
        choose("double", CPU, torch.float64)


def test_the_log_says_what_would_be_faster(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delitem(registry.BACKENDS, "double")
    with caplog.at_level(logging.INFO):
        assert choose("auto", CPU, F32).backend_of == {}
    assert "absent would be faster, but No module named 'no_such'; pip install" in caplog.text


def test_weights_stay_packed_where_every_product_reads_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    products = ("linear", "grouped_linear", "shared_expert", "routed_experts")
    reader = Backend("cpu", frozenset({F32}), "reader", "math", "x", reads_packed=True)
    module = ModuleType("reader")
    module.IMPLEMENTATIONS = dict.fromkeys(products, print)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "reader", module)
    monkeypatch.setitem(registry.BACKENDS, "reader", reader)
    assert choose("reader", CPU, F32).reads_packed
    assert not choose("reader,routed_experts=reference", CPU, F32).reads_packed
    assert not choose("double", CPU, F32).reads_packed
