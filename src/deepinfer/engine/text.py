"""Text of a running request: incremental detokenization, stop strings, what may be shown.

Pure. Bytes and tokens are the tokenizer's matter; this module sees a decoder that turns ids into
pieces of text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

__all__ = ["IncrementalDecoder", "TextStream", "find_stop", "held_back"]


class IncrementalDecoder(Protocol):
    """Turns ids into text one at a time; the pieces add up to the decoded whole."""

    def push(self, token_id: int, /) -> str:
        """Take the next id and return the text it completes, possibly none."""
        ...

    def finish(self) -> str:
        """Return the text still held inside, once, after the last id."""
        ...


def find_stop(text: str, stops: Sequence[str], after: int = 0) -> int:
    """Return where the first stop string to be completed begins in `text`, or -1.

    First completed means smallest end, then smallest begin: the answer does not depend on how
    `text` arrived in pieces. Occurrences that end at or before `after` do not count.
    """
    best: tuple[int, int] | None = None
    for stop in stops:
        begin = text.find(stop, max(0, after - len(stop) + 1))
        if begin >= 0 and (best is None or (begin + len(stop), begin) < best):
            best = (begin + len(stop), begin)
    return -1 if best is None else best[1]


def held_back(text: str, stops: Sequence[str]) -> int:
    """Return the length of the longest end of `text` that begins a stop string."""
    longest = max((len(stop) for stop in stops), default=0)
    for size in range(min(longest - 1, len(text)), 0, -1):
        tail = text[-size:]
        if any(len(stop) > size and stop.startswith(tail) for stop in stops):
            return size
    return 0


class TextStream:
    """The text of one request while it grows.

    Stop strings that end within the text of the first `min_tokens` ids are ignored, and so is all
    that stands before the first `after` and in it. After a stop string is found the text is frozen
    just before it.
    """

    def __init__(
        self,
        decoder: IncrementalDecoder,
        stops: Sequence[str] = (),
        min_tokens: int = 0,
        after: str = "",
    ) -> None:
        self._decoder = decoder
        self._stops = tuple(stops)
        self._min_tokens = min_tokens
        self._after = after if stops else ""
        self._tail = ""  # of the text before `after`, as far as it may begin it
        self._num_ids = 0
        self._parts: list[str] = []  # released, in order
        self._pending = ""  # may still begin a stop string
        self._taken = 0  # parts already handed out
        self.stopped = False

    def push(self, token_id: int) -> bool:
        """Take the next id; return whether it completed a stop string."""
        assert not self.stopped, "text goes on after a stop string"
        self._num_ids += 1
        return self._add(self._decoder.push(token_id), ignore=self._num_ids < self._min_tokens)

    def finish(self) -> str:
        """Release what is held back and return the whole text. Call it once, after the last id."""
        if not self.stopped:
            self._add(self._decoder.finish(), ignore=self._num_ids < self._min_tokens)
            self._parts.append(self._pending)
            self._pending = ""
        return "".join(self._parts)

    def take(self) -> str:
        """Return the text released since the last call."""
        new = "".join(self._parts[self._taken :])
        self._taken = len(self._parts)
        return new

    def _add(self, piece: str, ignore: bool) -> bool:
        if self._after:
            piece = self._pass(piece)
        if not piece:
            return False
        old = len(self._pending)
        self._pending += piece
        begin = -1 if ignore else find_stop(self._pending, self._stops, old)
        if begin >= 0:
            self._parts.append(self._pending[:begin])
            self._pending = ""
            self.stopped = True
            return True
        keep = len(self._pending) - held_back(self._pending, self._stops)
        self._parts.append(self._pending[:keep])
        self._pending = self._pending[keep:]
        return False

    def _pass(self, piece: str) -> str:
        """Release what stands before the end of `after`; return what follows it."""
        seen = self._tail + piece
        place = seen.find(self._after)
        rest = "" if place < 0 else seen[place + len(self._after) :]
        self._parts.append(piece[: len(piece) - len(rest)])
        self._tail = seen[max(0, len(seen) - len(self._after) + 1) :] if place < 0 else ""
        if place >= 0:
            self._after = ""
        return rest
