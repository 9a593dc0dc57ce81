"""FP8 linears through DeepGEMM, where a weight's scales are equal over 128 x 128 values.

Released weights have scales of 32 x 32, so most do not fit and are refused. Inputs are quantized in
groups of 128, not 32: its numbers are not the model's.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from deepinfer.errors import UnsupportedError
from deepinfer.kernels.libraries import library

if TYPE_CHECKING:
    from deepinfer.kernels.linear import Fp8Weight

_GROUP = 128
_wide: dict[int, Tensor] = {}


def fp8_linear(x: Tensor, weight: Fp8Weight, quantize_input: bool) -> Tensor:
    """Multiply with both sides in e4m3 and scales of 128.

    Raises UnsupportedError for a weight whose scales are narrower, or an unquantized input.
    """
    if not quantize_input or x.dtype != torch.bfloat16:
        raise UnsupportedError("DeepGEMM multiplies quantized bf16 inputs only")
    scales = _wide_scales(weight)
    groups = x.float().view(x.shape[0], -1, _GROUP)
    factor = groups.abs().amax(-1, keepdim=True).clamp(min=1e-4) / 448.0
    codes = (groups / factor).to(torch.float8_e4m3fn).view(x.shape)
    layout = library("deep_gemm", "utils.layout")
    factors = layout.get_mn_major_tma_aligned_tensor(factor.squeeze(-1))
    out = torch.empty(x.shape[0], weight.codes.shape[0], dtype=x.dtype, device=x.device)
    library("deep_gemm").fp8_gemm_nt(
        (codes, factors), (weight.codes, scales), out, disable_ue8m0_cast=True
    )
    return out


def _wide_scales(weight: Fp8Weight) -> Tensor:
    """Return [N/128, K/128] fp32 of a weight that has them; looked at once."""
    found = _wide.get(id(weight.scale))
    if found is not None:
        return found
    rows, columns = weight.scale.shape
    if rows % 4 or columns % 4:
        raise UnsupportedError(f"DeepGEMM needs multiples of 128, not {tuple(weight.codes.shape)}")
    tiles = weight.scale.view(rows // 4, 4, columns // 4, 4).transpose(1, 2).flatten(2)
    if bool((tiles != tiles[..., :1]).any()):
        raise UnsupportedError("DeepGEMM's scales are 128 wide, this weight's are 32 wide")
    name = id(weight.scale)
    _wide[name] = torch.exp2(tiles[..., 0].float() - 127.0)
    weakref.finalize(weight.scale, _wide.pop, name, None)
    return _wide[name]
