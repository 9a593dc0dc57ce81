"""Inputs of the Engram ops."""

from __future__ import annotations

from typing import Final

import torch

from deepinfer.kernels.cases import Arguments, Case, normal

__all__ = ["CASES"]

_PRIMES: Final = ((251, 257), (263, 269), (271, 277))
_REAL_PRIMES: Final = ((16000057, 16000079), (16000189, 16000321), (16000339, 16000463))


def _hash(name: str, primes: tuple[tuple[int, ...], ...], vocabulary: int) -> Case:
    def build(num_rows: int, generator: torch.Generator) -> Arguments:
        orders = len(primes) + 1
        ngrams = torch.randint(0, vocabulary, (num_rows, orders), generator=generator)
        bound = (2**63 - 1) // vocabulary // 2
        multipliers = torch.randint(0, bound, (orders,), generator=generator) * 2 + 1
        table = torch.tensor(primes)
        offsets = table.flatten().cumsum(0) - table.flatten()
        return ngrams, multipliers, table, offsets

    return Case(op="engram_hash", name=name, build=build, tolerance=0.0)


def _lookup(name: str, rows: int, dim: int, columns: int, dtype: torch.dtype) -> Case:
    def build(num_rows: int, generator: torch.Generator) -> Arguments:
        codes = normal(generator, rows, dim, scale=64.0).to(torch.float8_e4m3fn)
        shape = (rows, dim // 32)
        scale = torch.randint(116, 124, shape, generator=generator, dtype=torch.uint8)
        index = torch.randint(0, rows, (num_rows, columns), generator=generator)
        return codes, scale, index, dtype

    return Case(op="engram_lookup", name=name, build=build, rows=(2,), tolerance=0.0)


def _gate(
    name: str,
    streams: int,
    dim: int,
    dtype: torch.dtype,
    scale: float = 1.0,
    silent: bool = False,
    timed: tuple[int, ...] = (),
) -> Case:
    """`silent`: every key is 0, so that the floor below the square root decides."""

    def build(num_rows: int, generator: torch.Generator) -> Arguments:
        x = normal(generator, num_rows, streams, dim, dtype=dtype)
        kv = normal(generator, num_rows, (streams + 1) * dim, dtype=dtype, scale=scale)
        if silent:
            kv[:, : streams * dim] = 0.0
        return x, kv, 1.0 + normal(generator, streams, dim, scale=0.1), 1e-20

    return Case(
        op="engram_gate",
        name=name,
        build=build,
        rows=(0, 1),
        row_flops=8 * streams * dim,
        large=bool(timed),
        timed=timed,
    )


CASES: Final = (
    _hash("small primes", _PRIMES, 237),
    _hash("real sizes", _REAL_PRIMES, 99092),
    _hash("two orders", ((31, 37, 41),), 50),
    _lookup("rows", 1588, 32, 6, torch.bfloat16),
    _lookup("wide rows, strict", 100, 256, 4, torch.float32),
    _gate("four streams", 4, 64, torch.bfloat16),
    _gate("real", 4, 5120, torch.bfloat16, timed=(32, 512, 4096)),
    _gate("small values", 4, 64, torch.bfloat16, 1e-6),
    _gate("three streams, strict", 3, 80, torch.float32),
    _gate("keys of zero, strict", 4, 64, torch.float32, silent=True),
)
