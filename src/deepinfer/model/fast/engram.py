"""Engram: rows of a hashed n-gram table, added to every stream through a gate."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.config import ModelConfig
from deepinfer.config.engram import engram_tables
from deepinfer.kernels.engram.places import gather_ngrams, keep_ids
from deepinfer.kernels.ops import Ops
from deepinfer.model.fast.step import Step
from deepinfer.model.fast.weights import EngramWeights
from deepinfer.parallel.tables import Read

__all__ = ["EngramHash", "add_engram", "engram_products"]


class EngramHash:
    """Turns a step's tokens into table rows for every Engram layer.

    token_map [vocab] compressed id of every token.
    """

    def __init__(self, config: ModelConfig, token_map: Tensor, device: torch.device) -> None:
        tables = engram_tables(config)
        self._depth = config.engram_max_ngram_size - 1
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
        return self._hashed(step.ops, ngrams)

    def ahead(
        self, ops: Ops, ring: Tensor, slots: Tensor, positions: Tensor, ids: Tensor
    ) -> list[Tensor]:
        """Return rows as `rows` would for tokens that are likely to come; keeps nothing.

        ring  [S, L] compressed ids of earlier tokens
        slots, positions  [N] of the first tokens; ids  [N, J] tokens from there on
        """
        (count, width), depth = ids.shape, self._depth
        before = positions[:, None] - torch.arange(depth, 0, -1, device=ids.device)
        held = ring[slots[:, None], before.clamp(min=0) % ring.shape[1]].to(torch.int64)
        line = torch.cat([held.masked_fill(before < 0, self._pad), self._map[ids]], dim=1)
        back = torch.arange(depth, depth + width, device=ids.device)[:, None]
        back = back - torch.arange(depth + 1, device=ids.device)
        return self._hashed(ops, line[:, back].reshape(count * width, depth + 1))

    def _hashed(self, ops: Ops, ngrams: Tensor) -> list[Tensor]:
        return [
            ops.engram_hash(ngrams, multipliers, primes, offsets)
            for multipliers, primes, offsets in zip(
                self._multipliers, self._primes, self._offsets, strict=True
            )
        ]


def engram_products(
    step: Step, weights: EngramWeights, rows: Tensor, read: Read | None = None
) -> Tensor:
    """Return what a layer's gate makes of rows [T, columns]: keys and values, side by side.

    read  the rows' values, where the step began with reading them
    """
    ops, dtype = step.ops, step.numerics.dtype
    if read is not None:
        values = read.wait(dtype)
    else:
        rows = rows % weights.codes.shape[0] if weights.fold else rows
        values = ops.engram_lookup(weights.codes, weights.scale, rows, dtype)
    return ops.fp8_linear(values, weights.wkv, step.numerics.quantize)


def add_engram(step: Step, weights: EngramWeights, stream: Tensor, kv: Tensor) -> Tensor:
    """Add what `engram_products` returned to stream [T, M, C] through the gate."""
    return step.ops.engram_gate(stream, kv, weights.qk_weight, step.config.rms_norm_eps)
