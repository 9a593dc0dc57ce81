"""Inputs of the hyper-connection ops."""

from __future__ import annotations

from typing import Final

import torch

from deepinfer.kernels.cases import Arguments, Case, normal
from deepinfer.kernels.linear import DenseWeight

__all__ = ["CASES"]

_SITE: Final = (32, 512, 4096)


def _mix(
    name: str,
    streams: int,
    dim: int,
    dtype: torch.dtype,
    iters: int = 20,
    gain: float = 1.0,
    timed: tuple[int, ...] = (),
) -> Case:
    width = (2 + streams) * streams

    def build(num_rows: int, generator: torch.Generator) -> Arguments:
        fn = normal(generator, width, streams * dim, scale=(streams * dim) ** -0.5)
        scale = gain * (0.5 + torch.rand(3, generator=generator))
        base = normal(generator, width)
        h = normal(generator, num_rows, streams, dim, dtype=dtype)
        return h, DenseWeight(fn, fn), scale, base, 1e-20, 1e-6, iters

    return Case(
        op="hyper_mix",
        name=name,
        build=build,
        row_flops=2 * width * streams * dim,
        tolerance=1e-5,
        large=bool(timed),
        timed=timed,
    )


def _collapse(
    name: str, streams: int, dim: int, dtype: torch.dtype, timed: tuple[int, ...] = ()
) -> Case:
    def build(num_rows: int, generator: torch.Generator) -> Arguments:
        h = normal(generator, num_rows, streams, dim, dtype=dtype)
        return h, torch.rand(num_rows, streams, generator=generator)

    return Case(
        op="hyper_collapse",
        name=name,
        build=build,
        rows=(0, 1),
        row_flops=2 * streams * dim,
        large=bool(timed),
        timed=timed,
    )


def _expand(
    name: str, streams: int, dim: int, dtype: torch.dtype, timed: tuple[int, ...] = ()
) -> Case:
    def build(num_rows: int, generator: torch.Generator) -> Arguments:
        h = normal(generator, num_rows, streams, dim, dtype=dtype)
        y = normal(generator, num_rows, dim, dtype=dtype)
        post = 2.0 * torch.rand(num_rows, streams, generator=generator)
        comb = torch.rand(num_rows, streams, streams, generator=generator) / streams
        return h, y, post, comb

    return Case(
        op="hyper_expand",
        name=name,
        build=build,
        rows=(0, 1, 2, 3),
        row_flops=2 * streams * (streams + 1) * dim,
        large=bool(timed),
        timed=timed,
    )


CASES: Final = (
    _mix("four streams", 4, 64, torch.bfloat16),
    _mix("steep", 4, 32, torch.bfloat16, gain=8.0),
    _mix("two streams, strict", 2, 48, torch.float32, iters=5),
    _mix("one iteration", 4, 64, torch.bfloat16, iters=1),
    _mix("eight streams", 8, 32, torch.bfloat16, iters=3),
    _collapse("four streams", 4, 64, torch.bfloat16),
    _collapse("three streams, strict", 3, 33, torch.float32),
    _expand("four streams", 4, 64, torch.bfloat16),
    _expand("three streams, strict", 3, 33, torch.float32),
    _mix("real", 4, 5120, torch.bfloat16, timed=_SITE),
    _collapse("real", 4, 5120, torch.bfloat16, timed=_SITE),
    _expand("real", 4, 5120, torch.bfloat16, timed=_SITE),
)
