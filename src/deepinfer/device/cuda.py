"""NVIDIA cards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch

from deepinfer.device.base import Capability
from deepinfer.errors import UnsupportedError

__all__ = ["CudaDevice", "cuda_count"]


def cuda_count() -> int:
    """Return how many cards torch can use."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


class CudaDevice:
    """One card."""

    def __init__(self, index: int = 0) -> None:
        """Raises UnsupportedError when torch sees no such card."""
        if index >= cuda_count():
            raise UnsupportedError(
                f"device cuda:{index}: torch {torch.__version__} sees {cuda_count()} NVIDIA cards "
                "here; use --device cpu, or install a CUDA build of torch and a driver"
            )
        self.torch_device = torch.device("cuda", index)
        properties = torch.cuda.get_device_properties(index)
        self.capability = Capability(
            name=properties.name,
            arch=f"sm{properties.major}{properties.minor}",
            total_bytes=properties.total_memory,
        )

    def available_bytes(self) -> int:
        """Return the card's free memory."""
        return int(torch.cuda.mem_get_info(self.torch_device)[0])

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a scope in which torch raises on a host wait."""
        return _no_sync()

    def bind_thread(self) -> None:
        """Make it the calling thread's current card, which kernels are launched on."""
        torch.cuda.set_device(self.torch_device)

    def synchronize(self) -> None:
        """Wait for the card."""
        torch.cuda.synchronize(self.torch_device)


@contextmanager
def _no_sync() -> Iterator[None]:
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
