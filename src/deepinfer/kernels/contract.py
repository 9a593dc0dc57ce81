"""Shape checks at the door of every op: the same letter must bind to the same number."""

from __future__ import annotations

from functools import cache

from torch import Tensor

from deepinfer.errors import ShapeError

__all__ = ["check"]


@cache
def _letters(spec: str) -> tuple[str, ...]:
    return tuple(spec.split())


def check(op: str, *arguments: tuple[str, Tensor, str]) -> None:
    """Check arguments given as (name, tensor, spec), e.g. ("weight", w, "N K").

    A letter binds to the size it first meets, a number means itself, "_" anything. Raises
    ShapeError that names the op, the argument, its shape and what was expected.
    """
    bound: dict[str, int] = {}
    for name, tensor, spec in arguments:
        letters = _letters(spec)
        shape = tensor.shape
        if len(shape) != len(letters):
            raise ShapeError(f"{op}: {name} has shape {tuple(shape)}, expected [{spec}]")
        for letter, size in zip(letters, shape, strict=True):
            if letter == "_":
                continue
            expected = int(letter) if letter.isdigit() else bound.setdefault(letter, size)
            if expected != size:
                raise ShapeError(
                    f"{op}: {name} has shape {tuple(shape)}, expected [{spec}] with "
                    f"{letter} = {expected}"
                )
