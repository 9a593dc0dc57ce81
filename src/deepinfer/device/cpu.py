"""The plain CPU."""

from __future__ import annotations

import ctypes
import os
import platform
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Final

import torch

from deepinfer.device.base import Capability

__all__ = ["CpuDevice"]

# Parameters of glibc's allocator: from which size a block is mapped by itself, and how much free
# memory at the top of the heap stays with the process.
_M_MMAP_THRESHOLD: Final = -3
_M_TRIM_THRESHOLD: Final = -1
_LARGEST_HEAP_BLOCK: Final = 32 << 20  # the most that glibc accepts
_KEPT_FREE_BYTES: Final = 64 << 20


class CpuDevice:
    """Everything runs where it is called; there is nothing to wait for.

    Building one lets the process keep up to 64 MiB of freed memory, which the temporaries of the
    next op take: fetched from the system anew they cost more than what is computed in them.
    """

    def __init__(self) -> None:
        _keep_freed_memory()
        self.torch_device = torch.device("cpu")
        self.capability = Capability(
            name=platform.processor() or platform.machine(),
            arch="cpu",
            total_bytes=_memory("MemTotal", "SC_PHYS_PAGES"),
        )

    def available_bytes(self) -> int:
        """Return the memory that the system can still give."""
        return _memory("MemAvailable", "SC_AVPHYS_PAGES")

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a scope without effect."""
        return nullcontext()

    def bind_thread(self) -> None:
        """Do nothing."""

    def synchronize(self) -> None:
        """Do nothing."""


def _keep_freed_memory() -> None:
    """Set glibc's allocator; other C libraries are left as they are."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return
    mallopt(_M_MMAP_THRESHOLD, _LARGEST_HEAP_BLOCK)
    mallopt(_M_TRIM_THRESHOLD, _KEPT_FREE_BYTES)


def _memory(field: str, sysconf: str) -> int:
    """Read a size from the kernel's table, or from sysconf where there is none."""
    table = Path("/proc/meminfo")
    if table.exists():
        for line in table.read_text().splitlines():
            if line.startswith(f"{field}:"):
                return int(line.split()[1]) * 1024
    return os.sysconf(sysconf) * os.sysconf("SC_PAGE_SIZE")
