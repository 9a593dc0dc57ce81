"""Rows of the Engram tables where they do not lie on the device as a whole.

Which rows a step needs follows from its tokens alone, so a read starts with the step and is waited
for where its layer comes: the later layers' rows arrive behind the layers before them.

Source: parallelism specification, 5.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from deepinfer.config.mesh import split_evenly
from deepinfer.errors import UnsupportedError
from deepinfer.kernels.quantize import decode_e4m3, decode_ue8m0, repeat_groups
from deepinfer.parallel.comm import Group, Waitable

__all__ = ["HostRows", "MakeTable", "MappedRows", "Read", "RowTable", "ShardedRows", "mapped_rows"]


class Read(Protocol):
    """Rows under way."""

    def wait(self, dtype: torch.dtype) -> Tensor:
        """Return the values [T, columns * D]; asked once."""
        ...


class RowTable(Protocol):
    """A table of one layer.

    flows  whether the host waits for nothing
    ahead  whether `look_ahead` does something
    """

    @property
    def flows(self) -> bool:
        """See above."""
        ...

    @property
    def ahead(self) -> bool:
        """See above."""
        ...

    def look_ahead(self, rows: Tensor) -> None:
        """Take rows that the next step is likely to start with; what it starts with decides."""
        ...

    def start(self, rows: Tensor) -> Read:
        """Start reading rows [T, columns] int64; T may be 0. All that share a table call it."""
        ...


class _StartsOnly:
    """A table that nothing is gained from looking ahead in."""

    ahead = False

    def look_ahead(self, rows: Tensor) -> None:
        """Pass the rows over."""


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
    while the layers before run. Rows of drafts are read as soon as these are made, while the host
    prepares the step that verifies them.

    found, late  rows of steps that were there already, and those that began with their step; of
                 steps that something was read ahead for
    """

    flows = False
    ahead = True
    _pool: Final = ThreadPoolExecutor(1, "deepinfer-engram")

    def __init__(self, codes: Tensor, scale: Tensor) -> None:
        self._codes, self._scale = codes.view(torch.uint8), scale
        self._ahead: Future[tuple[Tensor, Tensor]] | None = None
        self.found = self.late = 0

    def look_ahead(self, rows: Tensor) -> None:
        """Start reading in the thread, which waits for the device instead of the caller."""
        made = None
        if rows.device.type == "cuda":
            made = torch.cuda.Event()  # type: ignore[no-untyped-call]
            made.record()

        def read() -> tuple[Tensor, Tensor]:
            if made is not None:
                made.synchronize()
            known = torch.unique(rows.cpu())
            return known, self._read(known)

        self._ahead = self._pool.submit(read)

    def start(self, rows: Tensor) -> _HostRead:
        """Start reading in the thread what was not read ahead."""
        index = rows.flatten().cpu()
        ahead, self._ahead = self._ahead, None

        def read() -> Tensor:
            if ahead is None or ahead.exception() is not None:  # the thread has done it before
                return self._read(index)
            known, data = ahead.result()
            if not len(known):
                return self._read(index)
            place = torch.searchsorted(known, index).clamp(max=len(known) - 1)
            missing = known[place] != index
            values = data.index_select(0, place)
            values[missing] = self._read(index[missing])
            self.late += int(missing.sum())
            self.found += int((~missing).sum())
            return values

        return _HostRead(self._pool.submit(read), self._codes.shape[1], rows)

    def _read(self, index: Tensor) -> Tensor:
        codes, scale = self._codes.index_select(0, index), self._scale.index_select(0, index)
        return torch.cat([codes, scale], dim=1)


class _MappedRead:
    def __init__(self, owner: MappedRows, rows: Tensor) -> None:
        self._owner, self._rows = owner, rows

    def wait(self, dtype: torch.dtype) -> Tensor:
        return self._owner.look_up(self._rows, dtype)


class MappedRows(_StartsOnly):
    """All rows stay in the mapped file, and a kernel of the GPU reads them there: no copy, no
    thread, and nothing that the host waits for, so that a step can be recorded.

    The file's pages are locked in memory, once for all processes of a host that map them.
    look_up  (codes, scale, rows, dtype) -> values, a kernel that may read host memory
    pages    keeps the tables within the GPU's reach as long as it lives
    """

    flows = True

    def __init__(
        self,
        codes: Tensor,
        scale: Tensor,
        look_up: Callable[[Tensor, Tensor, Tensor, torch.dtype], Tensor],
        pages: object,
    ) -> None:
        self._codes, self._scale, self._look_up, self._pages = codes, scale, look_up, pages

    def start(self, rows: Tensor) -> _MappedRead:
        """Note the rows; they are read where they are needed."""
        return _MappedRead(self, rows)

    def look_up(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the values [T, columns * D] of rows [T, columns]."""
        return self._look_up(self._codes, self._scale, rows, dtype)


class _Pages:
    """Pages of host memory that GPUs reach; a page is registered once however many share it."""

    def __init__(self, runtime: Any) -> None:
        self._runtime = runtime
        self._held: list[tuple[int, int]] = []

    def add(self, tensor: Tensor) -> bool:
        """Let GPUs read the pages of a tensor; whether they can."""
        begin = tensor.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
        end = tensor.data_ptr() + tensor.numel() * tensor.element_size()
        end = -(-end // mmap.PAGESIZE) * mmap.PAGESIZE
        for first, last in sorted(self._held):  # what is left are gaps between those
            if first <= begin < last:
                begin = last
            elif begin < first < end:
                if not self._register(begin, first):
                    return False
                begin = last
        return begin >= end or self._register(begin, end)

    def _register(self, begin: int, end: int) -> bool:
        for flags in (_PORTABLE | _READ_ONLY, _PORTABLE):
            if int(self._runtime.cudaHostRegister(begin, end - begin, flags)) == 0:
                self._held.append((begin, end))
                return True
        return False

    def __del__(self) -> None:
        """Let the pages go."""
        for begin, _ in self._held:
            self._runtime.cudaHostUnregister(begin)


_PORTABLE: Final = 1
_READ_ONLY: Final = 8


def mapped_rows(device: torch.device) -> MakeTable:
    """Return what makes tables that the GPU reads in the mapped file.

    Making one raises UnsupportedError where the GPU cannot reach the file's pages.
    """
    from deepinfer.kernels.engram.triton import engram_lookup

    pages = _Pages(torch.cuda.cudart())  # type: ignore[no-untyped-call]

    def make(codes: Tensor, scale: Tensor) -> RowTable:
        with torch.cuda.device(device):
            if not (pages.add(codes) and pages.add(scale)):
                raise UnsupportedError(
                    "parallel.engram_rows mapped: the GPU cannot reach the pages of the mapped "
                    "tables, or they do not fit into the host's memory; take host"
                )
        return MappedRows(codes, scale, engram_lookup, pages)

    return make


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


class ShardedRows(_StartsOnly):
    """Each rank of the group holds a run of rows in host memory; ids go to their owners, rows back.

    A row that a step needs several times travels once.
    """

    flows = False

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
