"""Quantizing to the stored formats, and writing a checkpoint or nothing."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file

from deepinfer.config.model import ModelConfig
from deepinfer.errors import CheckpointError, NumericalError, ShapeError
from deepinfer.weights import writer
from deepinfer.weights.export import (
    export_checkpoint,
    to_fp8_block32,
    to_fp8_rows32,
    to_mxfp4,
)
from deepinfer.weights.layout import TensorSpec, expected_tensors
from deepinfer.weights.load import TensorSource
from deepinfer.weights.reader import Checkpoint
from deepinfer.weights.writer import plan_shards

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def unpack(codes: torch.Tensor) -> torch.Tensor:
    pairs = torch.stack([codes & 15, codes >> 4], dim=-1).flatten(-2)
    return E2M1[pairs.long()]


def power(scale: torch.Tensor) -> torch.Tensor:
    return torch.exp2(scale.double() - 127)


# Quantizers


@pytest.fixture(scope="module")
def units(request: pytest.FixtureRequest) -> dict[str, torch.Tensor]:
    folder: Path = request.getfixturevalue("golden_folder")
    return load_file(folder / "units.safetensors")


def test_mxfp4_gives_the_recorded_codes(units: dict[str, torch.Tensor]) -> None:
    codes, scale = to_mxfp4(units["quant_input"])
    assert torch.equal(codes, units["fp4_block32_packed"])
    assert torch.equal(scale, units["fp4_block32_scales"].view(torch.uint8))


def test_fp8_rows_give_the_recorded_codes(units: dict[str, torch.Tensor]) -> None:
    # The recorded quantizer has a floor on the largest magnitude, stored weights have none.
    codes, scale = to_fp8_rows32(units["quant_input"])
    groups = units["quant_input"].float().view(24, 4, 32)
    above = groups.abs().amax(-1) >= 1e-4
    expected = units["fp8_values"].view(torch.uint8).view(24, 4, 32)
    assert above.sum() > 40
    assert torch.equal(codes.view(torch.uint8).view(24, 4, 32)[above], expected[above])
    assert torch.equal(scale[above], units["fp8_scales"].view(torch.uint8)[above])


def test_fp4_ties_go_to_the_even_code() -> None:
    midpoints = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]
    row = torch.zeros(1, 32)
    row[0, :16] = torch.tensor([*midpoints, 6.0, *(-m for m in midpoints), -6.0])
    codes, scale = to_mxfp4(row)
    assert scale.tolist() == [[127]]
    expected = [0, 1, 1, 2, 2, 4, 4, 6]
    assert unpack(codes)[0, :16].tolist() == [*expected, *(-e for e in expected)]


@settings(max_examples=40)
@given(rows=st.integers(1, 70), groups=st.integers(1, 3), exponent=st.integers(-90, 90),
       seed=st.integers(0, 99))  # fmt: skip
def test_quantized_weights_are_the_nearest_on_their_grid(
    rows: int, groups: int, exponent: int, seed: int
) -> None:
    random = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, 32 * groups, generator=random) * 2.0**exponent
    codes, scale = to_fp8_block32(weight)
    assert codes.shape == weight.shape and scale.shape == (-(-rows // 32), groups)
    spread = power(scale).repeat_interleave(32, 0)[:rows].repeat_interleave(32, 1)
    values = codes.double() * spread
    assert ((values - weight).abs() <= torch.maximum(weight.abs() / 16, spread * 2.0**-10)).all()
    # the scale is the smallest that fits: halving it would overflow e4m3
    tiles = torch.nn.functional.pad(weight, (0, 0, 0, -rows % 32)).view(-1, 32, groups, 32)
    largest = tiles.abs().amax((1, 3)).double() / power(scale)
    assert (largest <= 448).all() and (largest > 224).all()

    packed, fine = to_mxfp4(weight)
    step = power(fine).repeat_interleave(32, 1)
    error = (unpack(packed).double() * step - weight).abs() / step
    assert (error <= torch.maximum((weight.double() / step).abs() / 4, torch.tensor(0.25))).all()


def test_stored_weights_survive_quantization_again(golden_checkpoint: Path) -> None:
    source = TensorSource(Checkpoint.open(golden_checkpoint))
    name = "layers.0.attn.wo_a"
    dense = source[f"{name}.weight"].double()
    dense *= power(source[f"{name}.scale"]).repeat_interleave(32, 0).repeat_interleave(32, 1)
    codes, scale = to_fp8_block32(dense.float())
    again = codes.double() * power(scale).repeat_interleave(32, 0).repeat_interleave(32, 1)
    assert torch.equal(again, dense)


@pytest.mark.parametrize("quantize", [to_fp8_block32, to_fp8_rows32, to_mxfp4])
def test_bad_weights_are_refused(
    quantize: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]],
) -> None:
    for shape in ((32,), (32, 33), (0, 32)):
        with pytest.raises(ShapeError, match="multiple of 32"):
            quantize(torch.zeros(shape))
    for value in (float("nan"), float("inf")):
        with pytest.raises(NumericalError, match="NaN or infinity"):
            quantize(torch.full((2, 32), value))
    codes, scale = quantize(torch.zeros(32, 32))
    assert not codes.view(torch.uint8).any() and (scale == 1).all()


# Writing


@pytest.fixture(scope="module")
def tiny(tiny_folder: Path) -> tuple[ModelConfig, dict[str, torch.Tensor]]:
    source = TensorSource(Checkpoint.open(tiny_folder))
    return source.checkpoint.config, source.as_dict()


Tiny = tuple[ModelConfig, dict[str, torch.Tensor]]


def test_export_gives_back_what_went_in(tiny: Tiny, tmp_path: Path) -> None:
    config, tensors = tiny
    folder = export_checkpoint(
        tmp_path / "a" / "b", config, tensors, {"tokenizer.json": b"{}"}, max_shard_bytes=50_000
    )
    checkpoint = Checkpoint.open(folder)
    assert checkpoint.config == config
    assert len({t.path for t in checkpoint.tensors.values()}) > 5
    again = TensorSource(checkpoint).as_dict()
    for name, tensor in tensors.items():
        assert torch.equal(again[name].view(torch.uint8), tensor.view(torch.uint8)), name
    assert (folder / "tokenizer.json").read_bytes() == b"{}"
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in checkpoint.specs.values())
    assert not list(folder.glob("*.partial"))


def test_shards_suit_the_format_library(tiny_folder: Path) -> None:
    names = set()
    for file in tiny_folder.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            names |= set(opened.keys())
        header = int.from_bytes(file.read_bytes()[:8], "little")
        assert header % 8 == 0
    checkpoint = Checkpoint.open(tiny_folder)
    assert names == set(checkpoint.tensors)
    assert all(t.offset % 4 == 0 for t in checkpoint.tensors.values() if t.dtype == "F32")
    assert all(t.offset % 2 == 0 for t in checkpoint.tensors.values() if t.dtype == "BF16")


def test_numpy_and_lazy_tensors_are_taken(tiny: Tiny, tmp_path: Path) -> None:
    config, tensors = tiny
    made: list[str] = []

    def later(name: str) -> Callable[[], np.ndarray[Any, Any] | torch.Tensor]:
        def make() -> torch.Tensor | np.ndarray[Any, Any]:
            made.append(name)
            tensor = tensors[name]
            if tensor.dtype == torch.bfloat16:
                return tensor.view(torch.uint16).numpy()
            return tensor.view(torch.uint8).numpy() if tensor.element_size() == 1 else tensor

        return make

    folder = export_checkpoint(tmp_path / "x", config, {name: later(name) for name in tensors})
    assert sorted(made) == sorted(tensors)
    again = TensorSource(Checkpoint.open(folder))
    assert torch.equal(again["embed.weight"], tensors["embed.weight"])


def test_wrong_tensors_are_all_told_before_writing(tiny: Tiny, tmp_path: Path) -> None:
    config, tensors = tiny
    wrong = dict(tensors)
    del wrong["norm.weight"]
    wrong["extra"] = wrong["head.weight"]
    wrong["embed.weight"] = wrong["embed.weight"].float()
    wrong["image_end"] = wrong["image_end"][:-1]
    with pytest.raises(CheckpointError) as caught:
        export_checkpoint(tmp_path / "x", config, wrong)
    text = str(caught.value)
    assert "missing: norm.weight" in text and "unexpected: extra" in text
    assert "embed.weight: found dtype float32, expected bfloat16 or uint16" in text
    assert "image_end: found shape [31], expected [32]" in text
    assert not (tmp_path / "x").exists()


def test_lazy_tensor_of_a_wrong_shape(tiny: Tiny, tmp_path: Path) -> None:
    config, tensors = tiny
    lazy: dict[str, Any] = dict(tensors)
    lazy["image_end"] = lambda: tensors["image_end"][:-1]
    with pytest.raises(CheckpointError, match="does not fit"):
        export_checkpoint(tmp_path / "x", config, lazy)
    assert not (tmp_path / "x").exists()


def test_an_existing_checkpoint_is_kept_unless_overwritten(tiny: Tiny, tmp_path: Path) -> None:
    config, tensors = tiny
    folder = export_checkpoint(tmp_path, config, tensors, max_shard_bytes=50_000)
    shards = len(list(folder.glob("*.safetensors")))
    (folder / "notes.safetensors").write_text("somebody else's")
    with pytest.raises(CheckpointError, match="holds a checkpoint already"):
        export_checkpoint(tmp_path, config, tensors)
    export_checkpoint(tmp_path, config, tensors, overwrite=True)
    assert shards > 1 and len(list(folder.glob("model*.safetensors"))) == 1
    assert (folder / "notes.safetensors").exists()
    Checkpoint.open(folder)


class FullDisk:
    """A file that fails once all files together have taken what was left."""

    def __init__(self, stream: Any, left: list[int], error: int) -> None:
        self._stream, self._left, self._error = stream, left, error

    def write(self, data: bytes) -> int:
        self._left[0] -= len(data)
        if self._left[0] < 0:
            raise OSError(self._error, os.strerror(self._error))
        return int(self._stream.write(data))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def __enter__(self) -> FullDisk:
        return self

    def __exit__(self, *_: object) -> None:
        self._stream.close()


def fill_disk(monkeypatch: pytest.MonkeyPatch, room: int, error: int) -> None:
    """Let the writer's files fail with `error` once they hold `room` bytes."""
    left = [room]

    def opened(path: Path, mode: str) -> FullDisk:
        return FullDisk(path.open(mode), left, error)

    monkeypatch.setattr(writer, "open", opened, raising=False)


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
@pytest.mark.parametrize("room", [0, 10, 60_000, -10])
def test_full_disk_leaves_nothing(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int, error: int
) -> None:
    config, tensors = tiny
    reference = export_checkpoint(tmp_path / "ref", config, tensors, max_shard_bytes=50_000)
    total = sum(f.stat().st_size for f in reference.iterdir())
    # a negative room fails in the config itself, the last file
    fill_disk(monkeypatch, room if room >= 0 else total + room, error)
    with pytest.raises(CheckpointError) as caught:
        export_checkpoint(tmp_path / "x", config, tensors, max_shard_bytes=50_000)
    assert not (tmp_path / "x").exists()
    text = str(caught.value)
    assert text.startswith("cannot write") and text.count("\n") == 0
    assert ("disk is full" in text) == (error != errno.EIO)


