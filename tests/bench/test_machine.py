"""A machine is described without its names."""

from __future__ import annotations

import getpass
import json
import socket
import subprocess
import sys

import torch

from deepinfer.bench.machine import describe_machine, describe_versions


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


def test_the_peak_covers_what_was_touched_and_let_go() -> None:
    code = (
        "from deepinfer.bench.machine import peak_memory_bytes as peak\n"
        "before = peak(); held = b'x' * 2**26; top = peak(); del held; print(before, top, peak())"
    )
    # A process of its own: this one's peak may lie above what is touched here.
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    before, top, after = map(int, done.stdout.split())
    slack = 2**22  # the kernel counts pages in batches
    assert abs(top - before - 2**26) < slack
    assert abs(after - top) < slack
