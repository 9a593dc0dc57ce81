"""From the experts that rows chose to runs of rows per expert, and back to one sum per row.

No op of the dispatch table: what a choice gets depends on all others. Nothing here waits for a
card: the runs' borders stay on the device, where `expert_linear` reads them.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

__all__ = ["Groups", "Terms", "combine", "group", "whole"]


class Groups(NamedTuple):
    """The choices of T rows, k each, sorted by expert; P = T * k.

    rows     [P]    int64, row of each sorted choice; those left out stand at the end
    weights  [P]    fp32, its routing weight
    place    [T, k] int64, where a row's choice stands among the sorted ones, -1 = left out
    offsets  [E+1]  int64, where each expert's run begins
    """

    rows: Tensor
    weights: Tensor
    place: Tensor
    offsets: Tensor


class Terms(NamedTuple):
    """What `combine` adds up, where a hyper-connection site does so as it reads its input."""

    routed: Tensor
    place: Tensor
    shared: Tensor


def group(chosen: Tensor, weight: Tensor, num_experts: int, live: Tensor | None = None) -> Groups:
    """Sort choices by expert; equal ones stay in the order of their rows.

    chosen  [T, k]  int64; a choice outside 0..E-1 is left out: no run holds it
    weight  [T, k]  fp32
    live    [T] bool, rows whose choices count; None = all
    """
    if chosen.device.type == "cuda" and find_spec("triton"):
        from deepinfer.kernels.grouping import triton

        return triton.group(chosen, weight, num_experts, live)
    if live is not None:
        chosen = chosen.masked_fill(~live[:, None], -1)
    flat = chosen.reshape(-1).numpy() if chosen.device.type == "cpu" else chosen.reshape(-1).cpu()
    experts = np.asarray(flat)
    experts = np.where((experts < 0) | (experts >= num_experts), num_experts, experts)
    order = np.argsort(experts, kind="stable")
    counts = np.bincount(experts, minlength=num_experts + 1)[:num_experts]
    offsets = np.concatenate([[0], np.cumsum(counts)])
    place = np.empty_like(order)
    place[order] = np.arange(order.shape[0])
    place[experts == num_experts] = -1
    device = chosen.device
    sorted_choices = torch.from_numpy(order).to(device)
    return Groups(
        torch.from_numpy(order // max(1, chosen.shape[1])).to(device),
        weight.reshape(-1)[sorted_choices],
        torch.from_numpy(place).view(chosen.shape).to(device),
        torch.from_numpy(offsets).to(device),
    )


def combine(routed: Tensor, place: Tensor, shared: Tensor) -> Tensor:
    """Add each row's terms, in fp32 and in ascending place, and the shared expert's last.

    routed   [P, C]  rows sorted by expert, so that ascending places are ascending experts
    place    [T, k]  as in `Groups`
    shared   [T, C]
    returns  [T, C]  dtype of `shared`, rounded once
    """
    if routed.device.type == "cuda" and find_spec("triton"):
        from deepinfer.kernels.grouping import triton

        return triton.combine(routed, place, shared)
    at = place.sort(dim=1).values
    total = torch.zeros(shared.shape, dtype=torch.float32, device=shared.device)
    for column in at.unbind(1):
        terms = routed[column.clamp(min=0)].float()
        total = total + terms.masked_fill(column[:, None] < 0, 0.0)
    return (total + shared.float()).to(shared.dtype)


def whole(out: Tensor | Terms) -> Tensor:
    """Return an output as one tensor, terms added up."""
    return out if isinstance(out, Tensor) else combine(*out)
