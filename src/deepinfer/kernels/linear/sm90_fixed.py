"""The products of `sm90.py`, a row's bits the same in any batch.

Blocks that share a sum add in the order of their ranks, and the weight alone decides how many they
are.
"""

from __future__ import annotations

from functools import partial
from typing import Final

from deepinfer.kernels.linear import sm90

__all__ = ["fp8_linear", "grouped_linear"]

fp8_linear: Final = partial(sm90.fp8_linear, fixed=True)
grouped_linear: Final = partial(sm90.grouped_linear, fixed=True)
