"""What all kernel tests share."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Start every test with one thread: faster on small inputs, and leave no trace."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def host_library(built_once: Callable[..., Path]) -> Callable[[str, str], ctypes.CDLL]:
    """Build a source of this folder, a kernel on a CPU, and load it; skip where g++ is missing."""

    def build(source: str, optimize: str) -> ctypes.CDLL:
        compiler = shutil.which("g++")
        if compiler is None:
            pytest.skip("g++ is not installed")
        # Without -fno-gnu-unique two such libraries in a process share their fibers.
        flags = (optimize, "-std=c++17", "-shared", "-fPIC", "-fno-gnu-unique", f"-I{HERE}")

        def make(folder: Path) -> None:
            done = subprocess.run(
                [compiler, *flags, "-o", str(folder / "host.so"), str(HERE / source)],
                capture_output=True,
                text=True,
                check=False,
            )
            assert not done.returncode, done.stderr[-3000:]

        return ctypes.CDLL(str(built_once(source, make) / "host.so"))

    return build
