"""The output: records appended as they come, in groups made durable, whole after any kill."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, Self

from deepinfer.errors import RequestError

__all__ = ["Output", "Record"]

Record = dict[str, Any]

_GROUP_RECORDS: Final = 256
_GROUP_S: Final = 1.0
_HEADS: Final = (b'{"custom_id":', b'{"id":')  # how records begin


class Output:
    """A file of records that is only ever appended to. Use as a context manager.

    path    created when it is not there; locked, so that two runs never share one
    Raises RequestError when it cannot be written, is in use, or holds something else.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.num_torn_bytes = 0
        self._num_whole_bytes = 0
        self._pending = 0
        self._last_sync = time.monotonic()
        try:
            existed = path.exists()
            if existed and not (path.is_file() or path.is_dir()):
                raise RequestError(
                    f"cannot write {path}: it is no file that the next run could read; give one"
                )
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise RequestError(f"cannot write {path}: {error.strerror or error}") from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.path.samestat(os.fstat(self._file), os.stat(path)):  # just replaced
                raise OSError(errno.EWOULDBLOCK, "")
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
        record of a run; nothing is cut off then.
        """
        for record, _ in self._entries():
            yield record
        if self.num_torn_bytes:
            os.ftruncate(self._file, self._num_whole_bytes)
            os.fsync(self._file)

    def drop_failed(self) -> int:
        """Take records of errors out, so that their rows are not answered; return how many.

        The file is replaced as a whole: a kill leaves it as it was. Must be called before
        `recover`, with its errors, and RequestError when the new file cannot be written.
        """
        path = self.path.resolve()
        part = path.with_name(f".{path.name}.part")
        try:
            kept = os.open(part, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC)
        except OSError as error:
            raise self._unwritable(error) from error
        dropped = 0
        try:
            os.fchmod(kept, stat.S_IMODE(os.fstat(self._file).st_mode))
            with open(kept, "wb", closefd=False) as lines:
                for record, line in self._entries():
                    if record.get("error") is None:
                        lines.write(line)
                    else:
                        dropped += 1
            if dropped:
                os.fsync(kept)
                fcntl.flock(kept, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.replace(part, path)
                self._file, kept = kept, self._file
                self._sync_folder()
        except OSError as error:
            raise self._unwritable(error) from error
        finally:
            os.close(kept)
            part.unlink(missing_ok=True)
        return dropped

    def _entries(self) -> Iterator[tuple[Record, bytes]]:
        """Yield records with their lines, and note what a last one without an end leaves."""
        self._num_whole_bytes = 0
        with open(self.path, "rb") as lines:
            if lines.peek(1)[:1] not in (b"", b"{", b"\0"):  # it may be long, without lines
                raise self._foreign(1)
            for number, line in enumerate(lines, 1):
                if line.endswith(b"\n"):
                    yield self._record(number, line), line
                    self._num_whole_bytes += len(line)
                    continue
                if not _begins_record(line):
                    raise self._foreign(number)
                if _is_json(line):  # only its end is torn off, or it is of something else
                    self._record(number, line)
                self.num_torn_bytes = len(line)

    def append(self, records: list[Record]) -> None:
        """Write records: they survive the end of this process at once, a power cut after `sync`."""
        lines = [json.dumps(record, ensure_ascii=False) for record in records]
        data = "".join(f"{line}\n" for line in lines).encode("utf-8", "backslashreplace")
        while data:
            try:
                data = data[os.write(self._file, data) :]
            except OSError as error:
                raise self._unwritable(error) from error
        self._pending += len(records)
        due = time.monotonic() - self._last_sync >= _GROUP_S
        if self._pending >= _GROUP_RECORDS or (self._pending and due):
            self.sync()

    def sync(self) -> None:
        """Make what is written durable."""
        try:
            if self._pending:
                os.fsync(self._file)
        except OSError as error:
            raise self._unwritable(error) from error
        self._pending = 0
        self._last_sync = time.monotonic()

    def _unwritable(self, error: OSError) -> RequestError:
        return RequestError(
            f"cannot write {self.path}: {error.strerror or error}; what is written stays, and the "
            "same command goes on from there"
        )

    def _record(self, number: int, line: bytes) -> Record:
        try:
            found = json.loads(line)
            run = found["run"]
            if isinstance(run["key"], str) and isinstance(run["request"], str):
                return dict(found)
        except (ValueError, TypeError, KeyError, RecursionError):
            pass
        raise self._foreign(number)

    def _foreign(self, number: int) -> RequestError:
        return RequestError(
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


def _begins_record(data: bytes) -> bool:
    """Tell whether bytes can be what is left of a record, or what a power cut left of a group."""
    head = data.rstrip(b"\0")
    return any(head.startswith(known[: len(head)]) for known in _HEADS)


def _is_json(data: bytes) -> bool:
    try:
        json.loads(data)
    except (ValueError, RecursionError):
        return False
    return True
