"""Weights on their way into a card's cache before the product that reads them: a hint, no op."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from deepinfer.kernels import nvcc
from deepinfer.kernels.linear import DenseWeight, Fp8Weight
from deepinfer.kernels.linear.copied import held_copy
from deepinfer.kernels.packed.kept import held_form

__all__ = ["fetch_ahead"]

SOURCE: Final = Path(__file__).with_name("sm90.cu")


def fetch_ahead(weight: DenseWeight | Fp8Weight, num_rows: int, most_bytes: int) -> int:
    """Ask for what a product of so many rows reads of a weight; returns how many bytes were asked.

    None of an FP8 one that is neither packed nor copied, which Hopper's products do at its first
    use.
    """
    if isinstance(weight, DenseWeight):
        read = weight.stored if weight.stored.is_contiguous() else None
    else:
        read = held_copy(weight.codes, num_rows)
    if read is None and isinstance(weight, Fp8Weight):
        packed = held_form(weight.codes)
        read = None if packed is None else packed.data
    size = 0 if read is None else min(read.numel() * read.element_size(), most_bytes)
    if read is not None and size:
        nvcc.call(nvcc.load(SOURCE), "fetch_ahead", read.device, read, size)
    return size
