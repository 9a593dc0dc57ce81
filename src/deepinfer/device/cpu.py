"""The plain CPU."""

from __future__ import annotations

import os
import platform
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch

from deepinfer.device.base import Capability

__all__ = ["CpuDevice"]


class CpuDevice:
    """Everything runs where it is called; there is nothing to wait for."""

    def __init__(self) -> None:
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

    def synchronize(self) -> None:
        """Do nothing."""


def _memory(field: str, sysconf: str) -> int:
    """Read a size from the kernel's table, or from sysconf where there is none."""
    table = Path("/proc/meminfo")
    if table.exists():
        for line in table.read_text().splitlines():
            if line.startswith(f"{field}:"):
                return int(line.split()[1]) * 1024
    return os.sysconf(sysconf) * os.sysconf("SC_PAGE_SIZE")
