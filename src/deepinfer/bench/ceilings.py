"""What the chip does at most in this run: memory and tensor cores, cool and under steady load."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec

import torch

from deepinfer.bench.timing import Clock, make_clock

__all__ = ["Ceilings", "measure_ceilings"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ceilings:
    """Bytes and multiply-adds (as two operations) a second; 0 = not measured.

    The plain fields are cool-card values, `_steady` those under load.
    """

    copy: float
    read: float
    bf16: float
    bf16_steady: float
    fp8: float = 0.0
    fp8_steady: float = 0.0

    def floor_us(self, num_bytes: float, flops: float, math: str, steady: bool) -> float:
        """Return the time below which no version runs."""
        rate = {
            ("bf16", False): self.bf16,
            ("bf16", True): self.bf16_steady,
            ("fp8", False): self.fp8 or self.bf16,
            ("fp8", True): self.fp8_steady or self.bf16_steady,
        }[math, steady]
        memory = num_bytes / max(self.read, self.copy) if max(self.read, self.copy) else 0.0
        return max(memory, flops / rate if rate else 0.0) * 1e6


def measure_ceilings(device: torch.device) -> Ceilings:
    """Measure with a few large operations; a second on a card."""
    card = device.type == "cuda"
    words = (1 << 29) if card else (1 << 20)
    copy, read = _memory(words, device)
    size = 8192 if card else 256
    flops = 2.0 * size**3
    a, b = (
        torch.randn(size, size, device=device, dtype=torch.bfloat16 if card else torch.float32)
        for _ in range(2)
    )
    out = torch.empty_like(a)
    cool, loaded = _both(lambda: torch.mm(a, b.T, out=out), flops, device)
    if not card or torch.cuda.get_device_capability(device) < (8, 9):
        return Ceilings(copy=copy, read=read, bf16=cool, bf16_steady=loaded)
    a8, b8 = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn)
    rows = torch.rand(size, 1, device=device) + 0.5
    columns = torch.rand(1, size, device=device) + 0.5
    fp8 = _both(
        lambda: torch._scaled_mm(
            a8,
            b8.T,
            scale_a=rows,
            scale_b=columns,
            out_dtype=torch.bfloat16,
            use_fast_accum=True,
        ),
        flops,
        device,
    )
    return Ceilings(
        copy=copy, read=read, bf16=cool, bf16_steady=loaded, fp8=fp8[0], fp8_steady=fp8[1]
    )


def _memory(words: int, device: torch.device) -> tuple[float, float]:
    """Return the bytes a second of a copy (read and written), and of reading alone."""
    source = torch.randint(-(2**31), 2**31 - 1, (words,), dtype=torch.int32, device=device)
    target = torch.empty_like(source)
    copy = 8 * words / (_time(lambda: torch.add(source, 1, out=target), 0, device) * 1e-6)
    reader: Callable[[torch.Tensor], object] = torch.sum
    if device.type == "cuda" and find_spec("triton"):
        reader = import_module("deepinfer.kernels.ceiling.triton").read_memory
    return copy, 4 * words / (_time(lambda: reader(source), 0, device) * 1e-6)


def _clock(call: Callable[[], object], flops: float, device: torch.device) -> Clock:
    clock = make_clock([call], flops, device)
    clock.burst()
    clock.load()
    clock.later()
    return clock


def _time(call: Callable[[], object], flops: float, device: torch.device) -> float:
    clock = _clock(call, flops, device)
    clock.close()
    return clock.timing().us_min


def _both(call: Callable[[], object], flops: float, device: torch.device) -> tuple[float, float]:
    clock = _clock(call, flops, device)
    timing = clock.timing()
    clock.close()
    return flops / (timing.us_burst * 1e-6), flops / (timing.us * 1e-6)
