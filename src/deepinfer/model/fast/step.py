"""What the layers of one pass share: arithmetic, rotary values, inputs, caches, selections."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from deepinfer.cache.tensors import Caches
from deepinfer.config import ModelConfig
from deepinfer.kernels.index_score import IndexRounding
from deepinfer.kernels.ops import Ops
from deepinfer.kernels.quantize import QuantFormat
from deepinfer.model.fast.beside import Side
from deepinfer.model.fast.inputs import ModelInputs

__all__ = ["Numerics", "Pass", "Rotation", "Step"]

T = TypeVar("T")


Rotation = tuple[Tensor, Tensor]
"""Cosines and sines, each [T, R/2] fp32."""


@dataclass(frozen=True, slots=True)
class Numerics:
    """The resolved arithmetic: no "auto" left.

    dtype           of activations: bf16 under official, fp32 under noq
    quantize        quantize activations and caches
    fp8_output      `wo_a` takes FP8 activations
    index_rounding  of index scores
    """

    dtype: torch.dtype
    quantize: bool
    fp8_output: bool
    index_rounding: IndexRounding


@dataclass(slots=True)
class Pass:
    """What a block needs whatever its rows are: a backbone step or a draft block.

    rotation  layers with compressed KV or without -> rotation of the rows
    trace     name -> one value per layer that produces it, None when nothing is traced
    live      [T] bool, rows whose experts run; None = all
    side      where branches of the step run; None = it has none
    """

    config: ModelConfig
    ops: Ops
    numerics: Numerics
    rotation: dict[bool, Rotation]
    trace: MutableMapping[str, list[Tensor]] | None
    live: Tensor | None = field(default=None, kw_only=True)
    side: Side | None = field(default=None, kw_only=True)

    def note(self, name: str, value: Tensor) -> None:
        """Keep one layer's value when the pass is traced."""
        if self.trace is not None:
            self.trace.setdefault(name, []).append(value.clone())

    @property
    def branches(self) -> bool:
        """Whether the step has branches."""
        return self.side is not None and self.side.runs

    def beside(self, work: Callable[[], T]) -> Callable[[], T]:
        """Run work, beside what follows where the step has branches; the result waits for it."""
        if self.side is not None and self.branches:
            return self.side.run(work)
        found = work()
        return lambda: found

    @property
    def fuses(self) -> bool:
        """Whether ops that round what they return spare an op of its own."""
        return self.ops.choices["latent_entry"].name != "reference"

    def act_quantized(self, x: Tensor, fmt: QuantFormat) -> Tensor:
        """Round values to a format and back; the identity without quantization."""
        return self.ops.round_trip(x, fmt) if self.numerics.quantize else x


@dataclass(slots=True)
class Step(Pass):
    """One backbone step over T rows.

    emit_rotation  ratio -> rotation of the entries that the step completes
    topk           index source -> [T, K] sequence-local entries, -1 padded
    candidates     [T, blocks] sequence-local candidate blocks, -1 padded; None = all
    columns        [T] how many entries those are, in every row; None = not needed yet
    selected       (KV source, index source) -> dequantized entries and [T, K] indices into them
    entries        (KV source, index source) -> [T, K] flat cache entries, -1 padded
    compressed     the entries of every layer to come are stored already
    """

    inputs: ModelInputs
    caches: Caches
    emit_rotation: dict[int, Rotation]
    topk: dict[int, Tensor] = field(default_factory=dict)
    candidates: Tensor | None = None
    columns: Tensor | None = None
    selected: dict[tuple[int, int], tuple[Tensor, Tensor]] = field(default_factory=dict)
    entries: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    compressed: bool = False
