"""Watch: notices processes that are gone or hang, and says which, in a thread of its own.

Every process beats into the store once a second; rank 0 reads all beats and waits on the processes
that it started. Whatever is noticed first is the failure of the whole engine, written into the
store, where every rank finds it.

Source: parallelism specification, 7.3.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from typing import Final

from torch.distributed.distributed_c10d import Store

__all__ = ["Watch", "end_process", "how_it_ended"]

_PAUSE_S: Final = 0.1  # between two looks at child processes
_BEAT_S: Final = 1.0
_SILENT_S: Final = 10.0  # beats missing for so long: the process is gone, or stopped
_EXIT: Final = 70

_log = logging.getLogger(__name__)


def how_it_ended(code: int) -> str:
    """Say how a process ended from its exit code."""
    if code < 0:
        try:
            return f"was killed by {signal.Signals(-code).name}"
        except ValueError:
            return f"was killed by signal {-code}"
    return f"ended with exit code {code}"


class Watch:
    """The watch of one rank.

    store       a connection of its own: a thread that waits holds a connection up
    children    rank -> process, of the ranks that this one has started
    timeout_s   after which a step has failed
    on_failure  called once, in the watch's thread, with what happened
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        world: int,
        timeout_s: float,
        on_failure: Callable[[str], None],
        children: Mapping[int, subprocess.Popen[bytes]] | None = None,
    ) -> None:
        self._store = store
        self._rank = rank
        self._world = world
        self._timeout_s = timeout_s
        self._on_failure = on_failure
        self._children = dict(children or {})
        self._now = ("start", 0, "")
        self._count = 0
        self._seen: dict[int, tuple[str, float]] = {}
        self._since: dict[int, tuple[tuple[int, str], float]] = {}
        self._failure: str | None = None
        self._noticed = threading.Event()
        self._taken = threading.Event()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="deepinfer-watch", daemon=True)
        self._thread.start()

    @property
    def failure(self) -> str | None:
        """What has happened, None when nothing has."""
        return self._failure

    def enter(self, step: int, kind: str) -> None:
        """Say that a step begins."""
        self._now = ("step", step, kind)

    def rest(self) -> None:
        """Say that nothing is under way: what comes next may take as long as it likes."""
        self._now = ("rest", self._now[1], self._now[2])

    def wait(self, seconds: float) -> str | None:
        """Return what has happened, waiting a while for somebody to find out."""
        self._noticed.wait(seconds)
        return self._failure

    def report(self, told: str) -> None:
        """Make a failure known to all ranks, unless there is one already."""
        if self._noticed.is_set() or self._closed.is_set():
            return
        try:
            self._failure = self._store.compare_set("failed", "", told).decode()
        except RuntimeError:
            self._failure = told
        self._noticed.set()
        self._on_failure(self._failure)

    def take(self) -> None:
        """Say that the process itself knows of the failure and goes its way."""
        self._taken.set()

    def was_taken(self, seconds: float) -> bool:
        """Wait for `take`; return whether it came."""
        return self._taken.wait(seconds)

    def close(self) -> None:
        """Stop watching."""
        self._taken.set()
        self._closed.set()
        if self._thread is not threading.current_thread():
            self._thread.join(timeout=5.0)

    def last_step(self, rank: int) -> str:
        """Say what a rank was doing when it last told, or this one was: steps have one number."""
        phase, step, kind = self._now
        if rank in self._seen:
            told, at, of, _ = json.loads(self._seen[rank][0])
            if at > step:
                phase, step, kind = told, at, of
        if not step:
            return "it had not begun a step"
        return f"it was {'in' if phase == 'step' else 'after'} step {step} ({kind})"

    def _run(self) -> None:
        next_beat = 0.0
        while not self._closed.wait(_PAUSE_S):
            for rank, child in self._children.items():
                code = child.poll()
                if code is not None and not self._noticed.is_set():
                    self._look(rank)
                    told = self._told() or (
                        f"rank {rank} of {self._world} (process {child.pid}) "
                        f"{how_it_ended(code)}; {self.last_step(rank)}"
                    )
                    self.report(told)
            now = time.monotonic()
            if now < next_beat or self._noticed.is_set():
                continue
            next_beat = now + _BEAT_S
            try:
                self._beat(now)
            except RuntimeError as error:  # the store is in rank 0's process
                if not self._closed.is_set():
                    last = str(error).splitlines()[0]
                    self.report(f"rank {self._rank} of {self._world} lost rank 0: {last}")

    def _beat(self, now: float) -> None:
        self._count += 1
        self._store.set(f"beat/{self._rank}", json.dumps([*self._now, self._count]))
        told = self._told()
        if told:
            self._failure = told
            self._noticed.set()
            self._on_failure(told)
            return
        for rank in range(self._world) if self._rank == 0 else (0,):
            if rank == self._rank or not self._look(rank):
                continue
            value, since = self._seen[rank]
            name = f"rank {rank} of {self._world}"
            if now - since > _SILENT_S:
                self.report(f"{name} gives no sign of life; {self.last_step(rank)}")
                return
            phase, step, kind, _ = json.loads(value)
            if phase == "step":
                before, began = self._since.setdefault(rank, ((step, kind), now))
                if before != (step, kind):
                    self._since[rank] = ((step, kind), now)
                elif now - began > self._timeout_s:
                    self.report(
                        f"{name} has been in step {step} ({kind}) for more than "
                        f"{self._timeout_s:g} s: raise parallel.timeout_s if that is no mistake"
                    )
                    return
            else:
                self._since.pop(rank, None)

    def _look(self, rank: int) -> bool:
        """Read a rank's beat; return whether there ever was one."""
        key, now = f"beat/{rank}", time.monotonic()
        try:
            if self._store.check([key]):
                value = self._store.get(key).decode()
                if rank not in self._seen or self._seen[rank][0] != value:
                    self._seen[rank] = (value, now)
        except RuntimeError:
            pass
        return rank in self._seen

    def _told(self) -> str | None:
        """Return the failure that stands in the store."""
        try:
            return self._store.get("failed").decode() if self._store.check(["failed"]) else None
        except RuntimeError:
            return None


def end_process(told: str) -> None:
    """End a process that only serves: the reason goes to the log, nothing is waited for."""
    _log.error("%s", told)
    logging.shutdown()
    os._exit(_EXIT)
