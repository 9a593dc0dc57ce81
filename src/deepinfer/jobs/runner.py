"""Rows through an engine: read lazily, a bounded number in flight, each answered exactly once."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, Final, Protocol

from deepinfer.engine.request import Completion, SamplingParams
from deepinfer.errors import DeepInferError, ProtocolError, RequestError
from deepinfer.jobs.ledger import Ledger
from deepinfer.jobs.output import Output, Record
from deepinfer.jobs.rows import Context, Row, Work, failure, prepare, read_row
from deepinfer.jobs.source import Line, Source

__all__ = ["Engine", "JobOptions", "Totals", "run_jobs"]

_log = logging.getLogger(__name__)
_READ_AHEAD: Final = 8  # groups of lines
_GROUP_LINES: Final = 64
_GROUP_BYTES: Final = 2**20
_MAX_LIVE_BYTES: Final = 256 * 2**20  # of lines whose rows are in flight
_IDLE_S: Final = 0.1


class Engine(Protocol):
    """What jobs need from an LLM."""

    def submit(self, prompt: list[int], sampling_params: SamplingParams) -> int:
        """Queue a prompt; return its request id."""
        ...

    def step(self) -> list[Completion]:
        """Run one step; return what has finished."""
        ...

    def cancel(self, request_id: int) -> bool:
        """End a request."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOptions:
    """How to run.

    window      most requests in flight
    max_errors  stop when more rows than this have failed; None goes on
    retries     whether to answer rows again whose record is an error
    """

    window: int
    max_errors: int | None = None
    retries: bool = False


@dataclass(slots=True)
class Totals:
    """How far a run is, and in the end what it did.

    done, failed     rows answered in this run, and rows whose record is an error
    skipped          rows that an earlier run has answered
    failed_before    how many of the answers there before this run are errors
    retried          errors there before this run that were taken out, to answer their rows again
    unmatched        answers in the output whose rows the input does not have
    torn_bytes       of a last record that an earlier run left torn and that was cut off
    fraction         of the input that is read, None where its size is not known
    stopped          None when all was read, else `interrupted` or `max_errors`
    """

    done: int = 0
    failed: int = 0
    skipped: int = 0
    failed_before: int = 0
    retried: int = 0
    unmatched: int = 0
    torn_bytes: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    drafts_verified: int = 0
    drafts_accepted: int = 0
    seconds: float = 0.0
    fraction: float | None = None
    stopped: str | None = None
    _start: float = field(default_factory=time.monotonic)

    @property
    def acceptance(self) -> float | None:
        """Which share of the verified drafts was right, None where there were none."""
        return self.drafts_accepted / self.drafts_verified if self.drafts_verified else None

    def tick(self) -> None:
        """Take the time."""
        self.seconds = time.monotonic() - self._start

    def summary(self) -> dict[str, Any]:
        """Return the totals as they are printed at the end."""
        found = {k: v for k, v in asdict(self).items() if k not in ("_start", "fraction")}
        rate = 1 / self.seconds if self.seconds > 0 else 0.0
        found["prompt_tokens_per_s"] = round(self.prompt_tokens * rate, 1)
        found["output_tokens_per_s"] = round(self.output_tokens * rate, 1)
        found["acceptance"] = None if self.acceptance is None else round(self.acceptance, 4)
        found["seconds"] = round(self.seconds, 3)
        return found


@dataclass(slots=True)
class _Live:
    """A row in flight."""

    row: Row
    work: Work
    num_bytes: int
    completions: list[Completion | None]
    num_left: int