def test_full_disk_keeps_the_older_checkpoint(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, tensors = tiny
    folder = export_checkpoint(tmp_path / "x", config, tensors, max_shard_bytes=50_000)
    before = {f.name: f.read_bytes() for f in folder.iterdir()}
    fill_disk(monkeypatch, 100_000, errno.ENOSPC)
    with pytest.raises(CheckpointError, match="disk is full"):
        export_checkpoint(folder, config, tensors, overwrite=True)
    assert {f.name: f.read_bytes() for f in folder.iterdir()} == before


def test_too_little_space_is_told_before_writing(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(CheckpointError, match=r"not enough space .* 1,000 are free"):
        export_checkpoint(tmp_path / "x", *tiny)
    assert not (tmp_path / "x").exists()


def test_unwritable_place(tiny: Tiny, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot write"):
        export_checkpoint(tmp_path / "file" / "x", *tiny)


def test_interrupt_leaves_nothing(tiny: Tiny, tmp_path: Path) -> None:
    config, tensors = tiny

    def interrupt() -> torch.Tensor:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export_checkpoint(tmp_path / "x", config, {**tensors, "image_end": interrupt})
    assert not (tmp_path / "x").exists()


@given(limit=st.integers(1, 4_000_000))
def test_shard_plan_keeps_scales_with_weights(limit: int) -> None:
    specs = list(_specs())
    shards = plan_shards(specs, limit)
    assert [s for shard in shards for s in shard] == specs
    home = {s.name: i for i, shard in enumerate(shards) for s in shard}
    for shard in shards:
        assert shard
        units = sum(1 for s in shard if s.scale_of is None)
        assert units == 1 or sum(s.nbytes for s in shard) <= limit
    assert all(home[s.name] == home[s.scale_of] for s in specs if s.scale_of is not None)


def _specs() -> Iterator[TensorSpec]:
    file = Path(__file__).parents[1] / "data" / "beta" / "config.json"
    yield from expected_tensors(ModelConfig.from_dict(json.loads(file.read_text()))).values()
