"""What is done beside the event loop."""

from __future__ import annotations

import asyncio
import threading

import pytest

from leadline.serving.context import prepare


@pytest.mark.parametrize(
    ("num_bytes", "is_beside"), [(100, False), (5_000_000, True)], ids=["small", "5 MB"]
)
def test_c53_a_large_request_is_prepared_beside_the_loop(num_bytes: int, is_beside: bool) -> None:
    thread = asyncio.run(prepare(bytes(num_bytes), threading.current_thread))
    assert (thread is not threading.current_thread()) == is_beside
