"""Rows of the Engram tables where they do not lie on the device as a whole.

Which rows a step needs follows from its tokens alone, so a read starts with the step and is waited
for where its layer comes: the later layers' rows arrive behind the layers before them.

Source: parallelism specification, 5.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final, Protocol

import torch
from torch import Tensor

from deepinfer.config.mesh import split_evenly
from deepinfer.kernels.quantize import decode_e4m3, decode_ue8m0, repeat_groups
from deepinfer.parallel.comm import Group, Waitable

__all__ = ["HostRows", "MakeTable", "Read", "RowTable", "ShardedRows"]


class Read(Protocol):
    """Rows under way."""

    def wait(self, dtype: torch.dtype) -> Tensor:
        """Return the values [T, columns * D]; asked once."""
        ...


class RowTable(Protocol):
    """A table of one layer."""

    def start(self, rows: Tensor) -> Read:
        """Start reading rows [T, columns] int64; T may be 0. All that share a table call it."""
        ...


MakeTable = Callable[[Tensor, Tensor], RowTable]
"""Takes a table's codes [rows, D] e4m3 and scales [rows, D/32] uint8, views of the file."""


def _values(data: Tensor, width: int, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Decode rows of codes and scales [T * columns, D + D/32] to [T, columns * D]."""
    codes, scales = data[:, :width], data[:, width:]
    values = repeat_groups(decode_e4m3(codes.contiguous()), decode_ue8m0(scales.contiguous()))
    return values.view(shape[0], shape[1] * width).to(dtype)


class _HostRead:
    def __init__(self, work: Future[Tensor], width: int, rows: Tensor) -> None:
        self._work, self._width, self._rows = work, width, rows

    def wait(self, dtype: torch.dtype) -> Tensor:
        data = self._work.result().to(self._rows.device, non_blocking=True)
        return _values(data, self._width, self._rows.shape, dtype)


class HostRows:
    """All rows stay in the mapped file, whose pages all ranks of a host share; a thread reads them
    while the layers before run.
    """

    _pool: Final = ThreadPoolExecutor(1, "deepinfer-engram")

    def __init__(self, codes: Tensor, scale: Tensor) -> None:
        self._codes, self._scale = codes.view(torch.uint8), scale

    def start(self, rows: Tensor) -> _HostRead:
        """Start reading in the thread."""
        index = rows.flatten().cpu()

        def read() -> Tensor:
            codes, scale = self._codes.index_select(0, index), self._scale.index_select(0, index)
            return torch.cat([codes, scale], dim=1)

        return _HostRead(self._pool.submit(read), self._codes.shape[1], rows)


class _ShardRead:
    def __init__(
        self, work: Waitable, data: Tensor, inverse: Tensor, width: int, rows: Tensor
    ) -> None:
        self._work, self._data, self._inverse = work, data, inverse
        self._width, self._rows = width, rows

    def wait(self, dtype: torch.dtype) -> Tensor:
        self._work.wait()
        data = self._data[self._inverse.flatten()]
        return _values(data, self._width, self._rows.shape, dtype)


class ShardedRows:
    """Each rank of the group holds a run of rows in host memory; ids go to their owners, rows back.

    A row that a step needs several times travels once.
    """

    def __init__(self, codes: Tensor, scale: Tensor, group: Group, device: torch.device) -> None:
        self._group, self._device = group, device
        self._width = codes.shape[1]
        self._per_rank = -(-codes.shape[0] // group.size)
        held = split_evenly(codes.shape[0], group.size, group.place)
        own = slice(held.start, held.stop)
        self._rows = torch.cat([codes[own].view(torch.uint8), scale[own]], dim=1)

    @property
    def num_rows(self) -> int:
        """The rows of this rank."""
        return int(self._rows.shape[0])

    def start(self, rows: Tensor) -> _ShardRead:
        """Ask the owners for rows."""
        group = self._group
        wanted, inverse = torch.unique(rows, return_inverse=True)  # ascending: owner by owner
        counts = torch.bincount(wanted // self._per_rank, minlength=group.size)
        asked = torch.empty_like(counts)
        group.all_to_all(asked, counts).wait()
        given, taken = counts.tolist(), asked.tolist()
        ids = wanted.new_empty(sum(taken))
        group.all_to_all(ids, wanted, taken, given).wait()
        local = ids.cpu() - group.place * self._per_rank
        found = self._rows.index_select(0, local).to(self._device)
        data = found.new_empty((len(wanted), found.shape[1]))
        work = group.all_to_all(data, found, given, taken)
        return _ShardRead(work, data, inverse, self._width, rows)
