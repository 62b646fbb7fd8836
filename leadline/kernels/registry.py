"""Which implementation runs each op: one choice an engine, made at start.

Every op has a reference, its meaning in plain torch. A backend is a set of faster implementations
for one kind of device; what it lacks runs by reference.
"""

from __future__ import annotations

import functools
import importlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import torch

from leadline.core.errors import ConfigError
from leadline.kernels import batch_invariance, debug, observe
from leadline.kernels.fusions import FUSED, separate
from leadline.kernels.packed import Weight

P = ParamSpec("P")
R = TypeVar("R")

logger = logging.getLogger(__name__)

_references: dict[str, Callable[..., Any]] = {}
_active: Mapping[str, Callable[..., Any]] = {}


def op(*, watched: bool = True) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Make an operation of its reference, which runs unless the active kernels have another.

    Args:
        watched: ``--debug-nonfinite`` looks at its results; in vain where an op makes no non-finite
            value of its own.
    """

    def decorate(reference: Callable[P, R]) -> Callable[P, R]:
        name = reference.__name__
        _references[name] = reference

        @functools.wraps(reference)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            run: Callable[..., R] = _active.get(name, reference)
            if observe.observer.around is None:
                result = run(*args, **kwargs)
            else:
                result = observe.call(name, run, args, kwargs)
            if watched and debug.switch.enabled:
                debug.check(name, result)
            return result

        return call

    return decorate


@dataclass(frozen=True, slots=True)
class Backend:
    """Faster implementations of some ops.

    Attributes:
        device: the kind of device that they run on; None is any.
        dtypes: of activations.
        module: has ``IMPLEMENTATIONS``, a dict by the ops' names; ready to run once imported. And
            ``arrange_experts``, if so said below.
        package: what the module needs beside torch.
        extra: of Leadline, which installs the package.
        reads_packed: its products take ``PackedWeight`` as it is, and need no dense copy.
        automatic: ``auto`` may choose it.
        batch_invariant: it has the mode of ``kernels.batch_invariance``.
        arranges_experts: its ``routed_experts`` wants weights in an order of its own.
        capability: compute capability of the only GPUs that it runs on; None for any.
    """

    device: str | None
    dtypes: frozenset[torch.dtype]
    module: str
    package: str
    extra: str
    reads_packed: bool = False
    automatic: bool = True
    batch_invariant: bool = False
    arranges_experts: bool = False
    capability: tuple[int, int] | None = None

    def obstacle(self, device: torch.device, dtype: torch.dtype) -> str | None:
        """Why it cannot run there, or None."""
        if self.device not in (None, device.type):
            return f"it runs on device {self.device!r}, and this is {device.type!r}"
        if dtype not in self.dtypes:
            names = " or ".join(sorted(map(str, self.dtypes)))
            return f"it computes in {names}, and this is {dtype}"
        try:
            importlib.import_module(self.package)
        except ImportError as error:  # absent, or of a version that does not fit
            return f"{error}; pip install 'leadline[{self.extra}]'"
        if self.capability is not None:
            found = torch.cuda.get_device_capability(device)
            if found != self.capability:
                needs, has = (".".join(map(str, version)) for version in (self.capability, found))
                return f"it runs on compute capability {needs}, and this GPU has {has}"
        return None

    def implementations(self) -> dict[str, Callable[..., Any]]:
        """Ready to run: compiled, where that has not been done before."""
        found: dict[str, Callable[..., Any]] = importlib.import_module(self.module).IMPLEMENTATIONS
        return found


BACKENDS: dict[str, Backend] = {
    "numba": Backend(
        "cpu", frozenset({torch.float32}), "leadline.kernels.cpu", package="numba", extra="cpu"
    ),
    "triton": Backend(
        "cuda",
        frozenset({torch.bfloat16}),
        "leadline.kernels.triton",
        package="triton",
        extra="gpu",
        reads_packed=True,
        batch_invariant=True,
    ),
    "unfused": Backend(
        None,
        frozenset({torch.bfloat16, torch.float32, torch.float64}),
        "leadline.kernels.unfused",
        package="torch",
        extra="gpu",
        automatic=False,  # it is chosen for groups that ``fusions`` leaves out
    ),
    "flashinfer": Backend(
        "cuda",
        frozenset({torch.bfloat16}),
        "leadline.kernels.flashinfer",
        package="flashinfer",
        extra="flashinfer",
        reads_packed=True,
        automatic=False,
        arranges_experts=True,
        capability=(9, 0),
    ),
}


_PRODUCTS = ("linear", "grouped_linear", "shared_expert", "routed_experts")
"""Ops that models give weights to which may be packed."""


class Kernels:
    """The choice of one engine.

    Args:
        backend_of: backend's name by op, of those that do not run by reference.
        batch_invariant: a row's result does not depend on the other rows.
    """

    def __init__(self, backend_of: Mapping[str, str], *, batch_invariant: bool = False) -> None:
        self.backend_of = dict(backend_of)
        self.batch_invariant = batch_invariant
        self._by_op = {
            name: BACKENDS[backend].implementations()[name]
            for name, backend in self.backend_of.items()
        }

    @property
    def reads_packed(self) -> bool:
        """Weights may stay as stored: no op would expand whole matrices at every call."""
        return all(
            name in self.backend_of and BACKENDS[self.backend_of[name]].reads_packed
            for name in _PRODUCTS
        )

    @property
    def waiting(self) -> list[str]:
        """Ops that a GPU has kernels for and that run otherwise, and may wait for the host.

        Where none runs by such kernels, a word for all of them.
        """
        able = {name for name, backend in BACKENDS.items() if backend.device != "cpu"}
        if able.isdisjoint(self.backend_of.values()):  # and Triton need not be installed
            return ["any op"]
        steps = BACKENDS["unfused"].implementations()
        return [
            name
            for name in BACKENDS["triton"].implementations()
            if self.backend_of.get(name) not in able
            and (name in self.backend_of or name in steps or name not in FUSED)
        ]

    def arrange_experts(self, w13: Weight, w2: Weight) -> tuple[Weight, Weight]:
        """Stacks of routed experts as this choice reads them, perhaps in the same memory.

        Raises:
            ConfigError: it cannot read such stacks.
        """
        backend = BACKENDS.get(self.backend_of.get("routed_experts", ""))
        if backend is None or not backend.arranges_experts:
            return w13, w2
        arrange = importlib.import_module(backend.module).arrange_experts
        arranged: tuple[Weight, Weight] = arrange(w13, w2)
        return arranged

    def compile_ahead(self, work: Callable[[], object]) -> None:
        """Compile side by side what some work will launch, rather than kernel after kernel.

        Nothing where some op runs otherwise: it would be given what kernels have not written.

        Args:
            work: see ``triton.ahead.compile_ahead``.
        """
        if set(self.backend_of.values()) != {"triton"}:
            return
        module = importlib.import_module(BACKENDS["triton"].module)
        if self.backend_of.keys() == module.IMPLEMENTATIONS.keys():
            with self.active():
                module.compile_ahead(work)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Ops run by this choice inside, by what ran them before afterwards."""
        global _active
        switch = batch_invariance.switch
        before, _active = _active, self._by_op
        was_invariant, switch.enabled = switch.enabled, self.batch_invariant
        try:
            yield
        finally:
            _active, switch.enabled = before, was_invariant


