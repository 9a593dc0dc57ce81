"""What bf16 copies of FP8 matrices take, and where they pay. Pure."""

from __future__ import annotations

from typing import Final

from deepinfer.config.model import ModelConfig
from deepinfer.weights.layout import FP8, TensorSpec, expected_tensors

__all__ = ["copies_pay", "copy_bytes", "is_packed"]

_SHARE: Final = 8


def is_packed(spec: TensorSpec, inputs: int) -> bool:
    """Whether a card has a packed form for a matrix, by its sizes."""
    return spec.shape[0] % 256 == 0 and inputs % 256 == 0


def copy_bytes(model: ModelConfig, drafts: bool) -> int:
    """Return the bytes of copies of all FP8 matrices that cards multiply packed.

    drafts  those of the draft blocks as well
    Each rank holds them all: only experts and Engram tables are shared out.
    """
    parts = ("backbone", "draft") if drafts else ("backbone",)
    return sum(
        2 * spec.num_parameters
        for spec in expected_tensors(model).values()
        if spec.dtype == FP8 and spec.part in parts and is_packed(spec, spec.shape[1])
    )


def copies_pay(model: ModelConfig, drafts: bool, total_bytes: int) -> bool:
    """Whether copies take at most an eighth of a card."""
    return _SHARE * copy_bytes(model, drafts) <= total_bytes
