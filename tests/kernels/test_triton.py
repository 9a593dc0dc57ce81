"""Triton kernels without a card: run by the interpreter, and compiled for three generations."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

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


class _Kernel:
    """Takes notes of what is compiled and of what is launched as compiled."""

    arg_names = ("x", "size", "factor", "BLOCK", "FLAG")

    def __init__(self) -> None:
        def body() -> None:
            in_turn()  # type: ignore[name-defined]  # noqa: F821

        self.fn, self.compiled, self.launched = body, [], []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., object]:
        def compile_(*arguments: object, **constants: object) -> object:
            self.compiled.append((arguments, constants))
            kernel = self

            class Compiled:
                def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
                    return lambda *given: kernel.launched.append((grid, given))

            return Compiled()

        return compile_


@needs_triton
def test_what_was_compiled_is_launched_for_arguments_of_the_same_kinds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from triton._C.libtriton import native_specialize_impl
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import make_backend

    from deepinfer.kernels import tiles

    backend = make_backend(GPUTarget("cuda", 90, 32))
    monkeypatch.setattr(tiles, "_new_cards", lambda: (True,))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    kernel = _Kernel()
    x = torch.zeros(64)
    launch = partial(tiles.launch, kernel, (3,), FLAG=True, BLOCK=8)
    launch(x, 5, 1.5)
    launch(x, 7, 2.5)
    assert kernel.launched == [((3, 1, 1), (x, 7, 2.5, 8, True))]
    assert kernel.compiled == [((x, 5, 1.5), {"FLAG": True, "BLOCK": 8, "launch_pdl": True})]
    tiles.launch(kernel, (3,), x, 7, 2.5, FLAG=True, BLOCK=16)
    assert len(kernel.compiled) == 2
    wide = 1 << 31
    sizes = (0, 1, 2, 15, 16, 48, -16, -1, wide - 1, wide, wide + 16, -wide, -wide - 16, True, None)
    tensors = (x, x[1:], x[4:], x.bfloat16(), x.long(), None)
    given = [*((x, size, 1.0) for size in sizes), *((t, 3, 1.0) for t in tensors), (x, 3, 2)]

    def kinds(arguments: tuple[object, ...]) -> list[object]:
        return [native_specialize_impl(backend, value, False, True, True) for value in arguments]

    for one in given:
        for other in given:
            kernel = _Kernel()
            tiles.launch(kernel, (1,), *one, BLOCK=8)
            tiles.launch(kernel, (1,), *other, BLOCK=8)
            assert len(kernel.compiled) == 2 or kinds(one) == kinds(other), (one, other)
    assert len(kernel.launched) == 1, "the same arguments once more"
