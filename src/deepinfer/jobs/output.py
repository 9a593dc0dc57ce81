"""The output: records appended as they come, in groups made durable, whole after any kill."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, Self

from deepinfer.errors import RequestError

__all__ = ["Output", "Record"]

Record = dict[str, Any]

_GROUP_RECORDS: Final = 256
_GROUP_S: Final = 1.0


class Output:
    """A file of records that is only ever appended to. Use as a context manager.

    path    created when it is not there; locked, so that two runs never share one
    Raises RequestError when it cannot be written, is in use, or holds something else.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.num_torn_bytes = 0
        self._pending = 0
        self._last_sync = time.monotonic()
        existed = path.exists()
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise RequestError(f"cannot write {path}: {error.strerror or error}") from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not existed:
                self._sync_folder()
        except OSError as error:
            os.close(self._file)
            in_use = error.errno in (errno.EWOULDBLOCK, errno.EACCES)
            why = "another run is writing it" if in_use else error.strerror or error
            raise RequestError(f"cannot write {path}: {why}") from error

    def __enter__(self) -> Self:
        """Return the output itself."""
        return self

    def __exit__(self, *error: object) -> None:
        """Make everything durable and close the file."""
        try:
            self.sync()
        finally:
            os.close(self._file)

    def recover(self) -> Iterator[Record]:
        """Yield the records that are there, and cut off a last one that a kill has torn.

        Must be run to its end before the first `append`. Raises RequestError for a line that is no
        record of a run.
        """
        whole = 0
        with open(self.path, "rb") as lines:
            for number, line in enumerate(lines, 1):
                if not line.endswith(b"\n"):
                    self.num_torn_bytes = len(line)
                    break
                yield self._record(number, line)
                whole += len(line)
        if self.num_torn_bytes:
            os.ftruncate(self._file, whole)
            os.fsync(self._file)

    def append(self, records: list[Record]) -> None:
        """Write records: they survive the end of this process at once, a power cut after `sync`."""
        lines = [json.dumps(record, ensure_ascii=False) for record in records]
        data = "".join(f"{line}\n" for line in lines).encode("utf-8", "backslashreplace")
        while data:
            try:
                data = data[os.write(self._file, data) :]
            except OSError as error:
                raise RequestError(
                    f"cannot write {self.path}: {error.strerror or error}; what is written stays, "
                    "and the same command goes on from there"
                ) from error
        self._pending += len(records)
        due = time.monotonic() - self._last_sync >= _GROUP_S
        if self._pending >= _GROUP_RECORDS or (self._pending and due):
            self.sync()

    def sync(self) -> None:
        """Make what is written durable."""
        if self._pending:
            os.fsync(self._file)
        self._pending = 0
        self._last_sync = time.monotonic()

    def _record(self, number: int, line: bytes) -> Record:
        try:
            found = json.loads(line)
            run = found["run"]
            if isinstance(run["key"], str) and isinstance(run["request"], str):
                return dict(found)
        except (ValueError, TypeError, KeyError, RecursionError):
            pass
        raise RequestError(
            f"{self.path} line {number} is no record of a run: give another output, or move that "
            "file away"
        )

    def _sync_folder(self) -> None:
        folder = os.open(self.path.parent, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        except OSError as error:
            if error.errno != errno.EINVAL:  # some file systems cannot
                raise
        finally:
            os.close(folder)
