"""Top-k through DeepSelect, which has code for Blackwell only; ties go to any index there."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from deepinfer.kernels.libraries import library


def select_topk(scores: Tensor, visible: Tensor, count: int) -> Tensor:
    """As the reference but for ties."""
    select = library("deep_select")
    width = scores.shape[1]
    step = max(1, select.get_stride_requirement()[0] // scores.element_size())
    if scores.stride(0) % step or scores.stride(1) != 1 or width < count:
        short = max(0, count - width)
        scores = F.pad(scores, (0, short + -(width + short) % step), value=-math.inf)
    _, found = select.topk(
        scores,
        count,
        end=visible.int(),
        indices_type=torch.int64,
        sorted_index=True,
        idx_oob_fill_value=-1,
        return_value=False,
        abort_when_nan_found=False,
    )
    held = found >= 0
    held &= scores.gather(1, found.clamp(min=0)) > -math.inf
    last = torch.iinfo(torch.int64).max
    ordered: Tensor = found.masked_fill(~held, last).sort(dim=1).values
    return ordered.masked_fill(ordered == last, -1)
