"""The exchange of experts through memory that all GPUs of a host can write (`symm`).

The only file that touches torch's symmetric memory, whose interface is young. Multicast is not
used. Source: parallelism specification, 3.5.
"""

from __future__ import annotations

import logging
import pickle
import socket
from base64 import b64decode, b64encode
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol
from uuid import uuid4

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store

from deepinfer.errors import UnsupportedError
from deepinfer.parallel.comm import Group, GroupBroken
from deepinfer.parallel.experts import Received, RowShape

__all__ = ["IpcMemory", "PeerMemory", "Symmetric", "SymmetricMemory", "room", "symmetric"]

_log = logging.getLogger(__name__)
_LOOKS_A_SECOND: Final = 1_000_000  # at a flag, about
_MOST_SLOTS: Final = 1024  # of a rank in a layer
_ALIGN: Final = 256
_HEAD: Final = 16  # a row's header is a multiple of so many bytes


class PeerMemory(Protocol):
    """A buffer of every rank that all can write.

    local      [bytes] uint8, this rank's, zero at first
    addresses  of all ranks' buffers, as this rank reaches them
    """

    @property
    def local(self) -> Tensor:
        """This rank's buffer."""
        ...

    @property
    def addresses(self) -> list[int]:
        """Where the buffers of all ranks begin."""
        ...


class SymmetricMemory:
    """Memory of torch's symmetric allocator; every rank of the group makes one."""

    def __init__(
        self, num_bytes: int, place: int, size: int, store: Store, device: torch.device
    ) -> None:
        from torch._C._distributed_c10d import (
            ProcessGroup,
            _register_process_group,
            _SymmetricMemory,
        )

        memory: Any = _SymmetricMemory
        if place == 0:
            store.set("symm/name", f"deepinfer {uuid4().hex}")
        name = store.get("symm/name").decode()
        own = PrefixStore("symm", store)
        make: Any = ProcessGroup
        register: Any = _register_process_group
        self._group = make(own, place, size)  # older versions look the group up, newer take these
        register(name, self._group)
        memory.set_group_info(name, place, size, own)
        self.local: Tensor = memory.empty_strided_p2p((num_bytes,), (1,), torch.uint8, device)
        self.local.zero_()
        torch.cuda.synchronize(device)
        self._handle = memory.rendezvous(self.local, name)
        self.addresses: list[int] = list(self._handle.buffer_ptrs)


class IpcMemory:
    """Plain memory of each rank, opened by the others: where the symmetric allocator fails."""

    def __init__(
        self, num_bytes: int, place: int, size: int, store: Store, device: torch.device
    ) -> None:
        self.local: Tensor = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        torch.cuda.synchronize(device)
        storage: Any = self.local.untyped_storage()
        store.set(f"ipc/{place}", b64encode(pickle.dumps(storage._share_cuda_())).decode())
        open_storage: Any = torch.UntypedStorage._new_shared_cuda
        self._others: list[Any] = []
        self.addresses: list[int] = []
        for rank in range(size):
            if rank == place:
                self.addresses.append(self.local.data_ptr())
                continue
            other = open_storage(*pickle.loads(b64decode(store.get(f"ipc/{rank}"))))
            view = torch.empty(0, dtype=torch.uint8, device=other.device).set_(other)
            view[:1].to(device)  # lets this card reach the other's memory
            self._others.append(other)
            self.addresses.append(view.data_ptr())


