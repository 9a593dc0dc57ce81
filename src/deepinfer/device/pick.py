"""From a device's name to the device."""

from __future__ import annotations

import re

from deepinfer.device.ascend import refuse_ascend
from deepinfer.device.base import Device
from deepinfer.device.cpu import CpuDevice
from deepinfer.device.cuda import CudaDevice, cuda_count
from deepinfer.errors import ConfigError

__all__ = ["pick_device"]


def pick_device(name: str = "auto") -> Device:
    """Return the device called "auto", "cpu", "cuda" or "cuda:N".

    "auto" takes the first NVIDIA card that torch can use, else the CPU. Raises ConfigError for an
    unknown name and UnsupportedError for a device that is not there.
    """
    if name == "auto":
        return CudaDevice(0) if cuda_count() else CpuDevice()
    if name == "cpu":
        return CpuDevice()
    if str(name).startswith(("ascend", "npu")):
        refuse_ascend()
    found = re.fullmatch(r"cuda(?::(\d+))?", str(name))
    if found:
        return CudaDevice(int(found[1] or 0))
    raise ConfigError(f"device: found {name!r}, expected auto, cpu, cuda or cuda:N")
