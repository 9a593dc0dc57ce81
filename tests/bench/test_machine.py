"""A machine is described without its names."""

from __future__ import annotations

import getpass
import json
import socket

import torch

from deepinfer.bench.machine import describe_machine, describe_versions, peak_memory_bytes


def test_the_description_names_no_host_and_no_path() -> None:
    text = json.dumps([describe_machine(), describe_versions()])
    assert "/" not in json.dumps(describe_versions())
    for name in (socket.gethostname(), getpass.getuser()):
        assert len(name) < 3 or f'"{name}"' not in text


def test_the_description_is_complete() -> None:
    machine = describe_machine()
    assert set(machine) == {"cpu", "cpu_count", "memory_bytes", "system"}
    assert machine["cpu"]
    assert int(machine["cpu_count"]) >= 1
    assert describe_versions()["torch"] == torch.__version__


def test_the_peak_covers_what_is_touched() -> None:
    held = b"x" * 2**26
    peak = peak_memory_bytes()
    assert len(held) < peak < 2**40
    del held
    assert peak_memory_bytes() >= peak
