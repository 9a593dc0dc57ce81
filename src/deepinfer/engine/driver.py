"""One thread that drives a synchronous engine for asynchronous callers.

Iterators are advanced in that thread, one at a time, so that any number of coroutines, of any event
loop, share the engine's steps while their loops stay free. Pure.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

__all__ = ["EngineDriver"]

T = TypeVar("T")


class EngineDriver:
    """Advances generators in a thread of its own, which begins with the first."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._thread: int | None = None
        self._num_active = 0
        self._guard = threading.Lock()

    @property
    def holds(self) -> bool:
        """Whether coroutines are being served and the caller is not the thread that serves them."""
        return self._num_active > 0 and threading.get_ident() != self._thread

    async def iterate(
        self, make: Callable[[], Generator[T, None, None]]
    ) -> AsyncGenerator[T, None]:
        """Yield what a generator yields.

        make  builds it, in the engine's thread
        Leaving early closes the generator.
        """
        loop = asyncio.get_running_loop()
        with self._guard:
            pool = self._open()
            self._num_active += 1
        source: list[Generator[T, None, None]] = []

        def advance() -> list[T]:
            if not source:
                source.append(make())
            return [item for item in [next(source[0], None)] if item is not None]

        def close() -> None:
            try:
                for generator in source:
                    generator.close()
            finally:
                with self._guard:
                    self._num_active -= 1

        try:
            while found := await loop.run_in_executor(pool, advance):
                yield found[0]
        finally:  # also when cancelled: behind the step that may still run
            await asyncio.shield(loop.run_in_executor(pool, close))

    def close(self) -> None:
        """End the thread."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(wait=True)

    def _open(self) -> ThreadPoolExecutor:
        if self._pool is None:

            def note() -> None:
                self._thread = threading.get_ident()

            self._pool = ThreadPoolExecutor(1, "deepinfer-async", initializer=note)
        return self._pool
