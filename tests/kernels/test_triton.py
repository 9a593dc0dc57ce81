"""Triton kernels without a card: run by the interpreter, and compiled for three generations."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from deepinfer.device.base import Capability
from deepinfer.kernels import ops
from deepinfer.kernels.ops import choose
from deepinfer.kernels.table import TABLE

PROGRAM = Path(__file__).with_name("triton_run.py")
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")


def start(*arguments: str) -> str:
    root = Path(__file__).parents[2]
    paths = f"{root / 'src'}{os.pathsep}{root}"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(PROGRAM), *arguments],
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@needs_triton
def test_kernels_equal_the_reference_and_rows_do_not_depend_on_their_batch(seed: int) -> None:
    out = start("run", str(seed))
    assert all(f"ran {op} " in out for op in TABLE if op not in ("cache_store", "entry_store"))


@needs_triton
def test_kernels_compile() -> None:
    """A binary from ptxas for every kernel, set of types and generation; nothing runs."""
    assert int(start("compile", "80", "90", "100").split()[0]) >= 30


def card(arch: str) -> Capability:
    return Capability(name="card", arch=arch, total_bytes=1 << 34)


@pytest.mark.parametrize("arch", ["sm80", "sm89", "sm90", "sm100", "sm120"])
def test_cards_take_triton(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "is_usable", lambda name: True)
    own = {"triton", "cuda", "cublas"} if arch == "sm90" else {"triton"}
    assert {choose(op, card(arch)).name for op in TABLE} == own
    assert {choose(op, card(arch), only_reference=True).name for op in TABLE} == {"reference"}


def test_without_triton_or_on_old_cards_the_reference_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    assert {choose(op, card("sm75")).name for op in TABLE} == {"reference"}
    monkeypatch.setattr(ops, "is_usable", lambda name: False)
    assert {choose(op, card("sm90")).name for op in TABLE} == {"reference"}