def run_jobs(
    engine: Engine,
    source: Source,
    output: Output,
    context: Context,
    options: JobOptions,
    *,
    report: Callable[[Totals], None] | None = None,
    is_stopped: Callable[[], bool] = lambda: False,
) -> Totals:
    """Answer every row of the source that the output does not answer yet.

    report      called after every step
    is_stopped  asked between steps: whether to end now and leave the rest to the next run
    Errors of a row are its record. Raises RequestError when the input cannot be read, the output
    cannot be written, or a row differs from the one that the output answers.
    """
    with Ledger() as ledger:
        retried = output.drop_failed() if options.retries else 0
        failed_before = 0
        for record in output.recover():
            failed_before += record.get("error") is not None
            run = record["run"]
            if not ledger.add_answered(run["key"], run["request"]):
                raise RequestError(
                    f"{output.path} answers {run['key']!r} twice: two runs have written it, or it "
                    "was put together by hand; give another output"
                )
        job = _Job(engine, _Reader(source), output, ledger, context, options)
        job.totals.failed_before = failed_before
        job.totals.retried = retried
        job.totals.torn_bytes = output.num_torn_bytes
        try:
            job.run(source, report, is_stopped)
        finally:
            job.cancel()
        job.totals.fraction = source.fraction
        job.totals.unmatched = ledger.num_unmatched if job.totals.stopped is None else 0
        job.totals.tick()
        return job.totals


class _Reader:
    """Reads lines in a thread, so that a slow input does not stop what is in flight."""

    def __init__(self, source: Source) -> None:
        self._groups: queue.Queue[list[Line] | Exception | None] = queue.Queue(_READ_AHEAD)
        self._group: deque[Line] = deque()
        self._is_over = False
        self._source = source
        self._is_closed = threading.Event()
        threading.Thread(target=self._read, name="jobs reader", daemon=True).start()

    def take(self, waits: bool) -> Line | None:
        """Return the next line, None when there is none yet; see `is_over`."""
        if not self._group and not self._is_over:
            try:
                found = self._groups.get(timeout=_IDLE_S) if waits else self._groups.get_nowait()
            except queue.Empty:
                return None
            if isinstance(found, Exception):
                raise found
            self._is_over = found is None
            self._group.extend(found or ())
        return self._group.popleft() if self._group else None

    @property
    def is_over(self) -> bool:
        """Whether all lines have been taken."""
        return self._is_over and not self._group

    def close(self) -> None:
        """Let the thread end."""
        self._is_closed.set()

    def _read(self) -> None:
        """Hand lines over in groups, but one by one where the next may have to be waited for."""
        group: list[Line] = []
        size, most = 0, 1 if self._source.waits else _GROUP_LINES
        try:
            for line in self._source:
                group.append(line)
                size += len(line.data or b"")
                if len(group) >= most or size >= _GROUP_BYTES:
                    self._put(group)
                    group, size = [], 0
                if self._is_closed.is_set():
                    return
            self._put(group)
            self._put(None)
        except Exception as error:  # told where the lines are taken
            self._put(group)
            self._put(error)

    def _put(self, item: list[Line] | Exception | None) -> None:
        while not self._is_closed.is_set():
            try:
                return self._groups.put(item, timeout=_IDLE_S)
            except queue.Full:
                continue


def _told(error: Exception) -> DeepInferError:
    """Return what a row is told. A mistake of ours costs that row only, and not the run."""
    if isinstance(error, DeepInferError):
        return error
    if isinstance(error, MemoryError):
        raise error
    _log.error("a row could not be worked on", exc_info=error)
    return ProtocolError(f"internal error: {type(error).__name__}: {error}", status=500)


