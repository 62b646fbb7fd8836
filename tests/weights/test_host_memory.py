"""Host memory for tables: what was copied there, whatever pages the system grants."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from leadline.core.errors import ConfigError
from leadline.weights import host_memory
from leadline.weights.host_memory import HostMemory, available_bytes, shared_memory

WIDTHS = [(1,), (256, 8), (1, 3)]


def arrays(*sizes: int) -> list[np.ndarray[Any, Any]]:
    return [np.random.randint(0, 256, size, dtype=np.uint8) for size in sizes]


@pytest.mark.parametrize("huge_pages", [False, True], ids=["small_pages", "huge_pages"])
@pytest.mark.parametrize("widths", WIDTHS, ids=str)
def test_rows_of_arrays_lie_side_by_side(
    widths: tuple[int, ...], huge_pages: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_memory, "_PIECE", 1000)
    parts = [part.reshape(1003, -1) for part in arrays(*(1003 * width for width in widths))]
    memory = HostMemory(1003 * sum(widths), huge_pages=huge_pages)
    memory.fill(parts, "parts")
    assert np.array_equal(memory.bytes, np.concatenate(parts, axis=1).ravel())


def test_arrays_of_any_type_and_shape_are_copied_as_bytes() -> None:
    part = np.arange(6, dtype=np.float32).reshape(2, 3)
    memory = HostMemory(part.nbytes)
    memory.fill([part], "part")
    assert memory.bytes.tobytes() == part.tobytes()


def test_pages_are_as_large_as_the_system_grants() -> None:
    wished, refused = HostMemory(8 * 2**20), HostMemory(8 * 2**20, huge_pages=False)
    for memory in (wished, refused):
        memory.bytes[:] = 1
    assert 0 <= wished.huge_share() <= 1
    assert refused.huge_share() == 0


def test_nothing_written_is_no_share_of_huge_pages() -> None:
    assert HostMemory(2**20).huge_share() == 0


def test_more_memory_than_addresses_is_an_error_that_says_what_to_do() -> None:
    with pytest.raises(ConfigError, match=r"1125899\.9 GB of memory .* engram_tables to 'mmap'"):
        HostMemory(2**50)


def test_more_than_a_file_system_has_is_an_error_before_anything_is_written(
    tmp_path: Path,
) -> None:
    with pytest.raises(ConfigError, match=r"table cannot be had: only .* GB are free there"):
        HostMemory(2**60, file=tmp_path / "table")
    assert not os.path.getsize(tmp_path / "table")


def test_a_missing_folder_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"shared_memory is '.*absent', which is no folder"):
        shared_memory(tmp_path / "absent/table", arrays(5), "parts")


def test_another_process_reads_the_same_memory(tmp_path: Path) -> None:
    file = tmp_path / "table.table"
    (part,) = arrays(100_000)
    memory = shared_memory(file, [part], "part")
    memory.bytes[7] = 123  # of the shared copy alone
    program = (
        "import sys, numpy; from pathlib import Path\n"
        "from leadline.weights.host_memory import shared_memory\n"
        "memory = shared_memory(Path(sys.argv[1]), [numpy.zeros(100_000, numpy.uint8)], '')\n"
        "print(memory.bytes[7], memory.bytes.astype(int).sum())\n"
        "memory.bytes[8] = 45"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program, str(file)], capture_output=True, text=True, check=True
    )
    part[7] = 123
    assert ran.stdout.split() == ["123", str(part.astype(int).sum())]
    assert memory.bytes[8] == 45


def test_a_process_waits_for_another_that_copies(tmp_path: Path) -> None:
    file = tmp_path / "table.table"
    parts = arrays(5000)
    with (
        ThreadPoolExecutor(1) as threads,
        file.with_suffix(".lock").open("w") as lock,
    ):
        fcntl.flock(lock, fcntl.LOCK_EX)
        waiting = threads.submit(shared_memory, file, [np.zeros(5000, np.uint8)], "parts")
        HostMemory(5000, file=file).fill(parts, "parts")
        assert not waiting.done()
        fcntl.flock(lock, fcntl.LOCK_UN)
        assert np.array_equal(waiting.result().bytes, parts[0])


def test_what_a_dead_process_left_half_copied_is_copied_again(tmp_path: Path) -> None:
    file = tmp_path / "table.table"
    HostMemory(9000, file=file.with_suffix(".partial")).bytes[:100] = 1
    parts = arrays(9000)
    assert np.array_equal(shared_memory(file, parts, "parts").bytes, parts[0])


class Driver:
    """CUDA's calls, written down."""

    cudaError = SimpleNamespace(success=0)

    def __init__(self, status: int = 0) -> None:
        self.status = status
        self.registered: list[int] = []

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        assert (nbytes, flags) == (4096, 0)
        self.registered.append(address)
        return self.status

    def cudaHostUnregister(self, address: int) -> None:
        self.registered.remove(address)

    def cudaGetErrorString(self, status: int) -> str:
        return f"error {status}"


def test_a_driver_that_registers_nothing_is_quoted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "cudart", lambda: Driver(status=2))
    with pytest.raises(ConfigError, match=r"0\.0 GB .*: error 2; .*memlock"):
        HostMemory(4096).register()


def test_memory_is_registered_as_long_as_tensors_over_it_live(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = Driver()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    memory = HostMemory(4096)
    memory.register()
    part = torch.from_numpy(memory.bytes).split([96, 4000])[1].view(100, 40)
    address = memory.address
    del memory
    assert driver.registered == [address]
    assert not part.any()
    del part
    assert driver.registered == []


def test_available_memory_is_some_of_what_there_is() -> None:
    installed = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert 0 < available_bytes() <= installed


@pytest.mark.gpu
@pytest.mark.parametrize("shared", [False, True], ids=["private", "shared"])
def test_registered_memory_is_pinned_and_its_addresses_can_be_registered_again(
    shared: bool,
) -> None:
    with TemporaryDirectory(dir="/dev/shm") as folder:  # drivers register no memory of disks
        for _ in range(3):
            memory = HostMemory(2**22, file=Path(folder) / "table" if shared else None)
            memory.register()
            assert torch.from_numpy(memory.bytes).is_pinned()
            del memory
