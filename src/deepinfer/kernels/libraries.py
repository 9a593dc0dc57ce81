"""Published kernel libraries: which releases are known to work, found without importing them.

Every adapter (`*/vendor.py`) asks here. A release beside the pinned one counts as absent: some
import and then fail at the first call.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Final

from deepinfer.errors import UnsupportedError
from deepinfer.kernels import nvcc

__all__ = ["LIBRARIES", "Library", "is_usable", "library", "why_not"]


@dataclass(frozen=True, slots=True)
class Library:
    """One library.

    distributions  names it is installed under, with the releases that work; the first is advised
    """

    distributions: Mapping[str, tuple[str, ...]]

    @property
    def advice(self) -> str:
        """What to install."""
        name, releases = next(iter(self.distributions.items()))
        return f"{name}=={releases[0]}"


LIBRARIES: Final[Mapping[str, Library]] = {
    "deep_gemm": Library({"sgl-deep-gemm": ("0.1.5",)}),
    "deep_select": Library({"tokenspeed-deepselect": ("1.0.0.post20260910",)}),
    "flash_mla": Library({"tokenspeed-flashmla": ("1.0.0.post20260615",)}),
    "humming": Library({"humming-kernels": ("0.1.20",)}),
    "tile_kernels": Library({"tile-kernels": ("2.1.0",)}),
}
"""Package -> library, in releases for torch 2.11 and CUDA 13.0 on Hopper."""


@cache
def why_not(package: str) -> str:
    """Say why a package cannot be used, "" when it can; nothing is imported.

    "nvcc" stands for the compiler of the kernels that are built at their first use.
    """
    if package == "nvcc":
        return "" if nvcc.available() else "nvcc is neither under CUDA_HOME nor on PATH"
    if find_spec(package) is None:
        return f"{package} is not installed"
    known = LIBRARIES.get(package)
    if known is None:
        return ""
    found: dict[str, str] = {}
    for name in known.distributions:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    if any(version in known.distributions[name] for name, version in found.items()):
        return ""
    seen = ", ".join(f"{n} {v}" for n, v in found.items()) or "a release without a record"
    return f"{package} is {seen}; adapters are written for {known.advice}"


def is_usable(package: str) -> bool:
    """Return whether a package is installed in a release that works."""
    return not why_not(package)


def library(package: str, module: str = "") -> Any:
    """Import a module of a library; raises UnsupportedError when the library cannot be used."""
    why = why_not(package)
    if why:
        known = LIBRARIES.get(package)
        advice = f"pip install {known.advice}" if known else f"install {package}"
        raise UnsupportedError(f"{why}: {advice}")
    return import_module(f"{package}.{module}" if module else package)
