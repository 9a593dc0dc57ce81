"""Routed experts on packed weights in one launch on SM90a: the schedules of `experts.cu`."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from deepinfer.kernels import nvcc
from deepinfer.kernels.packed import Decoded, Packed
from deepinfer.kernels.packed.run import Schedules, launches
from deepinfer.kernels.packed.tokens import fold_tokens, gather_tokens

__all__ = ["SCHEDULES", "SOURCE", "experts", "takes"]

SOURCE: Final = Path(__file__).with_name("experts.cu")

SCHEDULES: Final[Schedules] = {
    Decoded.FP4_E4M3: (
        (36, "fp8_48_experts"),
        (62, "fp8_64_four"),
        (None, "fp8_128_experts"),
    ),
    Decoded.FP4_BF16: (
        (20, "exact_few_experts"),
        (36, "exact_48_ahead"),
        (62, "exact_64_four"),
        (None, "exact_136_experts"),
    ),
}
"""Schedules by the most rows that an expert has on average."""

_CHOSEN: Final[tuple[Decoded, ...]] = (Decoded.FP4_E4M3, Decoded.FP4_BF16)
"""What runs in one launch."""

_LEAST_TILE: Final = 32
"""Rows of the smallest tile of tokens."""


def takes(w1_w3: Packed, w2: Packed) -> bool:
    """Whether there is a launch for these matrices: both decoded alike, sizes that fit."""
    return (
        w1_w3.decoded is w2.decoded
        and w2.decoded in _CHOSEN
        and w1_w3.outputs == 2 * w2.inputs
        and w1_w3.inputs == w2.outputs
        and w1_w3.experts <= 512
    )


def experts(
    x: Tensor,
    rows: Tensor,
    offsets: Tensor,
    weight: Tensor,
    w1_w3: Packed,
    w2: Packed,
    limit: float,
    quantize: bool,
    *,
    name: str = "",
) -> Tensor:
    """As `expert_linear.packed.experts`, with the same bits.

    name  the schedule, by default those that the number of rows allows
    """
    count, device = rows.shape[0], x.device
    state = torch.empty(1 + w2.experts + -(-count // _LEAST_TILE), dtype=torch.int32, device=device)
    scale = hidden_scale = None
    if w1_w3.decoded is Decoded.FP4_E4M3:
        tokens, scale = fold_tokens(x, rows, offsets, state)
        hidden_scale = torch.empty(count, dtype=torch.float32, device=device)
    else:
        tokens = gather_tokens(x, rows, offsets, state)
    gate_up = torch.empty(count, w1_w3.outputs, dtype=torch.bfloat16, device=device)
    hidden = torch.empty(count, w2.inputs, dtype=tokens.dtype, device=device)
    out = torch.empty(count, w2.outputs, dtype=torch.bfloat16, device=device)
    chosen = (
        [(name, 0, (1 << 31) - 1)] if name else launches(w2.decoded, count, w2.experts, SCHEDULES)
    )
    for schedule, least, most in chosen:
        nvcc.call(
            nvcc.load(SOURCE), schedule, device, tokens, scale, w1_w3.data, w1_w3.row_scale,
            w2.data, w2.row_scale, offsets, weight, gate_up, hidden, hidden_scale, out, state,
            w2.experts, w1_w3.inputs, w2.inputs, count, least, most, float(limit), int(quantize),
            nvcc.processors(device),
        )  # fmt: skip
    return out
