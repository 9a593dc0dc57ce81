"""Index scores through DeepGEMM, queries and keys in e4m3 with a power of two for each row.

E2M1 values of one row fit exactly while their group scales lie within some binades of each other.
Heads are summed in fp32 and rounded at the end, whatever rounding is asked.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from deepinfer.errors import UnsupportedError
from deepinfer.kernels.libraries import library
from deepinfer.kernels.quantize import pow2_ceil

if TYPE_CHECKING:
    from deepinfer.kernels.index_score import IndexRounding


def index_score(q: Tensor, weight: Tensor, keys: Tensor, rounding: IndexRounding) -> Tensor:
    """Score keys that all rows share; raises UnsupportedError for keys of each row's own."""
    if keys.ndim == 3:
        raise UnsupportedError("DeepGEMM scores keys that all rows share; use its paged form")
    codes, factor = _quantized(q.float())
    key_codes, key_factor = _quantized(keys)
    rows, count = q.shape[0], keys.shape[0]
    begin = torch.zeros(rows, dtype=torch.int32, device=q.device)
    end = torch.full((rows,), count, dtype=torch.int32, device=q.device)
    found = library("deep_gemm").fp8_mqa_logits(
        codes,
        (key_codes, key_factor.squeeze(-1)),
        weight.float() * factor.squeeze(-1),
        begin,
        end,
        clean_logits=False,
    )
    scores = found if isinstance(found, Tensor) else torch.utils.dlpack.from_dlpack(found)
    return scores if rounding == "none" else scores.to(torch.bfloat16).float()


def _quantized(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return e4m3 values and a power of two for each row of the last dimension."""
    factor = pow2_ceil(x.abs().amax(-1, keepdim=True).clamp(min=1e-30) / 448.0)
    return (x / factor).to(torch.float8_e4m3fn), factor
