"""What ranks tell each other before a step, and the kind of step that follows (pure).

Every rank puts one `Word` into an all-gather; all decide alike from all words. A rank wants a
prefill by its own queue only. Whether a slot or a block is really free shows when it plans, so a
second vote asks whether any plan came out: without it, ranks that want and cannot would vote for
prefill for ever.

Source: parallelism specification, 1.2. Its votes at every 70th and 100th step serve latency; here
ranks vote at every step, because offline work gains from prompts that run together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntFlag
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

__all__ = ["WORD_SIZE", "Flag", "Kind", "Word", "agree"]

Kind = Literal["prefill", "decode"]

WORD_SIZE: Final = 8
_MOST_WAIT: Final = 16
"""Steps that a rank's prompts wait for others to join."""


class Flag(IntFlag):
    """What a rank says.

    PREFILL   it could fill from a prompt and its own rules would
    DECODE    it has something to extend
    PROPOSE   its next step would draft
    STOP      (rank 0) this is the last word
    TALK      (rank 0) only messages and answers this time, no step
    """

    PREFILL = 1
    DECODE = 2
    PROPOSE = 8
    STOP = 32
    TALK = 64


_NOTHING: Final = Flag(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Word:
    """One rank's word.

    flags      as above
    waited     steps that its prompts have waited
    sequences  most that it can extend in the next step
    room       requests that it can take
    blocks     cache blocks that are free
    message    bytes that rank 0 sends, or that another rank answers
    generated  tokens since the start
    digest     of what must be equal everywhere when statistics are shared
    """

    flags: Flag = _NOTHING
    waited: int = 0
    sequences: int = 0
    room: int = 0
    blocks: int = 0
    message: int = 0
    generated: int = 0
    digest: int = 0

    def pack(self) -> NDArray[np.int64]:
        """Return the word as it travels."""
        return np.array(
            [
                int(self.flags),
                self.waited,
                self.sequences,
                self.room,
                self.blocks,
                self.message,
                self.generated,
                self.digest,
            ],
            dtype=np.int64,
        )

    @classmethod
    def unpack(cls, values: NDArray[np.int64]) -> Word:
        """Return a word that has travelled."""
        flags, waited, sequences, room, blocks, message, generated, digest = values.tolist()
        return cls(
            flags=Flag(flags),
            waited=waited,
            sequences=sequences,
            room=room,
            blocks=blocks,
            message=message,
            generated=generated,
            digest=digest,
        )


def agree(words: Sequence[Word], most_wait: int = _MOST_WAIT) -> Kind | None:
    """Return the kind of the next step, None when nobody has anything to run.

    A prefill when at least half of those with work want one, or somebody has waited long enough, or
    nothing can be extended.
    """
    wanting = [word for word in words if Flag.PREFILL in word.flags]
    decoding = [word for word in words if Flag.DECODE in word.flags]
    if not wanting:
        return "decode" if decoding else None
    working = sum(bool(word.flags & (Flag.PREFILL | Flag.DECODE)) for word in words)
    patient = decoding and 2 * len(wanting) < working
    if patient and max(word.waited for word in wanting) < most_wait:
        return "decode"
    return "prefill"
