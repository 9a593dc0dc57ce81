"""Names of devices, what a CPU reports, and refusals."""

from __future__ import annotations

import pytest
import torch

from deepinfer.device import Capability, Device, pick_device
from deepinfer.device.cuda import CudaDevice, cuda_count
from deepinfer.errors import ConfigError, UnsupportedError


def test_the_cpu_says_what_it_is() -> None:
    device: Device = pick_device("cpu")
    assert device.torch_device == torch.device("cpu")
    assert device.capability.arch == "cpu" and device.capability.name
    assert 0 < device.available_bytes() <= device.capability.total_bytes
    device.synchronize()
    device.bind_thread()
    with device.no_sync():
        assert torch.ones(2, device=device.torch_device).sum().item() == 2.0


def test_freed_memory_stays_with_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks below 32 MiB come from the heap, and the heap keeps 64 MiB (glibc's parameters)."""
    calls: list[tuple[int, int]] = []

    class Library:
        def mallopt(self, parameter: int, value: int) -> None:
            calls.append((parameter, value))

    monkeypatch.setattr("ctypes.CDLL", lambda _: Library())
    pick_device("cpu")
    assert calls == [(-3, 32 << 20), (-1, 64 << 20)]


def test_another_c_library_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ctypes.CDLL", lambda _: object())
    assert pick_device("cpu").capability.arch == "cpu"


def test_auto_takes_what_is_there() -> None:
    want = "cuda" if cuda_count() else "cpu"
    assert pick_device().torch_device.type == pick_device("auto").torch_device.type == want


@pytest.mark.parametrize("name", ["", "gpu", "CPU", "cpu:0", "cuda:", "cuda:x", "cuda:-1", "mps"])
def test_an_unknown_name_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r"device: found .*expected auto, cpu, cuda or cuda:N"):
        pick_device(name)


def test_an_absent_card_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"device cuda:97: torch .* sees \d+ NVIDIA cards"):
        pick_device("cuda:97")


@pytest.mark.parametrize("name", ["ascend", "ascend:0", "npu:0"])
def test_ascend_says_what_is_missing(name: str) -> None:
    with pytest.raises(UnsupportedError, match="no kernels for Ascend"):
        pick_device(name)


def test_a_card_reports_its_architecture(monkeypatch: pytest.MonkeyPatch) -> None:
    """A card stood in for: the architecture is the key of the dispatch table."""

    class Properties:
        name = "card"
        major, minor, total_memory = 9, 0, 1 << 30

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: Properties)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (123, 456))
    device = pick_device("cuda:1")
    assert isinstance(device, CudaDevice) and device.torch_device == torch.device("cuda", 1)
    assert device.capability == Capability(name="card", arch="sm90", total_bytes=1 << 30)
    assert device.available_bytes() == 123
    assert pick_device("auto").torch_device == torch.device("cuda", 0)
    with pytest.raises(UnsupportedError, match="cuda:2"):
        pick_device("cuda:2")


def test_no_sync_puts_the_debug_mode_back(monkeypatch: pytest.MonkeyPatch) -> None:
    from deepinfer.device.cuda import _no_sync

    modes: list[object] = []
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    with pytest.raises(RuntimeError), _no_sync():
        raise RuntimeError
    assert modes == ["error", 0]