def _peer_memory(num_bytes: int, group: Group, store: Store, device: torch.device) -> PeerMemory:
    """Return memory that all ranks of a group can write.

    Raises UnsupportedError, on all ranks, when there is no way.
    """

    def somewhere(wrong: bool) -> bool:
        flag = torch.tensor([wrong], dtype=torch.int32, device=device)
        return bool(group.all_reduce(flag, largest=True))

    own = PrefixStore(f"peers {group.members[0]}", store)
    own.set(f"host/{group.place}", _host())
    hosts = {own.get(f"host/{place}") for place in range(group.size)}
    others = [d for d in range(torch.cuda.device_count()) if d != device.index]
    reaches = all(torch.cuda.can_device_access_peer(device.index or 0, d) for d in others)
    if somewhere(len(hosts) > 1 or not reaches):
        raise UnsupportedError(
            "symm: the ranks that share experts are not GPUs of one host that can write to each "
            "other's memory; take exact or fixed"
        )
    problems = []
    for kind in (SymmetricMemory, IpcMemory):
        found: PeerMemory | None = None
        try:
            found = kind(num_bytes, group.place, group.size, own, device)
        except (RuntimeError, TypeError, AttributeError, ImportError) as error:
            problems.append(f"{kind.__name__}: {str(error).splitlines()[0]}")
        if not somewhere(found is None) and found is not None:
            _log.info("experts travel through %s", kind.__name__)
            return found
    raise UnsupportedError("symm: no memory that all GPUs of the host reach", problems)


def _host() -> str:
    """Return what tells hosts apart."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{socket.gethostname()} {boot.read_text().strip() if boot.exists() else ''}"


@dataclass(frozen=True, slots=True)
class _Layout:
    """Where parts of a buffer begin."""

    row_bytes: int
    returns: int
    row_flags: int
    return_flags: int
    total: int


def _up(count: int, align: int) -> int:
    return -(-count // align) * align


def room(
    size: int, capacity: int, columns: int, active: int, itemsize: int, quantize: bool
) -> _Layout:
    """Lay out a buffer for rows of every rank and returns of this one's."""
    value = columns + columns // 32 if quantize else columns * itemsize
    row_bytes = _up(_up(8 * active, _HEAD) + value, _HEAD)
    returns = _up(size * capacity * row_bytes, _ALIGN)
    row_flags = returns + _up(capacity * active * columns * itemsize, _ALIGN)
    return_flags = row_flags + _up(8 * size, _ALIGN)
    return _Layout(row_bytes, returns, row_flags, return_flags, return_flags + _ALIGN * 2)


class _Pushed:
    """A dispatch under way."""

    def __init__(self, owner: Symmetric, x: Tensor, slots: Tensor, num_local: int) -> None:
        self.owner, self.x, self.slots, self.num_local = owner, x, slots, num_local
        self.place: Tensor | None = None

    def wait(self) -> Received:
        """Return this rank's rows."""
        return self.owner.receive(self)


