"""Host memory that kernels of a GPU read from where it lies, in huge pages where there are any.

A row read over the bus costs a translation of its page's address, so that large pages decide how
fast rows of a large table come (kernels.md 12.2). All about them is a wish: a system that grants
none gives the same memory in small ones. Linux only.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import re
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from leadline.core.errors import ConfigError
from leadline.weights.progress import progress_bar

Bytes = npt.NDArray[np.uint8]

GB = 10**9
_HUGE_PAGE = 2 * 2**20
_PIECE = 32 * _HUGE_PAGE  # what a thread copies at a time
_MAX_THREADS = 16
_MADV_COLLAPSE = 25  # since Linux 6.1; Python has no name for it
_HUGE_FIELDS = ("AnonHugePages:", "ShmemPmdMapped:", "FilePmdMapped:")
_HUGETLB_FIELDS = ("Shared_Hugetlb:", "Private_Hugetlb:")  # these are no part of Rss


class HostMemory:
    """Zeroed bytes of this process, or of all processes that map the same file.

    Attributes:
        bytes: ``[nbytes]``, all of it.

    Args:
        nbytes: how many.
        file: on a file system in memory (tmpfs, hugetlbfs); made where there is none. None is
            memory of this process alone.
        huge_pages: False asks for small pages, for comparisons.

    Raises:
        ConfigError: there is not that much memory.
    """

    def __init__(self, nbytes: int, *, file: Path | None = None, huge_pages: bool = True) -> None:
        self.nbytes = nbytes
        try:
            self._map = _map_private(nbytes) if file is None else _map_shared(nbytes, file)
        except OSError as error:
            place = "memory" if file is None else str(file)
            raise ConfigError(
                f"{nbytes / GB:.1f} GB of {place} cannot be had: {error.strerror}; free memory, "
                "raise the limit of the container, or set engram_tables to 'mmap'"
            ) from error
        # A fork would copy every page that a driver holds.
        self._advise(mmap.MADV_DONTFORK)
        # Before anything is written: pages are chosen at their first use.
        self._advise(mmap.MADV_HUGEPAGE if huge_pages else mmap.MADV_NOHUGEPAGE)
        self.bytes: Bytes = np.frombuffer(self._map, np.uint8, nbytes)

    @property
    def address(self) -> int:
        return int(self.bytes.ctypes.data)

    def fill(self, parts: Sequence[npt.NDArray[Any]], description: str) -> None:
        """Copy arrays of as many rows, each row's parts side by side, in several threads."""
        bar = progress_bar(self.nbytes, description)
        with ThreadPoolExecutor(min(_MAX_THREADS, os.cpu_count() or 1)) as threads:
            for copied in threads.map(_copy, *zip(*self._pieces(parts), strict=True)):
                if bar is not None:
                    bar.update(copied)
        if bar is not None:
            bar.close()
        self.collapse()

    def collapse(self) -> None:
        """Have it moved to, and mapped by, huge pages where that was not done at first use."""
        self._advise(_MADV_COLLAPSE)

    def huge_share(self) -> float:
        """Of what was written, the share that lies in huge pages."""
        huge = resident = 0
        for field, kilobytes in self._smaps():
            huge += kilobytes if field in (*_HUGE_FIELDS, *_HUGETLB_FIELDS) else 0
            resident += kilobytes if field in ("Rss:", *_HUGETLB_FIELDS) else 0
        return huge / max(resident, 1)

    def register(self) -> None:
        """Let the current GPU's kernels read it, for as long as tensors over ``bytes`` live.

        Triton takes such tensors as it takes those of the GPU.

        Raises:
            ConfigError: the driver refuses.
        """
        runtime = torch.cuda.cudart()
        status = runtime.cudaHostRegister(self.address, self.nbytes, 0)
        if status != runtime.cudaError.success:
            raise ConfigError(
                f"the driver does not register {self.nbytes / GB:.1f} GB of host memory with the "
                f"GPU: {runtime.cudaGetErrorString(status)}; allow it to lock that much (ulimit -l "
                "unlimited, --ulimit memlock=-1 of a container), or set engram_tables to 'mmap'"
            )
        # Undone before the memory is given back, whose addresses may be given out again.
        weakref.finalize(self.bytes, runtime.cudaHostUnregister, self.address).atexit = False

    def _advise(self, advice: int) -> None:
        with contextlib.suppress(OSError):  # unknown to this kernel, or to this kind of memory
            self._map.madvise(advice)

    def _pieces(self, parts: Sequence[npt.NDArray[Any]]) -> Iterator[tuple[Bytes, Bytes]]:
        """Where to copy what, in equal pieces."""
        columns: list[Bytes] = [part.reshape(len(part), -1).view(np.uint8) for part in parts]
        width = sum(column.shape[1] for column in columns)
        records = self.bytes.reshape(-1, width)
        step = max(1, _PIECE // width)
        for first in range(0, len(records), step):
            start = 0
            for column in columns:
                end = start + column.shape[1]
                yield records[first : first + step, start:end], column[first : first + step]
                start = end

    def _smaps(self) -> Iterator[tuple[str, int]]:
        """What Linux says of the mappings that hold it, in kB; these may reach beyond it."""
        inside = False
        for line in Path("/proc/self/smaps").read_text().splitlines():
            if bounds := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
                first, end = (int(bound, 16) for bound in bounds.groups())
                inside = first < self.address + self.nbytes and end > self.address
            elif inside and line.endswith("kB"):
                field, kilobytes, _ = line.split()
                yield field, int(kilobytes)


def shared_memory(file: Path, parts: Sequence[npt.NDArray[Any]], description: str) -> HostMemory:
    """Rows of arrays, side by side, in memory that processes of this host share by a file's name.

    The first process copies them while others wait; the file stays when all have ended, and a later
    process finds it.

    Args:
        file: on a file system in memory; its name says what the arrays are.
        parts: arrays of as many rows.
        description: for the bar.

    Raises:
        ConfigError: the folder is missing, or too small.
    """
    nbytes = sum(part.nbytes for part in parts)
    if not file.parent.is_dir():
        raise ConfigError(
            f"engram_shared_memory is {str(file.parent)!r}, which is no folder; name one on a file "
            "system in memory, such as /dev/shm"
        )
    with file.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if file.exists():
            memory = HostMemory(nbytes, file=file)
            memory.collapse()
            return memory
        partial = file.with_suffix(".partial")
        memory = HostMemory(nbytes, file=partial)
        memory.fill(parts, description)
        partial.rename(file)
    return memory


def available_bytes() -> int:
    """Memory that can still be taken: of the machine, or of this process's container."""
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    available = int(fields["MemAvailable"].split()[0]) * 1024
    with contextlib.suppress(OSError, ValueError):  # there is no limit, or none of this kind
        name = Path("/proc/self/cgroup").read_text().strip().rpartition("0::/")[2]
        group = Path("/sys/fs/cgroup") / name
        limit, used = (int((group / f"memory.{what}").read_text()) for what in ("max", "current"))
        kinds = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        cached = int(kinds["active_file"]) + int(kinds["inactive_file"])
        available = min(available, limit - used + cached)
    return available


def _map_private(nbytes: int) -> mmap.mmap:
    return mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def _map_shared(nbytes: int, file: Path) -> mmap.mmap:
    """All of a file, which is made that long where it is shorter."""
    system = os.statvfs(file.parent)
    unit = max(system.f_bsize, _HUGE_PAGE)  # a file of huge pages has whole ones
    size = -(-nbytes // unit) * unit
    with open(os.open(file, os.O_RDWR | os.O_CREAT, 0o600), "r+b") as stream:
        status = os.fstat(stream.fileno())
        missing, free = size - status.st_blocks * 512, system.f_bavail * system.f_frsize
        # Asked for beforehand: a write that finds no memory ends the process. A file system without
        # blocks has no bounds of its own, and a hugetlbfs looks for its pages when mapped.
        if system.f_blocks and missing > free:
            raise OSError(errno.ENOSPC, f"only {free / GB:.1f} GB are free there")
        if status.st_size < size:
            stream.truncate(size)
        return mmap.mmap(stream.fileno(), size)


def _copy(target: Bytes, source: Bytes) -> int:
    np.copyto(target, source)
    return source.nbytes
