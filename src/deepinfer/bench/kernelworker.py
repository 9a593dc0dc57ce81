"""Times members of one task in a process of its own, told over stdin, heard over stdout.

`python -m deepinfer.bench.kernelworker DEVICE SHAPE PEERS`; a request is one JSON line
{"mode": "ceilings" | "warm" | "measure", "keys": [..], "rest_s": seconds}, an answer lines that
begin with "@".
"""

from __future__ import annotations

import dataclasses
import gc
import json
import sys
import time
import traceback
from collections.abc import Sequence
from typing import Any

import torch

from deepinfer.bench.ceilings import measure_ceilings
from deepinfer.bench.points import Member, Work, list_members, shared_inputs
from deepinfer.bench.timing import Clock, make_clock, single_sets
from deepinfer.device import pick_device

__all__ = ["main", "measure", "warm"]


def warm(member: Member, device: torch.device) -> dict[str, Any]:
    """Compile and run once; compare with the exact result."""
    start = time.monotonic()
    with single_sets():
        work = member.build(device)
    work.calls[0]()
    if device.type == "cuda":
        torch.cuda.synchronize()
    compiled_s = time.monotonic() - start
    error = work.check()
    return {"error": error, "first_s": round(compiled_s, 2)}


def measure(
    members: Sequence[Member], device: torch.device, rest_s: float = 0.0
) -> dict[str, dict[str, Any]]:
    """Time members in alternation: all cool, twice, then each under its own load.

    rest_s  pause before a member is timed cool
    """
    told: dict[str, dict[str, Any]] = {}
    clocks: dict[str, tuple[Clock, Work]] = {}
    for member in members:
        say("start", member.key)
        try:
            work = member.build(device)
            clocks[member.key] = make_clock(work.calls, work.flops, device), work
        except Exception as error:
            told[member.key] = _failure(error)
            if _is_fatal(error):
                return told
    for _ in range(2):
        for key, (clock, _work) in clocks.items():
            say("start", key)
            time.sleep(rest_s)
            clock.burst()
    for key, (clock, _work) in clocks.items():
        say("start", key)
        clock.load()
        clock.later()
    for key, (clock, work) in clocks.items():
        timing = dataclasses.asdict(clock.timing())
        told[key] = timing | {"flops": work.flops, "bytes": work.bytes, "rest_s": rest_s}
        clock.close()
    return told


def say(kind: str, value: object) -> None:
    """Send one line to the supervisor."""
    print("@" + json.dumps([kind, value]), flush=True)


def _failure(error: BaseException) -> dict[str, Any]:
    """Return what to tell; `lost`: the card's context is gone with it."""
    traceback.print_exc(limit=8)
    text = " ".join(str(error).split())
    return {"failed": f"{type(error).__name__}: {text[:300]}", "lost": _is_fatal(error)}


def _is_fatal(error: BaseException) -> bool:
    """Whether the card's context is lost with it."""
    return any(word in str(error) for word in ("CUDA error", "illegal", "misaligned"))


def main(argv: Sequence[str]) -> int:
    """Serve requests until stdin ends."""
    name, shape, peers = argv
    picked = pick_device(name)
    picked.bind_thread()
    device = picked.torch_device
    members = {
        m.key: m
        for m in list_members(shape, picked.capability.arch, peers=peers == "1")  # type: ignore[arg-type]
    }
    say("ready", picked.capability.arch)
    for line in sys.stdin:
        request = json.loads(line)
        torch.manual_seed(0)
        try:
            with torch.inference_mode():
                if request["mode"] == "ceilings":
                    answer: object = dataclasses.asdict(measure_ceilings(device))
                elif request["mode"] == "warm":
                    answer = warm(members[request["keys"][0]], device)
                else:
                    with shared_inputs():
                        keys, rest_s = request["keys"], request["rest_s"]
                        answer = measure([members[key] for key in keys], device, rest_s)
        except Exception as error:
            say("answer", _failure(error))
        else:
            say("answer", answer)
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
