"""Angular frequencies of the two kinds of layers."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from deepinfer.config import ModelConfig, YarnConfig

__all__ = ["compressed_inv_freq", "window_inv_freq"]


def window_inv_freq(config: ModelConfig) -> Tensor:
    """Return [R/2] fp32 for layers without compressed KV and for draft layers: plain theta."""
    return _plain(config.qk_rope_head_dim, config.rope_theta)


def compressed_inv_freq(config: ModelConfig) -> Tensor:
    """Return [R/2] fp32 for layers with compressed KV: their own theta, stretched by YaRN."""
    dims, theta = config.qk_rope_head_dim, config.compress_rope_theta
    return _stretched(_plain(dims, theta), dims, theta, config.rope_scaling)


def _plain(dims: int, theta: float) -> Tensor:
    """1 / theta^(2j/dims), each of exponent, power and reciprocal rounded to fp32."""
    exponent = torch.arange(0, dims, 2, dtype=torch.float32) / dims
    return 1.0 / (theta**exponent)


def _stretched(inv_freq: Tensor, dims: int, theta: float, yarn: YarnConfig) -> Tensor:
    """Blend each frequency with itself divided by the factor, along YaRN's ramp."""

    def boundary(rotations: float) -> float:
        turns = yarn.original_max_position_embeddings / (rotations * 2.0 * math.pi)
        return dims * math.log(turns) / (2.0 * math.log(theta))

    low = max(math.floor(boundary(yarn.beta_fast)), 0)
    high = min(math.ceil(boundary(yarn.beta_slow)), dims - 1)
    index = torch.arange(dims // 2, dtype=torch.float32)
    ramp = ((index - low) / max(high - low, 1e-3)).clamp(0.0, 1.0)
    return inv_freq / yarn.factor * ramp + inv_freq * (1.0 - ramp)
