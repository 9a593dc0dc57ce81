"""CUDA sources that SM100 can have as they are: built for it by nvcc, listed, and not chosen."""

from __future__ import annotations

import re
import subprocess
from importlib import import_module
from pathlib import Path

import pytest
import torch

from deepinfer.device.base import Capability
from deepinfer.kernels import nvcc, ops
from deepinfer.kernels.ops import choose
from deepinfer.kernels.packed import tokens
from deepinfer.kernels.table import TABLE

LINES = {
    (op, line.module): line
    for op, lines in TABLE.items()
    for line in lines
    if line.needs == "nvcc" and "sm100" in line.archs
}
HOPPERS_OWN = re.compile(r"wgmma|setmaxnreg")


def source_of(module: str) -> Path | None:
    """The source that a module calls, None where others stand between them."""
    found = import_module(f"deepinfer.kernels.{module}")
    return getattr(found, "SOURCE", None) or getattr(getattr(found, "sm90", None), "SOURCE", None)


def text_of(source: Path) -> str:
    """A source and what it includes of ours."""
    text = source.read_text()
    for name in re.findall(r'#include "([^"]+)"', text):
        if (source.parent / name).is_file():
            text += text_of(source.parent / name)
    return text


SOURCES = {s for _, module in LINES if (s := source_of(module))} | {tokens.SOURCE}


def test_every_source_without_hoppers_own_instructions_is_listed() -> None:
    """Else: name its module in `_NO_WGMMA` of the table."""
    for op, lines in TABLE.items():
        for line in lines:
            if line.needs == "nvcc" and "sm90" in line.archs:
                source = source_of(line.module)
                own = source is None or HOPPERS_OWN.search(text_of(source))
                assert own or (op, line.module) in LINES, line


@pytest.mark.skipif(not nvcc.available(), reason="nvcc is not installed")
def test_they_build_for_sm100(tmp_path: Path) -> None:
    running = {
        source: subprocess.Popen(
            nvcc.command(source, tmp_path / f"{i}.cubin", "-cubin", "-Xptxas", "-v", arch="100a"),
            stderr=subprocess.PIPE,
            text=True,
        )
        for i, source in enumerate(sorted(SOURCES))
    }
    told = {source: process.communicate()[1] for source, process in running.items()}
    for source, process in running.items():
        assert process.returncode == 0, told[source]
        spilled = re.findall(r"(\d+) bytes spill", told[source])
        assert spilled and set(spilled) == {"0"}, source
    assert all(path.stat().st_size > 1000 for path in tmp_path.iterdir())


@pytest.mark.parametrize("arch", ["sm100", "sm103"])
def test_none_is_chosen_there(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "is_usable", lambda name: True)
    card = Capability(name="card", arch=arch, total_bytes=1 << 34)
    assert {op for op, _ in LINES} >= {"select_topk", "hyper_site", "round_trip"}
    for op, _ in LINES:
        assert choose(op, card).name == "triton"
        (line,) = (e for e in TABLE[op] if e.needs == "nvcc" and arch in e.archs)
        assert line.name == "cuda sm100" and not line.chosen and "none has run" in line.why


def test_a_build_is_for_the_card_that_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    for capability, wanted in (((9, 0), "90a"), ((10, 0), "100a"), ((8, 0), "90a")):
        nvcc.target.cache_clear()
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda c=capability: c)
        assert nvcc.target() == wanted
    nvcc.target.cache_clear()
