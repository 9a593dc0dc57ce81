"""Group: the one place that calls collectives, each counted by name.

A group is used by one thread at a time and its members call the same collectives in the same order.
Only bytes travel: gloo knows no FP8, and a transport has no business with what they mean. A group
of one copies and counts as well, so that a program's collectives do not depend on its size.
"""

from __future__ import annotations

import datetime
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store

from deepinfer.errors import DeepInferError

__all__ = ["DONE", "Group", "GroupBroken", "Waitable"]


_WATCHDOG: Final = 10


class GroupBroken(DeepInferError):
    """A collective did not come to its end: a member is gone, or too late."""


class Waitable(Protocol):
    """A collective under way."""

    def wait(self) -> None:
        """Return when its outputs may be read: at once on a device with streams of its own."""
        ...


class _Done:
    def wait(self) -> None:
        """Return."""


DONE: Final = _Done()
"""What a collective that needs nobody returns."""


class _Work:
    def __init__(self, work: Any, name: str, kept: Sequence[Tensor]) -> None:
        self._work, self._name, self._kept = work, name, kept  # tensors live until then

    def wait(self) -> None:
        """Wait; raises GroupBroken when a member is gone."""
        try:
            self._work.wait()
        except RuntimeError as error:
            raise GroupBroken(f"{self._name}: {str(error).splitlines()[0]}") from error
        self._kept = ()


