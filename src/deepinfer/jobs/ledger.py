"""Which rows are answered, and for which request; kept on disk, so memory does not grow."""

from __future__ import annotations

import hashlib
import sqlite3
from typing import Final, Self

__all__ = ["Ledger"]

_CACHE_KIB: Final = 1024


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


class Ledger:
    """Rows by their key. A temporary file of the database holds it and goes with it.

    A row is `answered` when the output holds its record, and `seen` once this run has met it.
    """

    def __init__(self) -> None:
        self._db = sqlite3.connect("", isolation_level=None)  # a temporary file
        self._db.execute(f"PRAGMA cache_size=-{_CACHE_KIB}")
        for pragma in ("journal_mode=OFF", "synchronous=OFF", "locking_mode=EXCLUSIVE"):
            self._db.execute(f"PRAGMA {pragma}")
        self._db.execute(
            "CREATE TABLE rows (key BLOB PRIMARY KEY, request TEXT, line INTEGER) WITHOUT ROWID"
        )
        self._db.execute("BEGIN")
        self.num_unmatched = 0

    def __enter__(self) -> Self:
        """Return the ledger itself."""
        return self

    def __exit__(self, *error: object) -> None:
        """Drop it."""
        self._db.close()

    def add_answered(self, key: str, request: str) -> bool:
        """Note that the output answers a row; False when it did already."""
        found = self._db.execute(
            "INSERT OR IGNORE INTO rows VALUES (?, ?, 0)", (_digest(key), request)
        )
        self.num_unmatched += found.rowcount
        return found.rowcount == 1

    def meet(self, key: str, line: int) -> tuple[int, str | None]:
        """Note that this run meets a row at a line.

        Returns the line where it was met before, 0 if never, and the request that the output
        answers it for, None if it does not.
        """
        digest = _digest(key)
        found = self._db.execute(
            "SELECT request, line FROM rows WHERE key = ?", (digest,)
        ).fetchone()
        if found is None:
            self._db.execute("INSERT INTO rows VALUES (?, NULL, ?)", (digest, line))
            return 0, None
        request, before = found
        if not before:
            self._db.execute("UPDATE rows SET line = ? WHERE key = ?", (line, digest))
            self.num_unmatched -= 1
        return int(before), request