REFERENCE = Kernels({})


def choose(
    wanted: str,
    device: torch.device,
    dtype: torch.dtype,
    *,
    fusions: str = "all",
    batch_invariant: bool = False,
) -> Kernels:
    """The kernels that a setting asks for.

    Args:
        wanted: ``auto``, ``reference`` or a backend for all ops that it has, and ``OP=BACKEND`` for
            single ones, separated by commas.
        device: where tensors are.
        dtype: of activations.
        fusions: groups of ops that run as fused kernels, see ``fusions.separate``. Ops that are
            named in ``wanted`` do as that says.
        batch_invariant: a row's result must not depend on the other rows.

    Raises:
        ConfigError: something of that name does not exist, or cannot run here, or not so.
    """
    start = time.perf_counter()
    if batch_invariant and separate(fusions):
        raise ConfigError(
            f"batch_invariant needs all fusions, and fusions is {fusions!r}, perhaps by a preset "
            "of optimization; set it to 'all', or leave batch_invariant out"
        )
    words = wanted.split(",")
    general = [word for word in words if "=" not in word]
    if len(general) > 1:
        raise ConfigError(f"kernel_backend names {' and '.join(general)}; choose one for all ops")
    (name,) = general or ("auto",)
    if name == "auto":
        name = _best(device, dtype)
    chosen = {} if name == "reference" else dict.fromkeys(_runnable(name, device, dtype), name)
    chosen = unfuse(chosen, fusions)
    for word in words:
        if "=" in word:
            chosen |= _override(word, device, dtype)
    chosen = {op_name: backend for op_name, backend in chosen.items() if backend != "reference"}
    counts = Counter(chosen.get(op_name, "reference") for op_name in _references)
    logger.info(
        "kernels: %s; ready after %.1f s",
        ", ".join(f"{count} ops by {backend}" for backend, count in counts.items()),
        time.perf_counter() - start,
    )
    if batch_invariant:
        _require_batch_invariance(chosen)
    return Kernels(chosen, batch_invariant=batch_invariant)


