"""Many small host arrays brought to a device by one copy."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["Packer"]

_STEP = 4  # arrays begin at multiples of 32 bytes, as kernels expect of whole tensors
_FIRST = 1 << 14


class Packer:
    """Takes int64 arrays and hands out their tensors on a device at once, filled by `flush`.

    On a CPU a tensor shares its array's memory and `flush` does nothing. Elsewhere arrays gather in
    pinned memory, and one copy that the host does not wait for brings them over.
    """

    def __init__(self, device: torch.device | str) -> None:
        self._device = torch.device(device)
        self._chunks: list[tuple[Tensor, Tensor]] = []  # pinned memory and its twin
        self._used = 0

    def __call__(self, array: NDArray[np.int64]) -> Tensor:
        """Return the tensor of an array; its values are there after the next `flush`."""
        if self._device.type == "cpu":
            return torch.from_numpy(array)
        size = array.size
        if not self._chunks or self._used + size > self._chunks[-1][0].numel():
            self._grow(size)
        host, twin = self._chunks[-1]
        place = slice(self._used, self._used + size)
        host[place].numpy()[...] = array.reshape(-1)
        self._used += -(-size // _STEP) * _STEP
        return twin[place].view(array.shape)

    def _grow(self, size: int) -> None:
        last = self._chunks[-1][0].numel() if self._chunks else 0
        most = max(_FIRST, 4 * last, size)
        pinned = self._device.type == "cuda"
        host = torch.empty(most, dtype=torch.int64, pin_memory=pinned)
        self._copy()
        self._chunks.append((host, torch.empty(most, dtype=torch.int64, device=self._device)))
        self._used = 0

    def flush(self) -> None:
        """Start the copy of what was taken."""
        self._copy()
        self._chunks.clear()
        self._used = 0

    def _copy(self) -> None:
        if self._chunks and self._used:
            host, twin = self._chunks[-1]
            used = min(self._used, host.numel())
            twin[:used].copy_(host[:used], non_blocking=True)
