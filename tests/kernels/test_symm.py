"""The exchange through shared memory without cards: ranks of one process, and compiled."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("symm_run.py")


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize("arguments", [("run",), ("compile", "90")])
def test_symm(arguments: tuple[str, ...]) -> None:
    """Rows and returns land where they belong, bit for bit; kernels become binaries for sm_90."""
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(PROGRAM), *arguments],
        env={**os.environ, "PYTHONPATH": f"{root / 'src'}{os.pathsep}{root}",
             "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0 and not done.stdout.strip(), done.stdout + done.stderr[-3000:]
