"""Numbers on their way between host and device."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from leadline.core.errors import ConfigError
from leadline.kernels.transfer import Download, page_locked, upload

CPU = torch.device("cpu")


def test_lists_arrays_and_columns_are_uploaded_as_the_wanted_type() -> None:
    assert upload([3, 1], CPU).tolist() == [3, 1]
    assert upload([3, 1], CPU).dtype == torch.int64
    rows, shares = upload([(1, 2), (0.5, 0.25)], CPU, torch.float64)
    assert (rows.tolist(), shares.tolist()) == ([1.0, 2.0], [0.5, 0.25])
    assert upload(np.array([1, -1], np.int32), CPU, torch.int32).dtype == torch.int32


def test_a_download_on_a_cpu_is_there() -> None:
    tensor = torch.arange(3)
    assert Download(tensor).wait() is tensor


def test_memory_that_cannot_be_locked_is_named_with_what_makes_it_large(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object, **options: object) -> None:
        assert options == {"dtype": torch.int64, "pin_memory": True}
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(torch, "empty", refuse)
    with pytest.raises(
        ConfigError, match=r"16\.0 MB of page-locked .*max_num_batched_tokens or max"
    ):
        page_locked((2, 10**6), torch.int64)


@pytest.mark.gpu
def test_a_download_keeps_what_was_there_when_it_was_launched() -> None:
    device = torch.device("cuda")
    tensor = upload(range(5), device)
    torch.cuda._sleep(10**7)
    numbers = Download(tensor)
    tensor.fill_(-1)
    assert numbers.wait().tolist() == list(range(5))
