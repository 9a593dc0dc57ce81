"""Ascend 950: a contract only, until its kernels exist."""

from __future__ import annotations

from deepinfer.errors import UnsupportedError

__all__ = ["refuse_ascend"]


def refuse_ascend() -> None:
    """Raise UnsupportedError: nothing runs on Ascend in this version."""
    raise UnsupportedError(
        "device ascend: no kernels for Ascend are built in this version; use --device cpu"
    )
