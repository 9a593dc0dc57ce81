"""Inputs of attention's norms and rotation."""

from __future__ import annotations

import dataclasses
from typing import Final

import torch

from deepinfer.kernels.cache_io import CacheFormat
from deepinfer.kernels.cache_io.cases import empty_cache
from deepinfer.kernels.cases import Arguments, Case, normal

__all__ = ["CASES"]


def _case(
    name: str,
    rank: int,
    dim: int,
    rotated: int,
    dtype: torch.dtype = torch.bfloat16,
    timed: tuple[int, ...] = (),
) -> Case:
    def build(num_rows: int, generator: torch.Generator) -> Arguments:
        both = normal(generator, num_rows, rank + dim, dtype=dtype, scale=3.0)
        angle = normal(generator, num_rows, rotated // 2, scale=9.0)
        q_norm, kv_norm = normal(generator, rank), normal(generator, dim)
        return both, q_norm, kv_norm, angle.cos(), angle.sin(), 1e-20

    return Case(
        op="latent_entry",
        name=name,
        build=build,
        rows=(0, 3, 4),
        tolerance=2e-6 if dtype == torch.float32 else 4e-3,
        row_flops=4 * (rank + dim) + 3 * rotated,
        large=bool(timed),
        timed=timed,
    )


def _stored(
    name: str,
    rank: int,
    dim: int,
    rotated: int,
    dtype: torch.dtype = torch.bfloat16,
    timed: tuple[int, ...] = (),
) -> Case:
    plain = _case(name, rank, dim, rotated, dtype, timed)

    def build(num_rows: int, generator: torch.Generator) -> Arguments:
        form: CacheFormat = "window_fp8" if dtype == torch.bfloat16 else "fp32"
        cache = empty_cache(form, 2, max(4, num_rows), dim, dense=False, split=False)
        idx = torch.randperm(2 * max(4, num_rows), generator=generator)[:num_rows]
        idx[num_rows // 2 :][:1] = -1
        return *plain.build(num_rows, generator), False, cache, idx

    return dataclasses.replace(plain, op="latent_store", build=build, rows=(0, 3, 4, 8))


CASES: Final = (
    _case("small", 32, 96, 64),
    _case("odd widths", 48, 72, 8),
    _case("strict", 32, 64, 64, torch.float32),
    _case("real", 1280, 512, 64, timed=(32, 192, 4096)),
    _stored("stored", 48, 96, 64),
    _stored("stored, strict", 32, 64, 64, torch.float32),
    _stored("stored, real", 1280, 512, 64, timed=(32, 192, 4096)),
)
