"""From tensors to the official checkpoint layout: weights quantized, folder checked and written.

`to_*` turn trained weights into stored codes and scales; `export_checkpoint` checks everything it
is given against the layout of the config before it writes the first byte. Source: weights
specification, 2.8 and 3.1 to 3.3.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deepinfer.config.model import ModelConfig
from deepinfer.errors import CheckpointError, NumericalError, ShapeError
from deepinfer.weights.layout import TensorSpec, expected_tensors
from deepinfer.weights.writer import plan_shards, write_checkpoint

__all__ = ["Exportable", "export_checkpoint", "to_fp8_block32", "to_fp8_rows32", "to_mxfp4"]

# A tensor in its stored form, or a function that makes it when its turn comes.
Exportable = Tensor | NDArray[np.generic] | Callable[[], Tensor | NDArray[np.generic]]

_GROUP: Final = 32
_FP8_MAX: Final = 448.0
_FP4_MAX: Final = 6.0
_MAX_SHARD_BYTES: Final = 5 << 30
_CHUNK_BYTES: Final = 1 << 24
_ACCEPTED: Final[Mapping[str, tuple[str, ...]]] = {
    "F32": ("float32",),
    "BF16": ("bfloat16", "uint16"),
    "F8_E4M3": ("float8_e4m3fn", "uint8"),
    "F8_E8M0": ("float8_e8m0fnu", "uint8"),
    "I8": ("int8", "uint8"),
}


def to_fp8_block32(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize a matrix to e4m3 with one power-of-two scale per 32 x 32 tile.

    weight   [N, K]            any float dtype; K a multiple of 32, N may end in a short tile
    returns  [N, K]            float8_e4m3fn, rounded to nearest even
             [ceil(N/32), K/32]  uint8, ue8m0: the smallest power of two that fits the tile
    Raises ShapeError for other shapes and NumericalError for NaN or infinity.
    """
    rows, columns = _matrix_dims(weight)
    short = -rows % _GROUP
    padded = torch.nn.functional.pad(weight.float(), (0, 0, 0, short))
    tiles = padded.view(-1, _GROUP, columns // _GROUP, _GROUP)
    scale = _scales(tiles.abs().amax((1, 3)), _FP8_MAX)
    codes = _e4m3(tiles / _power(scale)[:, None, :, None])
    return codes.view(-1, columns)[:rows].contiguous(), scale


def to_fp8_rows32(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize the rows of an Engram table to e4m3 with a power-of-two scale per 32 columns.

    weight   [R, K]     any float dtype; K a multiple of 32
    returns  [R, K]     float8_e4m3fn
             [R, K/32]  uint8, ue8m0
    Raises ShapeError for other shapes and NumericalError for NaN or infinity.
    """
    _matrix_dims(weight)
    groups = torch.unflatten(weight.float(), -1, (-1, _GROUP))
    scale = _scales(groups.abs().amax(-1), _FP8_MAX)
    return _e4m3(groups / _power(scale)[..., None]).flatten(-2), scale


def to_mxfp4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize matrices to packed e2m1 with a power-of-two scale per row and 32 inputs.

    weight   [..., N, K]     any float dtype; K a multiple of 32
    returns  [..., N, K/2]   uint8; the even element in the low nibble; ties go to the even code
             [..., N, K/32]  uint8, ue8m0
    Raises ShapeError for other shapes and NumericalError for NaN or infinity.
    """
    _matrix_dims(weight)
    groups = torch.unflatten(weight.float(), -1, (-1, _GROUP))
    scale = _scales(groups.abs().amax(-1), _FP4_MAX)
    codes = _e2m1_codes((groups / _power(scale)[..., None]).flatten(-2))
    return codes[..., ::2] | codes[..., 1::2] << 4, scale


def _matrix_dims(weight: Tensor) -> tuple[int, int]:
    """Return the last two dims; raise ShapeError unless the last one holds whole groups."""
    if weight.dim() < 2 or weight.shape[-1] % _GROUP or not weight.numel():
        raise ShapeError(
            f"cannot quantize a weight of shape {list(weight.shape)}: expected a matrix with a "
            f"multiple of {_GROUP} inputs"
        )
    return weight.shape[-2], weight.shape[-1]


def _scales(amax: Tensor, largest: float) -> Tensor:
    """Return the exponent bytes of the smallest powers of two with amax / scale <= largest."""
    if not bool(amax.isfinite().all()):
        raise NumericalError("cannot quantize a weight that holds NaN or infinity")
    least = (amax / largest).clamp(min=2.0**-126)
    bits = (least.view(torch.int32) + 0x007FFFFF) >> 23
    return bits.to(torch.uint8)


def _power(scale: Tensor) -> Tensor:
    """Return the fp32 values of exponent bytes 1..254."""
    return (scale.int() << 23).view(torch.float32)


def _e4m3(x: Tensor) -> Tensor:
    return x.clamp(-_FP8_MAX, _FP8_MAX).to(torch.float8_e4m3fn)


def _e2m1_codes(x: Tensor) -> Tensor:
    """Return the 4-bit codes of fp32 values within [-6, 6], rounded to nearest, ties to even."""
    size = x.abs()
    # Between two codes the boundary itself belongs to the even one.
    code = torch.zeros(x.shape, dtype=torch.uint8)
    for above, (boundary, is_even) in enumerate(_E2M1_BOUNDARIES, start=1):
        code[size >= boundary if is_even else size > boundary] = above
    return code | (torch.signbit(x).to(torch.uint8) << 3)


# Midpoint below each code 1..7, and whether the code above it is even.
_E2M1_BOUNDARIES: Final = (
    (0.25, False),
    (0.75, True),
    (1.25, False),
    (1.75, True),
    (2.5, False),
    (3.5, True),
    (5.0, False),
)


def export_checkpoint(
    folder: str | os.PathLike[str],
    config: ModelConfig,
    tensors: Mapping[str, Exportable],
    side_files: Mapping[str, bytes] | None = None,
    max_shard_bytes: int = _MAX_SHARD_BYTES,
    overwrite: bool = False,
) -> Path:
    """Write tensors as an official checkpoint and return its folder.

    tensors     every tensor that the config implies, by its official name, in its stored form:
                torch tensors, or numpy arrays with BF16 as uint16 and codes as bytes. A function
                is called when its tensor is written, so that one is held at a time.
    side_files  further files by name, such as the tokenizer
    Raises CheckpointError with every missing, unexpected, mistyped or misshaped tensor before
    anything is written, or when writing fails.
    """
    specs = expected_tensors(config)
    problems = [f"missing: {name}" for name in specs if name not in tensors]
    problems += [f"unexpected: {name}" for name in tensors if name not in specs]
    for name, spec in specs.items():
        value = tensors.get(name)
        if value is not None and not callable(value):
            problems += _mismatch(spec, value)
    if problems:
        raise CheckpointError("the tensors do not make up a checkpoint of this config", problems)

    def chunks(spec: TensorSpec) -> Iterator[NDArray[np.uint8]]:
        value = tensors[spec.name]
        made = value() if callable(value) else value
        wrong = _mismatch(spec, made)
        if wrong:
            raise CheckpointError("a tensor does not fit the config", wrong)
        data = _bytes(made)
        for begin in range(0, data.size, _CHUNK_BYTES):
            yield data[begin : begin + _CHUNK_BYTES]

    shards = plan_shards(specs.values(), max_shard_bytes)
    return write_checkpoint(folder, shards, chunks, config.to_dict(), side_files, overwrite)


def _mismatch(spec: TensorSpec, value: Tensor | NDArray[np.generic]) -> list[str]:
    """Return what keeps a tensor from being stored as its spec says."""
    problems = []
    dtype = str(value.dtype).removeprefix("torch.")
    accepted = _ACCEPTED[spec.dtype]
    if dtype not in accepted:
        problems.append(f"{spec.name}: found dtype {dtype}, expected {' or '.join(accepted)}")
    if tuple(value.shape) != spec.shape:
        problems.append(
            f"{spec.name}: found shape {list(value.shape)}, expected {list(spec.shape)}"
        )
    return problems


def _bytes(value: Tensor | NDArray[np.generic]) -> NDArray[np.uint8]:
    """Return a tensor's bytes in row-major order, 1-D."""
    if isinstance(value, Tensor):
        flat = value.detach().cpu().contiguous().view(-1)
        data: NDArray[np.uint8] = flat.view(torch.uint8).numpy()
        return data
    return np.ascontiguousarray(value).reshape(-1).view(np.uint8)
