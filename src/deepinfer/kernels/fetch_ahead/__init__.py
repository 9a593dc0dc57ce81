"""Weights on their way into a card's cache before the product that reads them: a hint, no op."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

from deepinfer.kernels import nvcc
from deepinfer.kernels.packed.kept import held_form

if TYPE_CHECKING:
    from deepinfer.kernels.linear import Fp8Weight

__all__ = ["fetch_ahead"]

SOURCE: Final = Path(__file__).with_name("sm90.cu")


def fetch_ahead(weight: Fp8Weight, most_bytes: int) -> int:
    """Ask for a weight's packed bytes, at most so many; returns how many were asked for.

    None where it has no packed form, which Hopper's products make at their first use.
    """
    packed = held_form(weight.codes)
    if packed is None:
        return 0
    size = min(packed.data.numel() * packed.data.element_size(), most_bytes)
    nvcc.call(nvcc.load(SOURCE), "fetch_ahead", packed.data.device, packed.data, size)
    return size
