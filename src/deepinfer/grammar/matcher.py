"""Matcher: where one request stands in its grammar, and bit rows for many of them (pure).

Owns the free text before a trigger, the legal ends of an output and steps back after drafts; the
grammar itself is a position in a library.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from deepinfer.grammar.backend import (
    DEAD_END,
    Backend,
    BackendError,
    Bits,
    Compiled,
    Vocabulary,
)

__all__ = ["Matcher", "fill_rows"]


class Matcher:
    """Follows the tokens of one request.

    compiled      the grammar, which holds from the token behind the trigger on
    end_ids       ids that end the output: legal exactly where the grammar is complete
    trigger       ids before which output is free; empty: the grammar holds from the start
    bound         when this id is generated while output is free, the trigger is forced
    last_word     told the text of the constrained part when it ends; returns what is wrong with it
    """

    def __init__(
        self,
        backend: Backend,
        compiled: Compiled,
        vocabulary: Vocabulary,
        end_ids: Sequence[int],
        trigger: Sequence[int] = (),
        bound: int | None = None,
        last_word: Callable[[str], str | None] = lambda text: None,
    ) -> None:
        self.backend = backend
        self._vocabulary = vocabulary
        self._compiled = compiled
        self._position = compiled.start()
        self._ends = frozenset(end_ids)
        self._end_words = [(i // 32, np.uint32(1 << i % 32)) for i in sorted(self._ends)]
        self._trigger = tuple(trigger)
        self._fallback = _fallback(self._trigger)
        self._bound = bound
        self._last_word = last_word
        self._progress = 0  # ids of the trigger that the output ends with; all of them: switched
        self._forced = False
        self._history: list[tuple[int, bool]] = []  # what the two were before each accepted id
        self._ids: list[int] = []  # accepted since the switch
        self._is_broken = False
        self.problem: str | None = None

    @property
    def is_free(self) -> bool:
        """Whether the grammar does not hold yet."""
        return self._progress < len(self._trigger)

    def accept(self, token_id: int) -> bool:
        """Take a generated id, which is no end; return False, and stay, when it is not legal."""
        if self._is_broken:
            return False
        before = (self._progress, self._forced)
        if self.is_free:
            if token_id in self._ends:
                return False
            if self._forced and token_id != self._trigger[self._progress]:
                return False
            self._advance(token_id)
        else:
            try:
                legal = bool(self._piece(token_id)) and self._position.accept(token_id)
            except Exception as error:  # whatever a library throws ends this request only
                self._break(error)
                return False
            if not legal:
                return False
            self._ids.append(token_id)
        self._history.append(before)
        return True

    def is_finished(self) -> bool:
        """Whether nothing but the end can follow."""
        if self.is_free or self._is_broken:
            return False
        try:
            return self._position.is_complete() and self._position.is_stopped()
        except Exception as error:
            self._break(error)
            return False

    def is_complete(self) -> bool:
        """Whether the output may end here."""
        return not self.is_free and self._position.is_complete()

    def try_drafts(self, drafts: Sequence[int]) -> int:
        """Take drafts as far as they are legal and no end; return how many."""
        for count, draft in enumerate(drafts):
            if draft in self._ends or not self.accept(draft):
                if self._is_broken:  # it is no token of the output yet
                    self._is_broken, self.problem = False, None
                    self._replay(self._ids)
                return count
        return len(drafts)

    def rollback(self, count: int) -> None:
        """Step back by `count` accepted ids."""
        constrained = 0
        for _ in range(count):
            constrained += self._history[-1][0] == len(self._trigger)
            self._progress, self._forced = self._history.pop()
        if constrained and not self._is_broken:
            self.problem = None  # a dead end behind drafts is left again
            try:
                self._position.rollback(constrained)
            except Exception:  # a library that failed behind drafts starts anew
                self._replay(self._ids[:-constrained])
        if constrained:
            del self._ids[-constrained:]

    def fill(self, bits: Bits) -> bool:
        """Write the legal ids as a bit row; return False when every id is legal."""
        rows = bits.reshape(1, -1)
        if not self.fill_free(rows[0]):
            fill_rows([(self, 0)], rows)
        return True

    def fill_free(self, row: Bits) -> bool:
        """Write a row that needs no library; return False when the grammar holds here."""
        if not self.is_free:
            return False
        if self._forced:
            row[:] = 0
            wanted = self._trigger[self._progress]
            row[wanted // 32] = np.uint32(1 << wanted % 32)
        else:
            row[:] = self._vocabulary.every_bit
            for word, bit in self._end_words:
                row[word] &= ~bit
        return True

    def finish_row(self, row: Bits) -> None:
        """Complete a row that the library filled: ids that are no text, ends, and dead ends."""
        row &= self._vocabulary.text_bits
        complete = self._position.is_complete()
        for word, bit in self._end_words:
            row[word] = row[word] | bit if complete else row[word] & ~bit
        if not row.any():
            self.give_up(row, DEAD_END)

    def give_up(self, row: Bits, problem: str) -> None:
        """Note a dead end. Every id is let through, so that the draw is defined; none is taken."""
        self.problem = problem
        row[:] = self._vocabulary.every_bit

    def check(self) -> str | None:
        """Return what is wrong with the constrained part of an output that has ended, or None."""
        if self.is_free:
            return "the output ended before the trigger"
        try:
            if not self._position.is_complete():
                return "the output ended before it was complete"
            return self._last_word(self._vocabulary.text(self._ids).decode())
        except UnicodeDecodeError:
            return "the output is no UTF-8"
        except Exception as error:
            return f"the output could not be checked: {type(error).__name__}: {error}"

    def _replay(self, token_ids: Sequence[int]) -> None:
        """Go to where these ids lead, from the beginning."""
        try:
            self._position = self._compiled.start()
            if not all(map(self._position.accept, token_ids)):
                raise BackendError("the output could not be followed again")
        except Exception as error:
            self._break(error)

    def _break(self, error: Exception) -> None:
        """Note that the library failed here: nothing is accepted from now on."""
        self._is_broken = True
        self.problem = str(error) or type(error).__name__

    def _piece(self, token_id: int) -> bytes:
        pieces = self._vocabulary.pieces
        return pieces[token_id] if 0 <= token_id < len(pieces) else b""

    def _advance(self, token_id: int) -> None:
        progress = self._progress
        while progress and self._trigger[progress] != token_id:
            progress = self._fallback[progress - 1]
        self._progress = progress + (self._trigger[progress] == token_id)
        self._forced = self.is_free and (self._forced or token_id == self._bound)


def fill_rows(work: Sequence[tuple[Matcher, int]], bits: Bits) -> None:
    """Write the rows of matchers that share a backend, each into the row it names, all at once."""
    held = [(m, row) for m, row in work if not m.fill_free(bits[row])]
    if not held:
        return
    backend = held[0][0].backend
    try:
        backend.fill([(m._position, row) for m, row in held], bits)
        for matcher, row in held:
            matcher.finish_row(bits[row])
    except Exception as error:  # whatever a library throws ends the requests at fault only
        if len(held) == 1:
            held[0][0].give_up(bits[held[0][1]], str(error) or type(error).__name__)
            return
        for one in held:  # one by one, to find whose fault it is
            fill_rows([one], bits)


def _fallback(trigger: tuple[int, ...]) -> tuple[int, ...]:
    """Return, for each prefix, the length of its longest border (Knuth, Morris and Pratt)."""
    table = [0] * len(trigger)
    length = 0
    for idx in range(1, len(trigger)):
        while length and trigger[idx] != trigger[length]:
            length = table[length - 1]
        length += trigger[idx] == trigger[length]
        table[idx] = length
    return tuple(table)