class _Job:
    """One run over one source."""

    def __init__(
        self,
        engine: Engine,
        reader: _Reader,
        output: Output,
        ledger: Ledger,
        context: Context,
        options: JobOptions,
    ) -> None:
        self.totals = Totals()
        self._engine = engine
        self._reader = reader
        self._output = output
        self._ledger = ledger
        self._context = context
        self._options = options
        self._live: dict[int, tuple[_Live, int]] = {}
        self._live_bytes = 0
        self._records: list[Record] = []

    def run(
        self,
        source: Source,
        report: Callable[[Totals], None] | None,
        is_stopped: Callable[[], bool],
    ) -> None:
        """Go on until nothing is left or something stops it."""
        totals = self.totals
        while totals.stopped is None:
            self._fill()
            if self._live:
                for completion in self._engine.step():
                    self._take(completion)
            self._write()
            most = self._options.max_errors
            if most is not None and totals.failed > most:
                totals.stopped = "max_errors"
            elif is_stopped():
                totals.stopped = "interrupted"
            elif self._reader.is_over and not self._live:
                break
            if report is not None:
                totals.tick()
                totals.fraction = source.fraction
                report(totals)

    def cancel(self) -> None:
        """Keep what is answered and drop what is in flight: it belongs to the next run."""
        self._reader.close()
        self._write()
        for request_id in self._live:
            self._engine.cancel(request_id)
        if self._live:
            self._engine.step()  # takes the aborted completions out of the engine
        self._live.clear()

    def _fill(self) -> None:
        """Submit rows as long as there is room; wait for a line only when nothing is in flight."""
        for line in self._lines():
            row = read_row(line, self._context.settings)
            if (met := self._meet(row)) is None:
                self.totals.skipped += 1
                continue
            try:
                work = prepare(met, self._context)
            except Exception as error:
                self._fail(met, _told(error))
                if self._is_full_of_errors():
                    return
                continue
            size = len(line.data or b"")
            count = len(work.prompts)
            live = _Live(met, work, size, [None] * count, count)
            self._live_bytes += size
            for place, (ids, params) in enumerate(zip(work.prompts, work.params, strict=True)):
                self._live[self._engine.submit(list(ids), params)] = (live, place)

    def _lines(self) -> Iterator[Line]:
        while len(self._live) < self._options.window and self._live_bytes < _MAX_LIVE_BYTES:
            line = self._reader.take(waits=not self._live and not self._records)
            if line is None:
                return
            yield line
            if len(self._records) >= self._options.window:
                return

    def _is_full_of_errors(self) -> bool:
        most = self._options.max_errors
        return most is not None and self.totals.failed > most

    def _meet(self, row: Row) -> Row | None:
        """Return the row to work on, None when it is answered.

        Raises RequestError when it is answered for another request.
        """
        before, answered = self._ledger.meet(row.key, row.line)
        if before:
            duplicate = row.as_duplicate(before)
            _, answered = self._ledger.meet(duplicate.key, row.line)
            return duplicate if answered is None else None
        if answered is None:
            return row
        if answered != row.request:
            name = f"line {row.line}"
            name += "" if row.custom_id is None else f" (custom_id {row.custom_id!r})"
            raise RequestError(
                f"{name} differs from what {self._output.path} answers: the input, the model or "
                "the settings have changed since; give another output, or what it was run with"
            )
        return None

    def _take(self, completion: Completion) -> None:
        """Take a completion; the last one of a row makes its record."""
        found = self._live.pop(completion.request_id, None)
        if found is None:  # of another user of the engine
            return
        live, place = found
        live.completions[place] = completion
        live.num_left -= 1
        totals = self.totals
        totals.output_tokens += len(completion.token_ids)
        if place == 0 or live.work.prompts[place] is not live.work.prompts[place - 1]:
            totals.prompt_tokens += len(completion.prompt_token_ids)
        totals.drafts_verified += completion.num_draft_verified
        totals.drafts_accepted += completion.num_draft_accepted
        if live.num_left:
            return
        self._live_bytes -= live.num_bytes
        try:
            record = live.work.respond([c for c in live.completions if c is not None])
        except Exception as error:
            self._fail(live.row, _told(error))
        else:
            self._records.append(record)
            totals.done += 1

    def _fail(self, row: Row, error: DeepInferError) -> None:
        self._records.append(failure(row, error))
        self.totals.failed += 1

    def _write(self) -> None:
        records, self._records = self._records, []
        if records:
            self._output.append(records)
