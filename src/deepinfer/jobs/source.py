"""Lines of the input, one at a time: a file, stdin, gzip or zstandard."""

from __future__ import annotations

import gzip
import io
import os
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol, Self

from deepinfer.errors import RequestError, UnsupportedError

__all__ = ["MAX_LINE_BYTES", "Line", "Source"]

MAX_LINE_BYTES: Final = 16 * 2**20
"""Longest line that is read; what is longer becomes an error of its row."""

_GZIP_MAGIC: Final = b"\x1f\x8b"
_ZSTD_MAGIC: Final = b"\x28\xb5\x2f\xfd"
_ZSTD_BYTES: Final = 2048  # at a time: they hold 64 MiB of content at most


@dataclass(frozen=True, slots=True)
class Line:
    """One line of the input, blank ones left out.

    number  from 1, blank lines counted
    data    its bytes without the line end; None when it is longer than MAX_LINE_BYTES
    """

    number: int
    data: bytes | None


class _Lines(Protocol):
    """Where lines are read from."""

    def readline(self, size: int, /) -> bytes:
        """Return the next line, or as much of it."""
        ...


class _Frame(Protocol):
    """One zstandard frame being read."""

    @property
    def eof(self) -> bool:
        """Whether it is complete."""
        ...

    @property
    def unused_data(self) -> bytes:
        """What follows it in the data given last."""
        ...

    def decompress(self, data: bytes, /) -> bytes:
        """Take more of the frame and return the content that it holds."""
        ...


class _ZstdFile(io.RawIOBase):
    """The content of zstandard frames, one after the other.

    The package's own stream ends quietly where a frame is cut short; here that is an EOFError.
    """

    def __init__(self, raw: io.BufferedReader, new_frame: Callable[[], _Frame]) -> None:
        self._raw = raw
        self._new_frame = new_frame
        self._frame: _Frame | None = None
        self._packed = b""
        self._content = memoryview(b"")  # not yet taken

    def readable(self) -> bool:
        """Tell that it can be read."""
        return True

    def readinto(self, buffer: Any, /) -> int:  # any writable buffer
        """Fill a buffer with what comes next; 0 at the end."""
        while not self._content:
            self._packed = self._packed or self._raw.read1(_ZSTD_BYTES)
            if not self._packed and self._frame is not None:
                raise EOFError("its last zstandard frame is cut short")
            if not self._packed:
                return 0
            frame = self._frame = self._frame or self._new_frame()
            self._content = memoryview(frame.decompress(self._packed))
            self._packed = b""
            if frame.eof:
                self._packed, self._frame = frame.unused_data, None
        count = min(len(buffer), len(self._content))
        buffer[:count] = self._content[:count]
        self._content = self._content[count:]
        return count


class Source:
    """The input, read lazily. Use as a context manager and iterate.

    name  a file, or `-` for stdin; compression is seen from the first bytes
    Raises RequestError for a file that cannot be read, UnsupportedError for zstandard without its
    package.
    """

    def __init__(self, name: str) -> None:
        self.name = "stdin" if name == "-" else name
        self._stack = ExitStack()
        self._size: int | None = None
        try:
            self._raw = self._open(name)
            self._lines = self._decompress(self._raw)
        except OSError as error:
            self._stack.close()
            raise RequestError(f"cannot read {self.name}: {error.strerror or error}") from error

    def __enter__(self) -> Self:
        """Return the source itself."""
        return self

    def __exit__(self, *error: object) -> None:
        """Close the file."""
        self._stack.close()

    def __iter__(self) -> Iterator[Line]:
        """Yield the lines. Raises RequestError when reading fails."""
        number = 0
        while True:
            number += 1
            data = self._read()
            if not data:
                return
            whole = data.endswith(b"\n") or len(data) < MAX_LINE_BYTES
            if not whole:
                while (more := self._read()) and not more.endswith(b"\n"):
                    pass
                yield Line(number, None)
            elif line := data.strip():
                yield Line(number, line)

    @property
    def waits(self) -> bool:
        """Whether a line may have to be waited for, as in a pipe."""
        return not self._size

    @property
    def fraction(self) -> float | None:
        """How much of the input has been read, None when its size is not known."""
        if not self._size:
            return None
        try:
            return min(1.0, self._raw.tell() / self._size)
        except (OSError, ValueError):
            return None

    def _open(self, name: str) -> io.BufferedReader:
        if name != "-":
            path = Path(name).expanduser()
            found = self._stack.enter_context(open(path, "rb"))  # noqa: SIM115  # the stack closes it
            self._size = os.fstat(found.fileno()).st_size
            return found
        if sys.stdin is None:
            raise RequestError("cannot read stdin: it is closed")
        buffer = sys.stdin.buffer
        return buffer if isinstance(buffer, io.BufferedReader) else io.BufferedReader(buffer)  # type: ignore[arg-type]

    def _decompress(self, raw: io.BufferedReader) -> _Lines:
        head = raw.peek(4)[:4]
        if head.startswith(_GZIP_MAGIC):
            unpacked = gzip.GzipFile(fileobj=raw)
            self._stack.callback(unpacked.close)
            return unpacked
        if head.startswith(_ZSTD_MAGIC):
            try:
                import zstandard
            except ModuleNotFoundError:
                raise UnsupportedError.missing_extra(
                    "zstandard", "jobs", f"reading {self.name}, which is zstandard,"
                ) from None
            return io.BufferedReader(_ZstdFile(raw, zstandard.ZstdDecompressor().decompressobj))
        return raw

    def _read(self) -> bytes:
        try:
            return self._lines.readline(MAX_LINE_BYTES)
        except (OSError, EOFError, zlib.error) as error:
            raise RequestError(f"cannot read {self.name} to its end: {error}") from error
        except Exception as error:  # zstandard raises a class of its own
            if type(error).__module__.partition(".")[0] != "zstandard":
                raise
            raise RequestError(f"cannot read {self.name} to its end: {error}") from error
