"""What ranks that share a prompt hand to each other inside a prefill step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

__all__ = ["ContextRows", "Gather", "Gatherer"]


class _Work(Protocol):
    def wait(self) -> None:
        """Return when what was gathered may be read."""
        ...


class Gatherer(Protocol):
    """A group of ranks, as far as it is needed here; `parallel/comm.py` is it."""

    @property
    def size(self) -> int:
        """The number of members."""
        ...

    @property
    def place(self) -> int:
        """Of this rank among them."""
        ...

    def start_gather(self, x: Tensor) -> tuple[Tensor, _Work]:
        """Start to bring every member's x, [size, *x.shape], which may be read behind the wait."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Gather:
    """Turns rows of all ranks into one tensor that every rank has.

    send   [k] which of its own rows this rank sends
    most   rows that every rank sends, filled up with zeros; 0 = nothing travels
    index  [n] into [own rows | what all ranks sent] where `own` is set, else without the former
    """

    group: Gatherer
    send: Tensor
    most: int
    index: Tensor
    own: bool = False
    _begun: list[tuple[Tensor, _Work]] = field(default_factory=list)

    def begin(self, x: Tensor) -> None:
        """Start sending this rank's x; what runs before the call with the same x, runs meanwhile.

        Every rank calls it, with no other collective of the group between.
        """
        if self.most:
            self._begun.append(self._start(x))

    def __call__(self, x: Tensor) -> Tensor:
        """Return [n, ...] of this rank's x [rows, ...]; every rank calls it."""
        everyone = x
        if self.most:
            found, work = self._begun.pop() if self._begun else self._start(x)
            work.wait()
            everyone = found.flatten(0, 1)
            if self.own:
                everyone = torch.cat([x, everyone])
        return everyone[self.index]

    def _start(self, x: Tensor) -> tuple[Tensor, _Work]:
        padded = x.new_zeros((self.most, *x.shape[1:]))
        padded[: self.send.shape[0]] = x[self.send]
        return self.group.start_gather(padded)


@dataclass(frozen=True, slots=True, eq=False)
class ContextRows:
    """A rank's part of a prefill step whose rows several ranks share.

    token_ids    [T] of the whole step: n-grams look across the ranks' borders
    window       to the rows whose window entries this rank reads or keeps
    projections  to the compressors' inputs of all rows; None where each rank pools its own groups
    entries      ratio -> to all entries that the step completes; none where `projections` has them
    tails        to the rows that the tail rings keep; None with `projections`
    logits       to the rows whose logits are wanted
    """

    token_ids: Tensor
    window: Gather
    projections: Gather | None
    entries: Mapping[int, Gather]
    tails: Gather | None
    logits: Gather

    @property
    def draws(self) -> bool:
        """Whether this rank computes the logits."""
        return self.logits.group.place == 0