class Symmetric:
    """Rows pushed by kernels; the host waits for nothing, and shapes depend on `begin` alone.

    capacity  most rows of a rank in a step
    columns   of a row; active: most choices of a row
    """

    flows = True

    def __init__(
        self,
        memory: PeerMemory,
        place: int,
        quantize: bool,
        *,
        capacity: int,
        columns: int,
        active: int,
        dtype: torch.dtype,
        limit: int = 120 * _LOOKS_A_SECOND,
    ) -> None:
        size, device = len(memory.addresses), memory.local.device
        layout = room(size, capacity, columns, active, dtype.itemsize, quantize)
        assert memory.local.numel() >= layout.total, "the buffer is too small"
        self._memory, self._layout = memory, layout
        self._place, self._size, self._quantize = place, size, quantize
        self._capacity, self._columns, self._active = capacity, columns, active
        self._dtype, self._limit = dtype, limit
        self._bases = torch.tensor(memory.addresses, dtype=torch.int64, device=device)
        self._row_epoch = torch.ones(1, dtype=torch.int64, device=device)
        self._return_epoch = torch.ones(1, dtype=torch.int64, device=device)
        self._counts = torch.zeros(size, dtype=torch.int64, device=device)
        self._tally = torch.zeros(_MOST_SLOTS, dtype=torch.int32, device=device)
        self._told = torch.zeros(size, dtype=torch.int64, device=device)
        # In host memory, where the kernels write it and a look at it waits for nothing.
        self.error = torch.zeros(1, dtype=torch.int32, pin_memory=device.type == "cuda")
        self.most_rows = capacity

    def begin(self, most_rows: int) -> None:
        """Note how many rows the fullest rank has."""
        assert most_rows <= self._capacity, (most_rows, self._capacity)
        self.most_rows = max(1, most_rows)

    def check(self) -> None:
        """Raise GroupBroken if a rank did not come in a step that has ended."""
        missing = int(self.error[0])
        if missing:
            raise GroupBroken(f"symm: rank {missing - 1} of the expert group did not come in time")

    def dispatch(self, x: Tensor, slots: Tensor, weight: Tensor, num_local: int) -> _Pushed:
        """Push rows to the ranks that need them."""
        from deepinfer.kernels.expert_exchange import triton as kernels

        assert slots.shape[1] <= self._active and x.shape[0] <= self.most_rows, x.shape
        assert num_local <= _MOST_SLOTS, num_local
        first = self._place * self._capacity
        if x.shape[0]:
            kernels.push(
                x, slots, weight, self._bases, self._layout.row_bytes, first, num_local,
                self._quantize,
            )  # fmt: skip
        flags = self._layout.row_flags
        kernels.raise_flags(self._bases, flags, self._place, self._row_epoch, x.shape[0])
        return _Pushed(self, x, slots, num_local)

    def receive(self, pushed: _Pushed) -> Received:
        """Wait for everybody's rows and sort them by slot."""
        from deepinfer.kernels.expert_exchange import triton as kernels

        layout, active = self._layout, pushed.slots.shape[1]
        kernels.await_flags(
            self._flags(layout.row_flags), self._row_epoch, self._counts, self.error, self._limit
        )
        rows = self._memory.local
        chosen, groups = kernels.sort_choices(
            rows, self._counts, self._tally, self.most_rows, self._capacity, layout.row_bytes,
            active, self._place * pushed.num_local, pushed.num_local,
        )  # fmt: skip
        values = kernels.decode(
            rows, chosen, self.most_rows, self._capacity, layout.row_bytes, self._columns,
            self._dtype, self._quantize,
        )  # fmt: skip
        pushed.place = groups.place
        return Received(values, groups.rows, groups.weights, groups.offsets)

    def combine(self, pending: object, outputs: Tensor) -> Tensor:
        """Return every choice's output row to its source; rows of choices of -1 hold anything."""
        assert isinstance(pending, _Pushed)
        self.give_back(pending, outputs)
        return self.take_back(pending)

    def give_back(self, pushed: _Pushed, outputs: Tensor) -> None:
        """Push the outputs to where their rows came from."""
        from deepinfer.kernels.expert_exchange import triton as kernels

        assert pushed.place is not None, "combine before wait"
        layout = self._layout
        kernels.give_back(
            outputs, pushed.place, self._bases, layout.returns, self.most_rows, self._place + 1
        )
        kernels.raise_flags(self._bases, layout.return_flags, self._place, self._return_epoch, 0)

    def take_back(self, pushed: _Pushed) -> Tensor:
        """Wait for everybody's outputs; the result holds until the next combine."""
        from deepinfer.kernels.expert_exchange import triton as kernels

        layout = self._layout
        flags = self._flags(layout.return_flags)
        kernels.await_flags(flags, self._return_epoch, self._told, self.error, self._limit)
        num_bytes = pushed.slots.numel() * self._columns * self._dtype.itemsize
        data = self._memory.local[layout.returns : layout.returns + num_bytes]
        return data.view(self._dtype).view(*pushed.slots.shape, self._columns)

    def _flags(self, offset: int) -> Tensor:
        return self._memory.local[offset : offset + 8 * self._size].view(torch.int64)


def symmetric(
    group: Group,
    shape: RowShape,
    quantize: bool,
    store: Store,
    device: torch.device,
    timeout_s: float,
) -> Symmetric:
    """Allocate the buffers of a group, of which all members call it, and return the exchange.

    Raises UnsupportedError when the members cannot write to each other's memory.
    """
    layout = room(
        group.size, shape.capacity, shape.columns, shape.active, shape.dtype.itemsize, quantize
    )
    memory = _peer_memory(layout.total, group, store, device)
    return Symmetric(
        memory,
        group.place,
        quantize,
        capacity=shape.capacity,
        columns=shape.columns,
        active=shape.active,
        dtype=shape.dtype,
        limit=int(timeout_s * _LOOKS_A_SECOND),
    )
