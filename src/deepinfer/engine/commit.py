"""The one way a generated token enters a sequence.

A step may bring several tokens. They are taken one by one, and the first that ends the request is
the last: what was drawn behind it is dropped, so that nothing overruns a grammar, an ending id, a
stop string, `max_tokens` or the model's length. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence as Ids
from typing import TYPE_CHECKING, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from deepinfer.engine.plan import RowResult
from deepinfer.engine.request import FinishReason

if TYPE_CHECKING:
    from deepinfer.engine.sequence import Sequence

__all__ = ["Gate", "TokenMatcher", "commit"]


class TokenMatcher(Protocol):
    """Where a sequence stands in its grammar.

    problem  why nothing can follow, when that is so
    """

    problem: str | None

    def accept(self, token_id: int, /) -> bool:
        """Take a generated id; return whether the grammar allows it."""
        ...

    def is_finished(self) -> bool:
        """Return whether nothing but the end can follow."""
        ...

    def fill(self, bits: NDArray[np.uint32], /) -> bool:
        """Write the ids allowed next as a bit row; return False when every id is, and leave it."""
        ...

    def try_drafts(self, drafts: Ids[int], /) -> int:
        """Take drafts as far as the grammar allows; return how many, which `rollback` undoes."""
        ...

    def rollback(self, count: int, /) -> None:
        """Step back by `count` taken ids."""
        ...

    def check(self) -> str | None:
        """Return what is wrong with an output that ends here, or None."""
        ...


class Gate(Protocol):
    """What a request waits for before it may be planned: its grammar being compiled."""

    def poll(self) -> TokenMatcher | str | None:
        """Return the matcher, an error that ends the request, or None to go on waiting."""
        ...


_CUT: Final = "a stop string ended the output, and left out a part of its shape"


def commit(sequence: Sequence, row: RowResult, now_s: float) -> int:
    """Append a step's tokens until one ends the request; return how many were kept.

    Rules in order, per token: the grammar, ending ids (end-of-sequence and stop ids), stop strings,
    length limits. A token that the grammar refuses is not kept and ends the request with an error.
    """
    token_ids = sequence.token_ids
    before = len(token_ids)
    if sequence.first_token_s is None and row.token_ids:
        sequence.first_token_s = now_s
    for token_id in row.token_ids:
        ends = token_id in sequence.ending_ids
        matcher = sequence.matcher
        if matcher is not None and not ends and not matcher.accept(token_id):
            told = matcher.problem or f"the grammar refuses token {token_id}, which the step drew"
            sequence.finish(FinishReason.STRUCTURED_OUTPUT_ERROR, now_s, told)
            break
        token_ids.append(token_id)
        cut = not ends and sequence.text is not None and sequence.text.push(token_id)
        if ends or cut or (matcher is not None and matcher.is_finished()):
            wrong = None if matcher is None else _CUT if cut else matcher.check()
            reason = FinishReason.STOP if wrong is None else FinishReason.STRUCTURED_OUTPUT_ERROR
            sequence.finish(reason, now_s, wrong)
        elif len(token_ids) >= sequence.limit:
            sequence.finish(FinishReason.LENGTH, now_s)
        else:
            continue
        break
    kept = len(token_ids) - before
    if sequence.logprobs is not None and row.logprobs is not None:
        sequence.logprobs.extend(row.logprobs[:kept])
    if sequence.top_logprobs is not None and row.top_logprobs is not None:
        sequence.top_logprobs.extend(row.top_logprobs[:kept])
    return kept
