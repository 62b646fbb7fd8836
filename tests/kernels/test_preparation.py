"""What kernels cost at a start is told once."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest

from leadline.kernels import preparation

triton = pytest.importorskip("triton")


def compile_one(*, cache_hit: bool) -> None:
    """As Triton's compiler tells of it."""
    triton.knobs.compilation.listener(
        src=None,
        metadata={},
        metadata_group={},
        times=SimpleNamespace(total=1_500_000),
        cache_hit=cache_hit,
    )


def test_one_line_tells_what_was_compiled_and_tuned(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO), preparation.logged():
        for cache_hit in (False, True, False):
            compile_one(cache_hit=cache_hit)
        preparation.add_tuned(2.0)
    assert [record.getMessage() for record in caplog.records] == [
        "kernels: 2 compiled (3.0 s over all threads), 1 tuned (in 2.0 s); later starts find them"
    ]


def test_nothing_is_told_where_all_was_there(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        for _ in range(2):  # what another start did does not count
            caplog.clear()
            with preparation.logged():
                compile_one(cache_hit=True)
    assert not caplog.records


def test_another_listener_is_there_again_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[object] = []
    monkeypatch.setattr(triton.knobs.compilation, "listener", heard.append)
    with preparation.logged():
        pass
    assert triton.knobs.compilation.listener == heard.append
