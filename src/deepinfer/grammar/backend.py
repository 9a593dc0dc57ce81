"""What a grammar library must offer, and what it is given (pure).

An adapter turns a Program into a Compiled grammar, hands out Positions in it, and fills bit rows
for many of them at once. Triggers, ends of output, drafts and reports are not its matter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from deepinfer.grammar.nodes import Rules
from deepinfer.grammar.schema import Loosened

__all__ = [
    "DEAD_END",
    "Backend",
    "BackendError",
    "Compiled",
    "Position",
    "Program",
    "Vocabulary",
    "bit_words",
]

Bits = NDArray[np.uint32]
DEAD_END: Final = "no token of this vocabulary can continue the output"


class BackendError(Exception):
    """A library refuses a program, or a limit was reached; the text is for the user."""


def bit_words(vocab_size: int) -> int:
    """Return the 32-bit words of a row with one bit an id."""
    return -(-vocab_size // 32)


@dataclass(frozen=True)
class Vocabulary:
    """The bytes behind the ids of one checkpoint.

    pieces         bytes of each id of the model's vocabulary; b"" for an id that is no text, such
                   as a special token: a grammar never allows it
    end_token_id   ends an output
    """

    pieces: tuple[bytes, ...]
    end_token_id: int

    @cached_property
    def text_bits(self) -> Bits:
        """One bit row: the ids that are text."""
        flags = np.fromiter((bool(piece) for piece in self.pieces), np.bool_, len(self.pieces))
        return pack_bits(flags)

    @cached_property
    def every_bit(self) -> Bits:
        """One bit row: every id."""
        return pack_bits(np.ones(len(self.pieces), np.bool_))

    def text(self, token_ids: Sequence[int]) -> bytes:
        """Return the bytes of ids, joined."""
        return b"".join(self.pieces[token_id] for token_id in token_ids)


def pack_bits(flags: NDArray[np.bool_]) -> Bits:
    """Return flags as a bit row, the first in the lowest bit, unused bits 0."""
    padded = np.zeros(bit_words(len(flags)) * 32, np.bool_)
    padded[: len(flags)] = flags
    return np.packbits(padded, bitorder="little").view(np.uint32)


@dataclass(frozen=True, slots=True)
class Program:
    """A grammar in a form that libraries take: rules, or a JSON Schema that has been rewritten.

    rules           rules by name with the start rule `root`, or None
    schema          a JSON Schema in which every `$ref` is a pointer into `$defs`, or None
    max_whitespace  most white space characters in one place of JSON
    max_states      most states that a library may build
    """

    rules: Rules | None = None
    schema: Mapping[str, object] | bool | None = None
    max_whitespace: int = 16
    max_states: int = 100_000


class Position(Protocol):
    """A place in a compiled grammar, moved by ids."""

    def accept(self, token_id: int) -> bool:
        """Move over an id; return False, and stay, when the grammar does not allow it."""
        ...

    def rollback(self, count: int) -> None:
        """Move back over the last ids."""
        ...

    def is_complete(self) -> bool:
        """Whether the output may end here."""
        ...

    def is_stopped(self) -> bool:
        """Whether the output must end here."""
        ...


class Compiled(Protocol):
    """A grammar ready for use, shared by the requests that ask for it."""

    @property
    def num_bytes(self) -> int:
        """What it costs to keep, estimated where the library does not say."""
        ...

    def start(self) -> Position:
        """Return a position at the beginning."""
        ...


class Backend(Protocol):
    """One grammar library for one vocabulary.

    limits       what it never expresses of a schema
    wants_rules  whether a schema must come as rules
    """

    limits: Loosened
    wants_rules: bool

    def loosen(self, error: BackendError, loosened: Loosened) -> Loosened | None:
        """Return what to leave out of a schema as well after an error, None when that is no use."""
        ...

    def compile(self, program: Program) -> Compiled:
        """Compile a program; raises BackendError. Called from several threads."""
        ...

    def fill(self, work: Sequence[tuple[Position, int]], bits: Bits) -> None:
        """Write what each position allows next into its row of `bits` [R, words].

        Bits of ids that are no text, and of the end, are left to the caller. Raises BackendError.
        """
        ...
