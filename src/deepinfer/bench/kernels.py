"""`deepinfer bench kernels`: every op, every implementation, every installed peer, in one run.

Members of a task are timed in alternation by a worker process. A worker that hangs or dies costs
the member it was at, nothing else.
"""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from itertools import groupby
from typing import IO, Any, Final

from deepinfer.bench.ceilings import Ceilings
from deepinfer.bench.machine import describe_card, describe_machine, describe_versions
from deepinfer.bench.points import Member, Shape, list_members, member_key
from deepinfer.bench.records import record_of
from deepinfer.device import pick_device

__all__ = ["KernelRecord", "measure_kernels", "read_record"]

_WORKER: Final = "deepinfer.bench.kernelworker"
_START_S: Final = 60.0
_WARM_S: Final = 45.0
_MEASURE_S: Final = 30.0
_WARM_SHARE: Final = 0.6
"""Share of the time that compiling and comparing may take before measuring starts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelRecord:
    """One member timed, or why not.

    us        microseconds of a call, steady (`deepinfer.bench.timing`)
    rest_s    timed alone, after so many seconds of pause; 0 = in alternation with others
    of_floor  share of the time below which the ceilings of the same run let no version go
    error     relative L2 against the fp32 reference, or the share of other integers
    failed    what went wrong, "" = nothing
    """

    task: str
    rows: int
    name: str
    op: str
    case: str
    note: str
    invariant: bool
    us: float = 0.0
    us_burst: float = 0.0
    us_min: float = 0.0
    steady: bool = False
    mode: str = ""
    calls: int = 0
    sets: int = 0
    rest_s: float = 0.0
    flops: float = 0.0
    bytes: float = 0.0
    floor_us: float = 0.0
    of_floor: float = 0.0
    error: float | None = None
    tolerance: float | None = None
    first_s: float | None = None
    failed: str = ""
    when: str = ""
    machine: Mapping[str, str | int] | None = None
    versions: Mapping[str, str] | None = None
    ceilings: Mapping[str, float] | None = None

    def to_json(self) -> str:
        """Return the record as one line."""
        return json.dumps({"format": 1, "suite": "kernels", **asdict(self)}, ensure_ascii=False)


def read_record(line: str) -> KernelRecord:
    """Read what `to_json` wrote; raises ValueError when the line is no such record."""
    return record_of(line, "kernels", KernelRecord)


def measure_kernels(
    device: str,
    shape: Shape,
    only: str = "",
    peers: bool = False,
    skip: Sequence[str] = (),
    seconds: float = 600.0,
    workers: int = 1,
    tell: Callable[[str], None] = lambda text: None,
    points: Collection[tuple[str, int]] | None = None,
    compile_only: bool = False,
    first: Collection[tuple[str, int]] = (),
    keep: Callable[[list[KernelRecord]], None] = lambda records: None,
    compared: Sequence[KernelRecord] = (),
    rest_s: float = 0.0,
) -> list[KernelRecord]:
    """Compile and compare every member in `workers` processes, then time them in one.

    seconds  when to stop; what was not reached is recorded as left out
    points   (task, rows) to time, None = all
    compile_only  time nothing: records hold errors, and what failed
    first    (task, rows) to time before the others
    keep     called with the records of a task and row count once they are there
    compared records whose errors are taken over, by key, instead of comparing once more; those of
             other sources are not
    rest_s   time each member alone after such a pause, 0 = those of a task in alternation
    """
    begin = time.monotonic()
    end = begin + seconds
    picked = pick_device(device)
    arch = picked.capability.arch
    members = list_members(shape, arch, only, peers, skip, points)
    tell(f"{len(members)} members on {arch}; compiling and comparing with {workers} workers")
    options = (device, shape, "1" if peers else "0")
    end_warm = time.monotonic() + (0.9 if compile_only else _WARM_SHARE) * seconds
    before = _compared(compared)
    checked, worker = _warm([m for m in members if m.key not in before], options, workers, end_warm)
    tell(f"{time.monotonic() - begin:.0f} s, {len(checked)} compiled and compared")
    checked = before | checked
    ceilings = None
    if not compile_only:
        ceilings = Ceilings(**_expect(worker.ask("ceilings", [], _START_S)))
    common = {
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": describe_machine() | describe_card(picked.torch_device),
        "versions": describe_versions(),
        "ceilings": ceilings and asdict(ceilings),
    }
    timed: dict[str, dict[str, Any]] = {}
    found: list[KernelRecord] = []
    for group in _turns(members, first):
        task, rows = group[0].task, group[0].rows
        keys = [m.key for m in group if "failed" not in checked.get(m.key, {"failed": ""})]
        keys = [] if compile_only else keys
        while keys and time.monotonic() < end:
            limit_s = min(_MEASURE_S, end - time.monotonic() + 1.0)
            answer = worker.ask("measure", keys[:1] if rest_s else keys, limit_s, rest_s)
            if "failed" in answer:  # the worker is lost, or the whole group is
                timed[worker.at if worker.at in keys else keys[0]] = answer
                worker = worker.again()
            elif any(found.get("lost") for found in answer.values()):
                worker = worker.again()
            timed.update({k: v for k, v in answer.items() if k in keys})
            keys = [key for key in keys if key not in timed]
        records = [
            _record(m, checked.get(m.key), timed.get(m.key), ceilings, common) for m in group
        ]
        found += [_untimed(record) for record in records] if compile_only else records
        keep(found[-len(group) :])
        if not compile_only:
            spent = time.monotonic() - begin
            tell(f"{spent:.0f} s, {task}, {rows} rows: {_brief(group, timed)}")
    worker.close()
    return found


def _compared(records: Sequence[KernelRecord]) -> dict[str, dict[str, Any]]:
    """Return what comparing members of the same sources said, by key: those that passed through."""
    sources = describe_versions().get("sources")
    return {
        member_key(r.task, r.rows, r.op, r.case, r.name): {"error": r.error, "first_s": r.first_s}
        for r in records
        if r.first_s is not None and r.versions and r.versions.get("sources") == sources
    }


def _turns(members: Sequence[Member], first: Collection[tuple[str, int]]) -> list[list[Member]]:
    """Group members by task and rows: `first`, then of each task one row count after the other."""
    groups = [list(group) for _, group in groupby(members, key=lambda m: (m.task, m.rows))]
    seen: Counter[str] = Counter()
    turns: list[tuple[int, list[Member]]] = []
    for group in groups:
        task, rows = group[0].task, group[0].rows
        if (task, rows) in first:
            turns.append((0, group))
        else:
            seen[task] += 1
            turns.append((seen[task], group))
    return [group for _, group in sorted(turns, key=lambda turn: turn[0])]


def _untimed(record: KernelRecord) -> KernelRecord:
    """Say that comparing was all that was asked for."""
    if record.failed != "left out" or record.first_s is None:
        return record
    return replace(record, failed=f"not timed, first call {record.first_s:.1f} s")


def _expect(answer: dict[str, Any]) -> dict[str, Any]:
    if "failed" in answer:
        raise RuntimeError(f"the ceilings could not be measured: {answer['failed']}")
    return answer


def _brief(group: Sequence[Member], timed: Mapping[str, Any]) -> str:
    told = [f"{m.name} {_spelled(timed[m.key])}" for m in group if m.key in timed]
    return ", ".join(told) or "left out"


def _spelled(found: Mapping[str, Any]) -> str:
    return "failed" if "failed" in found else f"{found['us']:.4g} us"


def _record(
    member: Member,
    checked: Mapping[str, Any] | None,
    timed: Mapping[str, Any] | None,
    ceilings: Ceilings | None,
    common: Mapping[str, Any],
) -> KernelRecord:
    checked, timed = checked or {}, timed or {}
    failed = str(checked.get("failed") or timed.get("failed") or ("" if timed else "left out"))
    values = {} if "failed" in timed else dict(timed)
    floor_us = 0.0
    if values and ceilings is not None:
        floor_us = ceilings.floor_us(
            values["bytes"], values["flops"], member.math, values["steady"]
        )
    return KernelRecord(
        task=member.task,
        rows=member.rows,
        name=member.name,
        op=member.op,
        case=member.case,
        note=member.note,
        invariant=member.invariant,
        error=checked.get("error"),
        tolerance=member.tolerance,
        first_s=checked.get("first_s"),
        failed=failed,
        floor_us=floor_us,
        of_floor=floor_us / values["us"] if values else 0.0,
        **values,
        **common,
    )


def _warm(
    members: Sequence[Member], options: tuple[str, ...], workers: int, end: float
) -> tuple[dict[str, dict[str, Any]], _Worker]:
    """Run every member once, shared out among workers; returns what each said, and a worker."""
    told: dict[str, dict[str, Any]] = {}
    todo = deque(_compile_order(members))
    left: list[_Worker] = []

    def serve() -> None:
        worker = _Worker(options)
        while time.monotonic() < end:
            try:
                member = todo.popleft()
            except IndexError:
                break
            limit_s = min(_WARM_S, end - time.monotonic() + 1.0)
            answer = worker.ask("warm", [member.key], limit_s)
            told[member.key] = answer
            if worker.is_lost or answer.get("lost"):
                worker = worker.again()
        if left:
            worker.close()  # here, beside the others: a process with a card takes its time to end
        else:
            left.append(worker)

    threads = [threading.Thread(target=serve) for _ in range(max(1, min(workers, len(members))))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for worker in left[1:]:
        worker.close()
    return told, left[0]


def _compile_order(members: Sequence[Member]) -> list[Member]:
    """Put one member of each source that takes long to compile first, the others of it last."""
    seen: set[str] = set()
    first: list[Member] = []
    middle: list[Member] = []
    last: list[Member] = []
    for member in members:
        if not member.built:
            middle.append(member)
        elif member.built in seen:
            last.append(member)
        else:
            seen.add(member.built)
            first.append(member)
    return first + middle + last


class _Worker:
    """One worker process.

    at       the member that it was last at
    is_lost  it ended, or was ended because it took too long
    """

    def __init__(self, options: tuple[str, ...]) -> None:
        self._options = options
        self._process = subprocess.Popen(
            [sys.executable, "-m", _WORKER, *options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        assert self._process.stdout is not None
        threading.Thread(target=self._listen, args=(self._process.stdout,), daemon=True).start()
        self.at = ""
        self.is_lost = False
        self._ready = False
        self._ended = False

    def _listen(self, stdout: IO[str]) -> None:
        for line in stdout:
            self._lines.put(line)
        self._lines.put(None)

    def ask(
        self, mode: str, keys: Sequence[str], limit_s: float, rest_s: float = 0.0
    ) -> dict[str, Any]:
        """Ask and wait; an answer of {"failed": why} when it took too long or the worker ended."""
        if not self._ready and self._next("ready", _START_S) is None:
            return {"failed": "the worker did not start"}
        self._ready = True
        assert self._process.stdin is not None
        self.at = keys[0] if keys else ""
        try:
            request = {"mode": mode, "keys": list(keys), "rest_s": rest_s}
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except OSError:
            self.is_lost = True
            return {"failed": "the worker ended"}
        answer = self._next("answer", limit_s)
        if answer is None:
            why = "the process ended" if self._ended else f"took more than {limit_s:.0f} s"
            self._kill()
            return {"failed": why}
        return answer  # type: ignore[no-any-return]

    def _next(self, kind: str, limit_s: float) -> Any:
        """Return the next message of a kind, None when it does not come."""
        end = time.monotonic() + limit_s
        while True:
            try:
                line = self._lines.get(timeout=max(0.0, end - time.monotonic()))
            except queue.Empty:
                return None
            if line is None:
                self._ended = True
                return None
            if line.startswith("@"):
                found, value = json.loads(line[1:])
                if found == kind:
                    return value
                if found == "start":
                    self.at = value

    def _kill(self) -> None:
        self.is_lost = True
        self._process.kill()
        self._process.wait()

    def again(self) -> _Worker:
        """End this worker and return a fresh one."""
        self.close()
        return _Worker(self._options)

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()
            self._process.wait(timeout=10.0)
        except (OSError, subprocess.TimeoutExpired):
            self._kill()
