"""Turn: lets one thread at a time into an engine, in the order in which they come. Pure.

A plain lock would do but for fairness: the thread that steps an engine takes it again at once, and
others would hardly ever get in between two steps.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from types import TracebackType

__all__ = ["Turn"]


class Turn:
    """A context manager; a thread that is inside may enter again.

    check  called before every wait; raises where waiting would never end
    """

    def __init__(self, check: Callable[[], None] = lambda: None) -> None:
        self._check = check
        self._guard = threading.Lock()
        self._waiting: deque[threading.Lock] = deque()
        self._owner: int | None = None
        self._taken = False
        self._depth = 0

    def __enter__(self) -> None:
        """Wait for the turn."""
        self._check()
        me = threading.get_ident()
        if self._owner == me:
            self._depth += 1
            return
        gate = threading.Lock()
        with self._guard:
            if self._taken:
                gate.acquire()
                self._waiting.append(gate)
            self._taken = True
        try:
            gate.acquire()  # whoever leaves opens it
        except BaseException:  # Ctrl-C while waiting
            with self._guard:
                waits = gate in self._waiting
                if waits:
                    self._waiting.remove(gate)
            if not waits:
                self._leave()
            raise
        self._owner, self._depth = me, 1

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Let the next thread in."""
        self._depth -= 1
        if not self._depth:
            self._owner = None
            self._leave()

    def _leave(self) -> None:
        with self._guard:
            if self._waiting:
                self._waiting.popleft().release()
            else:
                self._taken = False
