"""Inputs of the hyper-connection site."""

from __future__ import annotations

from typing import Final

import torch

from deepinfer.kernels.cases import Arguments, Case, normal
from deepinfer.kernels.hyper_site import SiteWeights
from deepinfer.kernels.linear import DenseWeight

__all__ = ["CASES"]


def _case(
    name: str,
    streams: int,
    dim: int,
    dtype: torch.dtype,
    iters: int = 20,
    timed: tuple[int, ...] = (),
    op: str = "hyper_site",
) -> Case:
    width = (2 + streams) * streams

    def build(num_rows: int, generator: torch.Generator) -> Arguments:
        fn = normal(generator, width, streams * dim, scale=(streams * dim) ** -0.5)
        weights = SiteWeights(
            DenseWeight(fn, fn),
            0.5 + torch.rand(3, generator=generator),
            normal(generator, width),
            (1 + normal(generator, dim, scale=0.1)).to(dtype),
        )
        h = normal(generator, num_rows, streams, dim, dtype=dtype)
        y = normal(generator, num_rows, dim, dtype=dtype)
        post = 2.0 * torch.rand(num_rows, streams, generator=generator)
        comb = torch.rand(num_rows, streams, streams, generator=generator) / streams
        pre = torch.rand(num_rows, streams, generator=generator)
        return h, y, post, comb, pre, weights, 1e-20, 1e-6, iters

    return Case(
        op=op,
        name=name,
        build=build,
        rows=(0, 1, 2, 3, 4),
        row_flops=2 * streams * dim * (streams + 2 + width),
        tolerance=3e-5,  # a stream may round the other way, and the mix is made from it
        large=bool(timed),
        timed=timed,
    )


CASES: Final = (
    _case("four streams", 4, 64, torch.bfloat16),
    _case("two streams, strict", 2, 48, torch.float32, iters=5),
    _case("two streams, rounded", 2, 64, torch.float32, op="hyper_site_rounded"),
    _case("real", 4, 5120, torch.bfloat16, timed=(32, 512, 4096)),
)
