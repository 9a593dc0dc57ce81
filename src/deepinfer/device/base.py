"""What the engine asks of a device."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch

__all__ = ["Capability", "Device"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Capability:
    """What a device is.

    name          for people, e.g. the model of the card
    arch          "cpu", "sm80", "sm90", "sm100", ..., "ascend950": the key of the dispatch table
    total_bytes   its memory
    """

    name: str
    arch: str
    total_bytes: int


class Device(Protocol):
    """One device of one kind."""

    @property
    def torch_device(self) -> torch.device:
        """Where tensors live."""
        ...

    @property
    def capability(self) -> Capability:
        """What it can do."""
        ...

    def available_bytes(self) -> int:
        """Return the memory that is free now."""
        ...

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a scope in which a host wait on the device is an error."""
        ...

    def bind_thread(self) -> None:
        """Make it the device of the calling thread, as far as its library has such a notion."""
        ...

    def synchronize(self) -> None:
        """Wait until everything enqueued is done."""
        ...
