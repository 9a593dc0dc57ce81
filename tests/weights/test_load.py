"""Torch tensors over the mapped file, stacking, and the search for weights that are not finite."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from deepinfer.errors import CheckpointError
from deepinfer.weights.load import TensorSource, check_steering, find_nonfinite
from deepinfer.weights.reader import Checkpoint

if TYPE_CHECKING:
    from conftest import Folder

Make = Callable[[], "Folder"]


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def test_tensors_equal_those_of_the_format_library(golden_checkpoint: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tensors = TensorSource(Checkpoint.open(golden_checkpoint)).as_dict()
    expected: dict[str, torch.Tensor] = {}
    for file in golden_checkpoint.glob("*.safetensors"):
        expected |= load_file(file)
    assert tensors.keys() == expected.keys()
    for name, tensor in tensors.items():
        assert tensor.shape == expected[name].shape
        assert torch.equal(raw(tensor), raw(expected[name])), name


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("layers.0.hc_attn_fn", torch.float32),
        ("norm.weight", torch.bfloat16),
        ("layers.0.attn.wq_a.weight", torch.float8_e4m3fn),
        ("layers.0.attn.wq_a.scale", torch.uint8),
        ("layers.0.ffn.experts.0.w1.weight", torch.uint8),
        ("layers.0.ffn.experts.0.w1.scale", torch.uint8),
    ],
)
def test_dtypes(tiny_folder: Path, name: str, dtype: torch.dtype) -> None:
    source = TensorSource(Checkpoint.open(tiny_folder))
    assert source.get(name).dtype == source[name].dtype == dtype
    assert name in source and "nonsense" not in source


def test_tensors_share_the_mapped_bytes(tiny_folder: Path) -> None:
    checkpoint = Checkpoint.open(tiny_folder)
    source = TensorSource(checkpoint)
    address = checkpoint.bytes("embed.weight").__array_interface__["data"][0]
    assert source["embed.weight"].data_ptr() == source["embed.weight"].data_ptr() == address


def test_tensors_outlive_the_source(tiny_folder: Path) -> None:
    source = TensorSource(Checkpoint.open(tiny_folder))
    kept, total = source["embed.weight"], source["embed.weight"].float().sum()
    del source
    assert kept.float().sum() == total


def test_stack_copies_in_order(tiny_folder: Path) -> None:
    source = TensorSource(Checkpoint.open(tiny_folder))
    for suffix in ("w1.weight", "w1.scale", "w2.weight"):
        names = [f"layers.1.ffn.experts.{e}.{suffix}" for e in (4, 0, 2)]
        stacked = source.stack(names)
        assert torch.equal(stacked, torch.stack([source[n] for n in names]))
    copy = source.copy("norm.weight")
    assert torch.equal(copy, source["norm.weight"])
    copy.zero_()  # its own memory
    assert source["norm.weight"].float().abs().sum() > 0


def poke(folder: Folder, name: str, at: int, value: bytes) -> None:
    tensor = folder.home(name)[name]
    tensor.data = tensor.data[:at] + value + tensor.data[at + len(value) :]


@pytest.mark.parametrize(
    ("name", "at", "value"),
    [
        ("layers.1.attn.wkv.weight", 5, b"\x7f"),
        ("layers.1.attn.wkv.weight", 6, b"\xff"),
        ("layers.1.attn.wkv.scale", 1, b"\xff"),
        ("layers.1.ffn.experts.2.w2.scale", 0, b"\xff"),
        ("layers.1.engram.embed.scale", 77, b"\xff"),
        ("embed.weight", 200, b"\xc0\x7f"),  # NaN
        ("embed.weight", 200, b"\x80\xff"),  # -inf
        ("layers.2.hc_ffn_fn", 8, np.float32("nan").tobytes()),
        ("layers.2.hc_ffn_fn", 8, np.float32("-inf").tobytes()),
    ],
)
def test_nonfinite_weights_are_named(damaged: Make, name: str, at: int, value: bytes) -> None:
    folder = damaged()
    poke(folder, name, at, value)
    assert find_nonfinite(Checkpoint.open(folder.write())) == [name]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("layers.2.ffn.gate.bias", np.float32("nan").tobytes()),
        ("layers.2.attn.indexer.wk.weight", b"\xc0\x7f"),
        ("layers.2.attn.indexer.wq_b.scale", b"\xff"),
    ],
)
def test_steering_weights_must_be_finite(damaged: Make, name: str, value: bytes) -> None:
    folder = damaged()
    check_steering(Checkpoint.open(folder.write()))
    poke(folder, name, 0, value)
    with pytest.raises(CheckpointError, match=name):
        check_steering(Checkpoint.open(folder.write()))


def test_largest_finite_codes_pass(damaged: Make) -> None:
    folder = damaged()
    poke(folder, "layers.1.attn.wkv.weight", 0, b"\x7e\xfe\x00\x80")
    poke(folder, "layers.1.attn.wkv.scale", 0, b"\xfe\x00")
    poke(folder, "layers.1.ffn.experts.0.w1.weight", 0, b"\x7f\xff")
    poke(folder, "embed.weight", 0, b"\x7f\x7f\xff\x00")
    poke(folder, "layers.2.hc_ffn_fn", 0, np.finfo(np.float32).max.tobytes())
    assert find_nonfinite(Checkpoint.open(folder.write())) == []


def test_search_stops_at_its_limit(damaged: Make) -> None:
    folder = damaged()
    for layer in range(3):
        poke(folder, f"layers.{layer}.attn.wkv.scale", 0, b"\xff")
    checkpoint = Checkpoint.open(folder.write())
    assert find_nonfinite(checkpoint, limit=2) == [f"layers.{i}.attn.wkv.scale" for i in (0, 1)]
