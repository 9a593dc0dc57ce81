"""Weights in Humming's layout, for the adapters of linears and experts."""

from __future__ import annotations

import json
import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from deepinfer.kernels.libraries import library

__all__ = ["Packed", "pack"]

_PARTS = ("weight", "weight_scale", "weight_scale_2")


@dataclass(slots=True)
class Packed:
    """One weight as the library wants it; multiplies bf16 rows, accumulating in fp32."""

    layer: Any
    experts: int
    tuned: dict[int, str] = field(default_factory=dict)

    def multiply(self, x: Tensor, bounds: Tensor | None) -> Tensor:
        """Multiply x [R, K]; bounds [E+1] int64 of experts, None = a dense weight."""
        config, rows = self.layer.humming_config, x.shape[0]
        form = "dense" if bounds is None else "grouped_contiguous"
        if rows not in self.tuned:
            found = library("humming", "tune").get_heuristics_config(
                config, shape_m=rows, gemm_type=form
            )
            self.tuned[rows] = json.dumps(found)
        out = torch.empty(rows, config.shape_n, dtype=torch.bfloat16, device=x.device)
        library("humming", "ops").humming_gemm(
            layer_config=config.to_str(),
            compute_config=json.dumps({"gemm_type": form}),
            tuning_config=self.tuned[rows],
            inputs=x,
            input_scale=None,
            outputs=out,
            expert_layout=bounds,
            locks=self.layer.locks,
            **{part: getattr(self.layer, part, None) for part in _PARTS},
        )
        return out


def pack(kept: dict[int, Packed], codes: Tensor, scale: Tensor, *, fp4: bool) -> Packed:
    """Return a weight's copy, made at the first call and dropped with the weight.

    codes  MXFP4 [E, N, K/2] with scales [E, N, K/32], or e4m3 [N, K] with [N/32, K/32]
    """
    name = id(codes)
    if name in kept:
        return kept[name]
    *experts, outputs, width = codes.shape
    form: dict[str, object] = {"quant_method": "mxfp4"}
    if not fp4:  # one scale for each row and 32 inputs: the blocks' scales, repeated
        form = {"dtype": "float8e4m3", "group_size": 32, "scale_dtype": "float8e8m0"}
        scale = scale.repeat_interleave(32, 0)[:outputs]
    with codes.device:
        layer = library("humming", "layer").HummingLayer(
            shape_n=outputs,
            shape_k=2 * width if fp4 else width,
            weight_config=form,
            input_config=None,
            num_experts=experts[0] if experts else 0,
            torch_dtype=torch.bfloat16,
        )
    layer = layer.to(codes.device)
    layer.weight.data.view(torch.uint8).view(-1).copy_(codes.view(torch.uint8).reshape(-1))
    layer.weight_scale.data.view(torch.uint8).view(-1).copy_(scale.reshape(-1))
    layer.transform()
    kept[name] = Packed(layer, experts[0] if experts else 0)
    weakref.finalize(codes, kept.pop, name, None)
    return kept[name]
