"""The Hopper kernel with one block of threads a row, whatever the batch."""

from __future__ import annotations

from functools import partial
from typing import Final

from deepinfer.kernels.paged_attention import sm90

paged_attention: Final = partial(sm90.paged_attention, whole=True)
