"""Weights on their way into a card's cache before the product that reads them: a hint, no op."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

from deepinfer.kernels import nvcc
from deepinfer.kernels.linear.copied import held_copy
from deepinfer.kernels.packed.kept import held_form

if TYPE_CHECKING:
    from deepinfer.kernels.linear import Fp8Weight

__all__ = ["fetch_ahead"]

SOURCE: Final = Path(__file__).with_name("sm90.cu")


def fetch_ahead(weight: Fp8Weight, num_rows: int, most_bytes: int) -> int:
    """Ask for what a product of so many rows reads of a weight; returns how many bytes were asked.

    None where it is neither packed nor copied, which Hopper's products do at their first use.
    """
    read = held_copy(weight.codes, num_rows)
    if read is None:
        packed = held_form(weight.codes)
        read = None if packed is None else packed.data
    size = 0 if read is None else min(read.numel() * read.element_size(), most_bytes)
    if read is not None and size:
        nvcc.call(nvcc.load(SOURCE), "fetch_ahead", read.device, read, size)
    return size
