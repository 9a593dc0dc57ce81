"""CUDA C++ sources, built by nvcc at first use and loaded through ctypes.

A source stands beside the module that calls it and exports `extern "C"` launchers that return a
CUDA error code and take the stream last. The built library goes into the cache folder under a name
made of everything that decides its bits, so a changed source or compiler builds anew.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from deepinfer.config.load import cache_dir
from deepinfer.errors import UnsupportedError

__all__ = [
    "ARCH", "FLAGS", "TARGETS", "available", "call", "command", "load", "pointer", "processors",
    "target",
]  # fmt: skip

ARCH: Final = "90a"
TARGETS: Final = {(9, 0): ARCH, (10, 0): "100a", (10, 3): "103a"}
"""Compute capability -> what is built for it. Only sources of ops that `table.py` lists for SM100
build there; no card of that kind has run one."""
FLAGS: Final = ("-O3", "-std=c++17", "-lineinfo")


def _compiler() -> str | None:
    home = os.environ.get("CUDA_HOME", "")
    beside = Path(home) / "bin" / "nvcc"
    return str(beside) if home and beside.is_file() else shutil.which("nvcc")


def available() -> bool:
    """Whether nvcc is found: under CUDA_HOME, or on the path."""
    return _compiler() is not None


def command(source: Path, target: Path, *options: str, arch: str = ARCH) -> list[str]:
    """Return the command that builds a source into a shared library (or what `options` say)."""
    compiler = _compiler()
    if compiler is None:
        raise UnsupportedError(
            f"{source.name} needs nvcc, which is neither under CUDA_HOME nor on PATH: install the "
            "CUDA toolkit, or choose another implementation of this op"
        )
    code = f"arch=compute_{arch},code=sm_{arch}"
    kind = options or ("-shared", "-Xcompiler", "-fPIC")
    return [compiler, "-gencode", code, *FLAGS, *kind, "-o", str(target), str(source)]


@cache
def target() -> str:
    """Return what `load` builds for: the card's own target, Hopper's where there is none."""
    if not torch.cuda.is_available():
        return ARCH
    return TARGETS.get(torch.cuda.get_device_capability(), ARCH)


@cache
def load(source: Path) -> ctypes.CDLL:
    """Return the library of a source, built where the cache folder lacks it.

    Raises UnsupportedError without nvcc, or with the compiler's words where it fails.
    """
    headers = [p for folder in source.parents[:2] for p in sorted(folder.glob("*.cuh"))]
    parts = [p.read_bytes() for p in (source, *headers)]
    version = subprocess.run(
        [*command(source, source)[:1], "--version"], capture_output=True, check=False
    ).stdout
    arch = target()
    digest = hashlib.sha256(b"\0".join([*parts, version, repr((arch, FLAGS)).encode()]))
    folder = cache_dir() / "cuda"
    built = folder / f"{source.stem}-{digest.hexdigest()[:16]}.so"
    if not built.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as made:  # ranks may build at the same time
            made_here = Path(made) / built.name
            done = subprocess.run(
                command(source, made_here, arch=arch), capture_output=True, text=True, check=False
            )
            if done.returncode:
                raise UnsupportedError(f"nvcc does not build {source.name}:\n{done.stderr[-4000:]}")
            made_here.replace(built)
    return ctypes.CDLL(str(built))


@cache
def processors(device: torch.device | int | None) -> int:
    """Return the number of multiprocessors of a card."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def pointer(tensor: Tensor | None) -> ctypes.c_void_p:
    """Return a tensor's address, null for None."""
    return ctypes.c_void_p(0 if tensor is None else tensor.data_ptr())


def call(library: ctypes.CDLL, name: str, device: torch.device, *arguments: object) -> None:
    """Call a launcher on the device's current stream. Python ints go as 64-bit, floats as double.

    Raises UnsupportedError with the error's number where the launch fails.
    """
    function = library[name]
    passed = [
        ctypes.c_longlong(value)
        if isinstance(value, int)
        else ctypes.c_double(value)
        if isinstance(value, float)
        else pointer(value)
        if value is None or isinstance(value, Tensor)
        else value
        for value in arguments
    ]
    stream = ctypes.c_void_p(torch.cuda.current_stream(device).cuda_stream)
    with torch.cuda.device(device):
        status = function(*passed, stream)
    if status:
        raise UnsupportedError(f"{name} failed with CUDA error {status}")