def _require_batch_invariance(chosen: Mapping[str, str]) -> None:
    """Ops that no such backend has compute each value by itself anyway."""
    able = {name for name, backend in BACKENDS.items() if backend.batch_invariant}
    used = able.intersection(chosen.values())
    others = {
        f"{op_name} by {chosen.get(op_name, 'reference')}"
        for name in used
        for op_name in BACKENDS[name].implementations()
        if chosen.get(op_name) not in able
    }
    if others or not used:
        found = f"would run {', '.join(sorted(others))}" if others else "does not choose it"
        raise ConfigError(
            f"batch_invariant needs all ops by {' or '.join(sorted(able))}, and kernel_backend "
            f"{found}; change one of the two"
        )


def unfuse(backend_of: Mapping[str, str], fusions: str) -> dict[str, str]:
    """A choice of backends without the groups that a setting leaves out.

    Their ops run as separate steps: those of ``kernels.unfused``, or the definition.
    """
    ops, steps = separate(fusions), BACKENDS["unfused"].implementations()
    kept = {name: backend for name, backend in backend_of.items() if name not in ops}
    return kept | {name: "unfused" for name in backend_of if name in ops and name in steps}


def _best(device: torch.device, dtype: torch.dtype) -> str:
    """The first backend that can run, or the reference; says what would be faster."""
    for name, backend in BACKENDS.items():
        if backend.automatic and backend.device == device.type and dtype in backend.dtypes:
            obstacle = backend.obstacle(device, dtype)
            if obstacle is None:
                return name
            logger.info("kernels: %s would be faster, but %s", name, obstacle)
    return "reference"


def _override(word: str, device: torch.device, dtype: torch.dtype) -> dict[str, str]:
    op_name, _, name = word.partition("=")
    if op_name not in _references:
        raise ConfigError(
            f"kernel_backend has {word!r}, but no op is called {op_name!r}; "
            f"there are {', '.join(sorted(_references))}"
        )
    if name != "reference" and op_name not in _runnable(name, device, dtype):
        raise ConfigError(f"kernel_backend has {word!r}, but {name} does not implement {op_name}")
    return {op_name: name}


def _runnable(name: str, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """Implementations of a backend that was asked for by name."""
    if name not in BACKENDS:
        known = ", ".join(("auto", "reference", *BACKENDS))
        raise ConfigError(f"kernel_backend is {name!r}; choose one of {known}")
    backend = BACKENDS[name]
    if obstacle := backend.obstacle(device, dtype):
        raise ConfigError(f"kernel_backend {name!r} cannot run: {obstacle}")
    return backend.implementations()
