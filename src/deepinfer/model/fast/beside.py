"""Work of a recorded step that runs beside other work: branches of its CUDA graph.

At few rows a step is small kernels that leave most of a card idle. Where two chains of them need
nothing of each other, a recording may hold both side by side. What they compute is the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

__all__ = ["Side"]

T = TypeVar("T")


class Side:
    """The second stream of a model's steps; one branch at a time.

    Kernels on it share nothing that changes with those on the first: no workspace that calls have
    in common, no cache that the other reads before `join`.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None

    @property
    def runs(self) -> bool:
        """Whether a step is being recorded; elsewhere a second stream costs more than it saves."""
        return self._device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def run(self, work: Callable[[], T]) -> Callable[[], T]:
        """Run work beside what follows; the result, which must be called, waits and returns it."""
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        side = self._stream
        side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(side):
            found = work()

        def join(_held: object = work) -> T:
            # What work reads is held until here, so that nothing else gets its memory.
            torch.cuda.current_stream(self._device).wait_stream(side)
            return found

        return join