class Group:
    """One rank's end of a group of ranks.

    name     for messages and the store's keys
    members  global ranks in the order of the group
    place    of this rank among them
    backend  what torch offers for the group; None for a group of one
    counts   collectives called so far, by name
    """

    def __init__(self, name: str, members: Sequence[int], rank: int, backend: Any = None) -> None:
        assert rank in members and (backend is not None or len(members) == 1), (name, members, rank)
        self.name = name
        self.members = tuple(members)
        self.place = self.members.index(rank)
        self.counts: Counter[str] = Counter()
        self._backend = backend
        self._is_broken = False

    @classmethod
    def connect(
        cls,
        name: str,
        members: Sequence[int],
        rank: int,
        store: Store,
        timeout_s: float,
        device: torch.device | None = None,
        idle_s: float | None = None,
    ) -> Group:
        """Meet the other members; all of them call it.

        timeout_s  of this meeting and of every collective
        idle_s     of every collective, where it is another
        device     a GPU for a group of its own over NCCL; None for gloo on the host
        Raises GroupBroken when they do not come.
        """
        if len(members) == 1:
            return cls(name, members, rank)
        place, size = list(members).index(rank), len(members)
        own = PrefixStore(f"{name}/{members[0]}", store)
        timeout = datetime.timedelta(seconds=timeout_s)
        try:
            if device is None or device.type == "cpu":
                backend: Any = dist.ProcessGroupGloo(own, place, size, timeout)
            else:
                # Its own watchdog takes the whole process down: ours has to be first.
                options = dist.ProcessGroupNCCL.Options()
                options._timeout = _WATCHDOG * timeout
                backend = dist.ProcessGroupNCCL(own, place, size, options)
        except RuntimeError as error:
            raise GroupBroken(f"{name}: {str(error).splitlines()[0]}") from error
        group = cls(name, members, rank, backend)
        if idle_s is not None:
            group.meet()
            backend._set_default_timeout(datetime.timedelta(seconds=idle_s))
        if device is not None and device.type != "cpu":  # NCCL connects with its first call
            group.all_reduce(torch.zeros(1, dtype=torch.int32, device=device))
            torch.accelerator.synchronize(device)
        return group

    @property
    def size(self) -> int:
        """The number of members."""
        return len(self.members)

    @property
    def backend(self) -> Any:
        """What torch offers for the group; for what needs more than this class has."""
        return self._backend

    def all_gather(self, x: Tensor) -> Tensor:
        """Return every member's x, [size, *x.shape]."""
        out, work = self.start_gather(x)
        work.wait()
        return out

    def start_gather(self, x: Tensor) -> tuple[Tensor, Waitable]:
        """Start the same; the result may be read behind the wait."""
        x = x.contiguous()
        out = x.new_empty((self.size, *x.shape))
        work = self._run(
            "all_gather",
            lambda b: b._allgather_base(_bytes(out), _bytes(x)),
            lambda: out.copy_(x.unsqueeze(0)),
            (out, x),
        )
        return out, work

    def all_reduce(self, x: Tensor, largest: bool = False) -> Tensor:
        """Sum x over the members, or take the largest, in place."""
        options = dist.AllreduceOptions()
        wanted: Any = dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM
        options.reduceOp = wanted
        self._run("all_reduce", lambda b: b.allreduce([x], options), lambda: None, (x,)).wait()
        return x

    def all_to_all(
        self,
        out: Tensor,
        x: Tensor,
        out_splits: Sequence[int] | None = None,
        in_splits: Sequence[int] | None = None,
    ) -> Waitable:
        """Start sending x's rows, cut by `in_splits`, to the members in order, and filling out's.

        Splits count rows; None cuts evenly. Types and shapes of a row agree everywhere.
        """
        out_bytes, in_bytes = _rows(out), _rows(x)
        taken = [] if out_splits is None else list(out_splits)
        given = [] if in_splits is None else list(in_splits)
        return self._run(
            "all_to_all",
            lambda b: b.alltoall_base(out_bytes, in_bytes, taken, given),
            lambda: out_bytes.copy_(in_bytes),
            (out, x, out_bytes, in_bytes),
        )

    def sum_scatter(self, out: Tensor, x: Tensor) -> Waitable:
        """Start summing x [size * n, ...] over the members, of which each gets its part [n, ...].

        int32 is what all transports add.
        """
        return self._run(
            "reduce_scatter",
            lambda b: b._reduce_scatter_base(out, x),
            lambda: out.copy_(x),
            (out, x),
        )

    def broadcast(self, x: Tensor, source: int = 0) -> Tensor:
        """Copy x from one place to all, in place."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = source, 0
        data = _bytes(x)
        self._run("broadcast", lambda b: b.broadcast([data], options), lambda: None, (x,)).wait()
        return x

    def send(self, x: Tensor, place: int) -> Waitable:
        """Start sending to one member, which receives the same."""
        data = _bytes(x)
        return self._run("send", lambda b: b.send([data], place, 0), lambda: None, (x,))

    def receive(self, x: Tensor, place: int) -> Waitable:
        """Start receiving from one member."""
        data = _bytes(x)
        return self._run("receive", lambda b: b.recv([data], place, 0), lambda: None, (x,))

    def share_bytes(self, data: bytes | None, size: int, source: int = 0) -> bytes:
        """Return what one member holds; all know its size."""
        if self.place == source:
            assert data is not None and len(data) == size, (self.name, size)
            buffer = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        else:
            buffer = torch.empty(size, dtype=torch.uint8)
        return bytes(self.broadcast(buffer, source).numpy().data)

    def meet(self) -> None:
        """Wait until every member is here."""
        self._run("barrier", lambda b: b.barrier(), lambda: None, ()).wait()

    def abort(self) -> None:
        """End what is under way, in whatever thread; nothing more can be called."""
        self._is_broken = True
        backend = self._backend
        if backend is not None and hasattr(backend, "abort"):
            try:
                backend.abort()
            except RuntimeError:
                pass  # it has ended by itself

    def close(self) -> None:
        """Let go of the connections."""
        self._is_broken = True
        backend, self._backend = self._backend, None
        if backend is not None:
            try:
                backend.shutdown()
            except RuntimeError:
                pass

    def _run(
        self,
        name: str,
        call: Callable[[Any], Any],
        alone: Callable[[], object],
        kept: Sequence[Tensor],
    ) -> Waitable:
        if self._is_broken:
            raise GroupBroken(f"{self.name}: the group has ended")
        self.counts[name] += 1
        if self.size == 1:
            alone()
            return DONE
        told = f"{name} over {self.name}"
        try:
            return _Work(call(self._backend), told, kept)
        except RuntimeError as error:
            raise GroupBroken(f"{told}: {str(error).splitlines()[0]}") from error


def _bytes(x: Tensor) -> Tensor:
    return x.view(-1).view(torch.uint8)


def _rows(x: Tensor) -> Tensor:
    """View rows as bytes, [rows, bytes]."""
    if not x.numel():
        return x.new_empty((x.shape[0], 1), dtype=torch.uint8)
    return x.view(x.shape[0], -1).view(torch.uint8)
