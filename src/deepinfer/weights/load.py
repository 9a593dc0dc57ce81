"""Torch tensors over a mapped checkpoint, and the search for weights that are not finite.

Tensors alias the file: loading costs no memory until pages are touched, and writing to one would
crash. `copy` and `stack` make writable tensors and give the source's pages back on the way.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deepinfer.errors import CheckpointError
from deepinfer.weights.reader import Checkpoint

__all__ = ["TORCH_DTYPES", "TensorSource", "check_steering", "find_nonfinite"]

# Stored type -> the dtype it is handed out in; scales and packed FP4 pairs stay bytes.
TORCH_DTYPES: Final = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.uint8,
    "I8": torch.uint8,
}
_CHUNK_BYTES: Final = 1 << 24


class TensorSource:
    """The tensors of a checkpoint by name, without copying.

    Whoever holds a tensor keeps its file mapped.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self._files: dict[Path, Tensor] = {}

    def get(self, name: str) -> Tensor:
        """Return a tensor in its stored form: a view of the file, not to be written to.

        F32, BF16 and e4m3 in their own dtypes, ue8m0 scales and packed FP4 as uint8. A tensor that
        lies unaligned in its file is copied.
        """
        stored = self.checkpoint.tensors[name]
        dtype = TORCH_DTYPES[stored.dtype]
        data = self._file(stored.path)[stored.offset : stored.offset + stored.nbytes]
        if stored.offset % dtype.itemsize:
            data = data.clone()
        return data.view(dtype).view(stored.shape)

    def __getitem__(self, name: str) -> Tensor:
        """Return a tensor as `get` does."""
        return self.get(name)

    def __contains__(self, name: str) -> bool:
        """Tell whether the checkpoint has the tensor."""
        return name in self.checkpoint.tensors

    def as_dict(self) -> dict[str, Tensor]:
        """Return all tensors by name."""
        return {name: self.get(name) for name in self.checkpoint.tensors}

    def copy(self, name: str) -> Tensor:
        """Return a writable copy of a tensor; the file's pages do not stay in memory."""
        return self.stack([name])[0]

    def stack(self, names: Sequence[str]) -> Tensor:
        """Copy tensors of one shape and type into a new one, [len(names), *shape].

        Holds the result and one small piece of the file at a time.
        """
        stored = [self.checkpoint.tensors[name] for name in names]
        kinds = {(s.dtype, s.shape) for s in stored}
        assert len(kinds) == 1, kinds
        (dtype, shape) = kinds.pop()
        result = torch.empty((len(names), *shape), dtype=TORCH_DTYPES[dtype])
        rows = result.view(torch.uint8).view(len(names), -1) if result.numel() else result
        for row, tensor in zip(rows, stored, strict=True):
            target = row.numpy()
            file = self.checkpoint.mapped(tensor.path)
            for begin in range(0, tensor.nbytes, _CHUNK_BYTES):
                size = min(_CHUNK_BYTES, tensor.nbytes - begin)
                offset = tensor.offset + begin
                target[begin : begin + size] = file.data[offset : offset + size]
                file.release(offset, size)
        return result

    def release(self) -> None:
        """Give back every page of the files that is in memory; views read them again."""
        for path in self._files:
            file = self.checkpoint.mapped(path)
            file.release(0, file.data.shape[0])

    def _file(self, path: Path) -> Tensor:
        """Return a shard's bytes as one tensor."""
        if path not in self._files:
            with warnings.catch_warnings():
                # Torch cannot mark a tensor read-only and warns; nothing here writes to one.
                warnings.filterwarnings("ignore", message="The given (buffer|NumPy array) is not")
                self._files[path] = torch.from_numpy(self.checkpoint.mapped(path).data)
        return self._files[path]


def check_steering(checkpoint: Checkpoint) -> None:
    """Raise CheckpointError for NaN or infinity in weights that only steer a choice.

    Selection biases and indexers choose experts and positions; their values reach no activation, so
    nothing later could tell the wrong choice. All other damage shows in the logits.
    """
    steering = re.compile(r"layers\.\d+\.(ffn\.gate\.bias|attn\.indexer\..*)")
    bad = find_nonfinite(checkpoint, only=steering)
    if bad:
        raise CheckpointError(
            f"the weights in {checkpoint.folder} are damaged: copy them again",
            [f"{name} holds NaN or infinity" for name in bad],
        )


def find_nonfinite(
    checkpoint: Checkpoint, limit: int = 8, only: re.Pattern[str] | None = None
) -> list[str]:
    """Return the first `limit` tensors that hold a NaN or infinity, in model order.

    only  which names to look at, the whole name; all of them by default
    Reads these tensors once, a piece at a time: the e4m3 codes 0x7F and 0xFF, the ue8m0 code
    0xFF, and the non-finite values of BF16 and F32. FP4 has none.
    """
    found: list[str] = []
    for name, tensor in checkpoint.tensors.items():
        if len(found) >= limit:
            break
        if only is not None and only.fullmatch(name) is None:
            continue
        file = checkpoint.mapped(tensor.path)
        for begin in range(0, tensor.nbytes, _CHUNK_BYTES):
            size = min(_CHUNK_BYTES, tensor.nbytes - begin)
            offset = tensor.offset + begin
            bad = _any_nonfinite(file.data[offset : offset + size], tensor.dtype)
            file.release(offset, size)
            if bad:
                found.append(name)
                break
    return found


def _any_nonfinite(data: NDArray[np.uint8], dtype: str) -> bool:
    """Tell whether stored bytes of a type hold a NaN or infinity."""
    if dtype == "F8_E4M3":
        return bool(((data & 0x7F) == 0x7F).any())
    if dtype == "F8_E8M0":
        return bool((data == 0xFF).any())
    if dtype == "BF16":
        return bool(((data[1::2] & 0x7F == 0x7F) & (data[::2] >= 0x80)).any())
    if dtype == "F32":
        return bool(((data[3::4] & 0x7F == 0x7F) & (data[2::4] >= 0x80)).any())
    return False
