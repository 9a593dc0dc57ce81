"""Experts of few rows in one function: the bits of the single ops."""

from __future__ import annotations

import pytest
import torch

from deepinfer.kernels.expert_linear import cases, fused, reference
from deepinfer.kernels.hyper import cpu as hyper
from deepinfer.kernels.hyper.reference import sinkhorn
from deepinfer.kernels.linear import cases as linear_cases
from deepinfer.kernels.linear import reference as linear
from deepinfer.kernels.quantize import round_trip
from deepinfer.kernels.rows import sum_in_order


@pytest.mark.parametrize("quantize", [True, False])
@pytest.mark.parametrize("num_rows", [1, 2, 16])
def test_fused_experts_equal_single_ops(num_rows: int, quantize: bool, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    width, inner, num, active, limit = 64, 96, 5, 3, 1.5
    dtype = torch.bfloat16 if quantize else torch.float32
    up = cases.fp4_weight(generator, num, 2 * inner, width, True)
    down = cases.fp4_weight(generator, num, width, inner, False)
    shared_up = linear_cases.fp8_weight(generator, 2 * inner, width, True)
    shared_down = linear_cases.fp8_weight(generator, width, inner, True)
    x = (3 * torch.randn(num_rows, width, generator=generator)).to(dtype)
    chosen = torch.stack(
        [torch.randperm(num, generator=generator)[:active] for _ in range(num_rows)]
    )
    weight = torch.rand(num_rows, active, generator=generator)
    assert fused.fits(x, down, shared_down)
    got = fused.experts(x, chosen, weight, up, down, shared_up, shared_down, limit, quantize)

    rounded = round_trip(x, "act8") if quantize else x
    total = torch.zeros(num_rows, width)
    for row in range(num_rows):
        terms = []
        for place in chosen[row].argsort().tolist():
            expert = int(chosen[row, place])
            offsets = [0] * (expert + 1) + [1] * (num - expert)
            both = reference.expert_linear(rounded[row : row + 1], up, offsets, False)
            scale = weight[row, place].view(1)
            hidden = reference.swiglu(*both.chunk(2, dim=1), limit, scale)
            terms.append(reference.expert_linear(hidden, down, offsets, quantize).float())
        total[row] = sum_in_order(torch.cat(terms), 0)
    both = linear.fp8_linear(rounded, shared_up, False)
    hidden = reference.swiglu(*both.chunk(2, dim=1), limit, None)
    shared = linear.fp8_linear(hidden, shared_down, quantize).float()
    assert torch.equal(got, (total + shared).to(dtype))


def test_too_many_rows_or_another_width_do_not_fit() -> None:
    generator = torch.Generator().manual_seed(0)
    down = cases.fp4_weight(generator, 2, 64, 32, False)
    same = linear_cases.fp8_weight(generator, 64, 32, False)
    wider = linear_cases.fp8_weight(generator, 64, 64, False)
    assert fused.fits(torch.zeros(16, 64), down, same)
    assert not fused.fits(torch.zeros(17, 64), down, same)
    assert not fused.fits(torch.zeros(16, 64), down, wider)


@pytest.mark.parametrize("by_product", [True, False])
@pytest.mark.parametrize("num_streams", [1, 2, 4, 6])
def test_sinkhorn_by_products_and_by_sums(
    num_streams: int, by_product: bool, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sums as products where the library adds in order, else as sums: the definition's bits."""
    if not by_product:
        monkeypatch.setattr(hyper, "_sum_matrices", lambda _: None)
    generator = torch.Generator().manual_seed(seed)
    for num_rows in (1, 3, 16):
        raw = 8 * torch.randn(num_rows, num_streams, num_streams, generator=generator)
        kept = hyper.Sinkhorn(num_rows, num_streams, 20, 1e-6)
        kept.run(torch.exp(raw - raw.amax(-1, keepdim=True)).numpy())
        assert torch.equal(torch.from_numpy(kept.result), sinkhorn(raw, 20, 1e-6))
