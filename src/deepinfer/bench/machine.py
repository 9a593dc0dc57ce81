"""The machine and the software that a figure belongs to, never a host or person."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Final

import deepinfer

__all__ = [
    "cpu_count",
    "describe_card",
    "describe_machine",
    "describe_sources",
    "describe_versions",
    "peak_memory_bytes",
]

_CPU_INFO: Final = Path("/proc/cpuinfo")
_MEMORY_INFO: Final = Path("/proc/meminfo")
_OWN_STATUS: Final = Path("/proc/self/status")
_PACKAGES: Final = ("numpy", "tokenizers", "safetensors", "triton", "tilelang")


def describe_machine() -> dict[str, str | int]:
    """Return processor, processors that this process may use, memory, system."""
    name = next(_fields(_CPU_INFO, "model name"), "") or platform.processor()
    memory = next(_fields(_MEMORY_INFO, "MemTotal"), "")
    return {
        "cpu": name or platform.machine(),
        "cpu_count": cpu_count(),
        "memory_bytes": _kib(memory),
        "system": f"{platform.system()} {platform.machine()}",
    }


def describe_versions() -> dict[str, str]:
    """Return the versions that can change a figure; torch's with its build, such as +cpu."""
    import torch  # only here: the package's own version leaves some builds out

    found = {
        "deepinfer": deepinfer.__version__,
        "sources": describe_sources(),
        "python": platform.python_version(),
    }
    for package in _PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found | {"torch": torch.__version__}


@cache
def describe_sources() -> str:
    """Return twelve digits that say which sources of this package ran: a hash of all of them."""
    root = Path(deepinfer.__file__).parent
    digest = hashlib.sha256()
    for file in sorted(p for kind in ("*.py", "*.cu", "*.cuh") for p in root.rglob(kind)):
        digest.update(f"{file.relative_to(root).as_posix()}\0".encode())
        digest.update(hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()[:12]


def describe_card(device: object) -> dict[str, str | int]:
    """Return a card's name, processors and memory; nothing for a CPU."""
    import torch

    assert isinstance(device, torch.device)
    if device.type != "cuda":
        return {}
    found = torch.cuda.get_device_properties(device)
    return {
        "card": found.name,
        "card_processors": found.multi_processor_count,
        "card_memory_bytes": found.total_memory,
    }


def peak_memory_bytes() -> int:
    """Return the most memory that this process had resident since its program started.

    From the kernel's status where there is one: what `getrusage` says of a child begins with its
    parent's memory.
    """
    peak = _kib(next(_fields(_OWN_STATUS, "VmHWM"), ""))
    if peak:
        return peak
    import resource

    unit = 1 if platform.system() == "Darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def cpu_count() -> int:
    """Return how many processors this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _kib(text: str) -> int:
    """Read `123 kB`; 0 for anything else."""
    number, _, unit = text.partition(" ")
    return int(number) * 1024 if number.isdecimal() and unit == "kB" else 0


def _fields(file: Path, name: str) -> Iterator[str]:
    """Yield the values of `name: value` lines, none when there is no such file."""
    with suppress(OSError):
        for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
            key, colon, value = line.partition(":")
            if colon and key.strip() == name:
                yield value.strip()
