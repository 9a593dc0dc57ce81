"""Engram: rows of a hashed n-gram table, added to every stream through a gate."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.config import ModelConfig
from deepinfer.config.engram import engram_tables
from deepinfer.kernels.engram.places import gather_ngrams, keep_ids
from deepinfer.model.fast.step import Step
from deepinfer.model.fast.weights import EngramWeights
from deepinfer.parallel.tables import Read

__all__ = ["EngramHash", "add_engram"]


class EngramHash:
    """Turns a step's tokens into table rows for every Engram layer.

    token_map [vocab] compressed id of every token.
    """

    def __init__(self, config: ModelConfig, token_map: Tensor, device: torch.device) -> None:
        tables = engram_tables(config)
        self._map = token_map.to(device=device, dtype=torch.int64)
        self._pad = int(self._map[config.engram_pad_token_id])
        self._multipliers = torch.from_numpy(tables.multipliers).to(device)
        self._primes = torch.from_numpy(tables.primes).to(device)
        self._offsets = torch.from_numpy(tables.offsets).to(device)

    def rows(self, step: Step) -> list[Tensor]:
        """Return [T, columns] int64 rows per Engram layer, and keep the tail of each sequence."""
        inputs, ring = step.inputs, step.caches.engram_tail
        assert inputs.engram is not None and ring is not None
        history = inputs.engram
        ids = inputs.token_ids if inputs.context is None else inputs.context.token_ids
        ngrams = gather_ngrams(ids, self._map, ring, history.load, history.rows, self._pad)
        keep_ids(ids, self._map, ring, history.store, history.store_rows)
        return [
            step.ops.engram_hash(ngrams, multipliers, primes, offsets)
            for multipliers, primes, offsets in zip(
                self._multipliers, self._primes, self._offsets, strict=True
            )
        ]


def add_engram(
    step: Step, weights: EngramWeights, stream: Tensor, rows: Tensor, read: Read | None = None
) -> Tensor:
    """Add the looked-up values to stream [T, M, C].

    read  the rows' values, where the step began with reading them
    """
    ops = step.ops
    if read is not None:
        values = read.wait(stream.dtype)
    else:
        rows = rows % weights.codes.shape[0] if weights.fold else rows
        values = ops.engram_lookup(weights.codes, weights.scale, rows, stream.dtype)
    kv = ops.fp8_linear(values, weights.wkv, step.numerics.quantize)
    return ops.engram_gate(stream, kv, weights.qk_weight, step.config.rms_norm_eps)
