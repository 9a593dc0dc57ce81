"""Work of a recorded step that runs beside other work: branches of its CUDA graph.

At few rows a step is small kernels that leave most of a card idle. Where two chains of them need
nothing of each other, a recording may hold both side by side. What they compute is the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeVar

import torch

from deepinfer.kernels.fetch_ahead import fetch_ahead
from deepinfer.kernels.linear import DenseWeight, Fp8Weight

__all__ = ["Side"]

T = TypeVar("T")


_AHEAD: Final = 48 << 20
"""Most bytes that are fetched ahead at a time: an H200 caches 50 MB."""


class Side:
    """The second stream of a model's steps; one branch at a time.

    fetches  small kernels leave memory idle: let it bring the weights of products to come

    Kernels on it share nothing that changes with those on the first: no workspace that calls have
    in common, no cache that the other reads before `join`.
    """

    def __init__(self, device: torch.device, fetches: bool = False) -> None:
        self.fetches = fetches
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        self._open = False

    @property
    def runs(self) -> bool:
        """Whether a step is being recorded; elsewhere a second stream costs more than it saves."""
        return self._device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def run(self, work: Callable[[], T]) -> Callable[[], T]:
        """Run work beside what follows; the result joins both again and returns what work did."""
        side = self._fork()
        with torch.cuda.stream(side):
            found = work()

        def join(_held: object = work) -> T:
            # What work reads is held until here, so that nothing else gets its memory.
            torch.cuda.current_stream(self._device).wait_stream(side)
            return found

        return join

    def fetch(self, num_rows: int, *weights: DenseWeight | Fp8Weight) -> None:
        """Fetch what products of so many rows read of weights ahead, the first ones first."""
        with torch.cuda.stream(self._fork()):
            left = _AHEAD
            for weight in weights:
                left -= fetch_ahead(weight, num_rows, left)

    def end(self) -> None:
        """Join whatever branch is open: a recording ends on the stream that it began on."""
        if self._open and self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
        self._open = False

    def _fork(self) -> torch.cuda.Stream:
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        self._open = True
        return self._stream
