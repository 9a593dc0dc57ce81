"""Devices: what they can do, and the only files that name a vendor's API."""

from __future__ import annotations

from deepinfer.device.base import Capability, Device
from deepinfer.device.pick import pick_device

__all__ = ["Capability", "Device", "pick_device"]
