"""GrammarService: compiles shapes off the engine's thread and keeps what was compiled.

One a vocabulary. A compilation asked for twice runs once; what is kept is bounded in bytes; a
shape that cannot be used is the problem of its own request.
"""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

from deepinfer.config.engine import GrammarConfig
from deepinfer.errors import DeepInferError, RequestError
from deepinfer.grammar.backend import Backend, BackendError, Compiled, Vocabulary
from deepinfer.grammar.llguidance import LLGuidance
from deepinfer.grammar.matcher import Matcher
from deepinfer.grammar.prepare import Prepared, compile_shape
from deepinfer.grammar.report import Report
from deepinfer.grammar.spec import Structured
from deepinfer.grammar.xgrammar import XGrammar

__all__ = ["Gate", "GrammarService", "make_backend"]


def make_backend(config: GrammarConfig, vocabulary: Vocabulary) -> Backend:
    """Build the adapter that the settings name; raises UnsupportedError without its package."""
    kind: type[LLGuidance] | type[XGrammar] = (
        LLGuidance if config.backend == "llguidance" else XGrammar
    )
    return kind(vocabulary, _threads(config))


def _threads(config: GrammarConfig) -> int:
    return (os.cpu_count() or 1) if config.threads == "auto" else config.threads


@dataclass(frozen=True, slots=True)
class _Ready:
    compiled: Compiled
    last_word: Callable[[str], str | None]
    num_bytes: int


class _Job:
    """One compilation, shared by all that ask for it."""

    def __init__(self) -> None:
        self.is_taken = False
        self.started_s: float | None = None
        self.is_given_up = False
        self.future: Future[_Ready | str] = Future()


class Gate:
    """What one request waits for: `poll` gives its matcher, an error, or None while compiling."""

    def __init__(self, poll: Callable[[], Matcher | str | None]) -> None:
        self.poll = poll


class GrammarService:
    """Turns shapes into matchers.

    make_vocabulary  called once, on first use, in a thread that compiles
    """

    def __init__(self, config: GrammarConfig, make_vocabulary: Callable[[], Vocabulary]) -> None:
        self.config = config
        self._make_vocabulary = make_vocabulary
        self._vocabulary: Vocabulary | None = None
        self._backend: Backend | None = None
        self._building = threading.Lock()
        self._lock = threading.Lock()
        self._kept: OrderedDict[Structured, _Ready] = OrderedDict()
        self._num_bytes = 0
        self._jobs: dict[Structured, _Job] = {}
        self._pool: ThreadPoolExecutor | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of compiled grammars that are kept."""
        return self._num_bytes

    @property
    def vocabulary(self) -> Vocabulary:
        """The vocabulary, once `backend` has been built."""
        assert self._vocabulary is not None
        return self._vocabulary

    @property
    def backend(self) -> Backend:
        """The library's adapter; building it takes as long as reading the vocabulary."""
        with self._building:
            if self._backend is None:
                self._vocabulary = self._make_vocabulary()
                self._backend = make_backend(self.config, self._vocabulary)
            return self._backend

    def report(self, shape: Structured) -> Report:
        """Say what would be enforced of a shape; raises RequestError when it cannot be used."""
        return self.compile(shape)[0].report

    def gate(self, shape: Structured, end_ids: Sequence[int]) -> Gate:
        """Begin to compile a shape and return what its request waits for.

        end_ids  ids that end the output
        """
        key = replace(shape, trigger=(), bound=None)
        with self._lock:
            ready = self._kept.get(key)
            if ready is not None:
                self._kept.move_to_end(key)
            job = self._jobs.get(key)
            if ready is None and job is None:
                job = self._jobs[key] = _Job()
                self._executor().submit(self._run, key, job)
        limit_s = self.config.compile_timeout_s

        def matcher(found: _Ready) -> Matcher:
            assert self._backend is not None
            return Matcher(
                self._backend,
                found.compiled,
                self.vocabulary,
                end_ids,
                shape.trigger_ids,
                shape.bound_id,
                found.last_word,
            )

        def poll() -> Matcher | str | None:
            if ready is not None:
                return matcher(ready)
            assert job is not None
            if job.future.done():
                result = job.future.result()
                return result if isinstance(result, str) else matcher(result)
            if job.started_s is not None and time.monotonic() - job.started_s > limit_s:
                self._give_up(key, job)
                return (
                    f"structured {shape.kind} was not compiled within {limit_s:g} s: simplify it, "
                    "or raise grammar.compile_timeout_s"
                )
            return None

        return Gate(poll)

    def compile(self, shape: Structured) -> tuple[Prepared, Compiled]:
        """Compile a shape here and now, past what is kept; raises RequestError."""
        try:
            return compile_shape(shape, self.config, self.backend)
        except BackendError as error:
            raise RequestError(f"structured {shape.kind} cannot be used: {error}") from None

    def close(self) -> None:
        """Let threads and grammars go; a compilation that runs is not waited for."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(wait=False, cancel_futures=True)
        self._kept.clear()
        self._num_bytes = 0

    def _give_up(self, key: Structured, job: _Job) -> None:
        """Leave a compilation that overran to its thread, and the others to new threads.

        A library cannot be stopped; what waited behind it must not wait for it. Whoever asks for
        the shape again while it runs is told at once, and gets it once it is there.
        """
        with self._lock:
            if job.is_given_up or self._jobs.get(key) is not job:
                return
            job.is_given_up = True
            if self._pool is not None:
                self._pool.shutdown(wait=False, cancel_futures=True)
                self._pool = None
            for other_key, other in self._jobs.items():
                if not other.is_taken:
                    self._executor().submit(self._run, other_key, other)

    def _executor(self) -> ThreadPoolExecutor:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(_threads(self.config), "grammar")
        return self._pool

    def _run(self, key: Structured, job: _Job) -> None:
        with self._lock:
            if job.is_taken:
                return
            job.is_taken = True
        result: _Ready | str
        try:
            _ = self.backend  # loading a library takes seconds, which are not the shape's
            job.started_s = time.monotonic()
            prepared, compiled = self.compile(key)
            cost = compiled.num_bytes + prepared.num_bytes
            result = _Ready(compiled, prepared.last_word, cost)
        except DeepInferError as error:
            result = str(error)
        except Exception as error:  # whatever a library throws is this request's problem only
            result = f"structured {key.kind} cannot be used: {type(error).__name__}: {error}"
        with self._lock:
            if self._jobs.get(key) is job:
                del self._jobs[key]
            if isinstance(result, _Ready):
                self._keep(key, result)
        job.future.set_result(result)

    def _keep(self, key: Structured, ready: _Ready) -> None:
        """Keep what was compiled, and drop what was used longest ago beyond the limit."""
        self._kept[key] = ready
        self._num_bytes += ready.num_bytes
        while self._num_bytes > self.config.cache_bytes and self._kept:
            _, dropped = self._kept.popitem(last=False)
            self._num_bytes -= dropped.num_bytes
