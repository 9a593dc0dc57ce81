"""Blocks packed as they are loaded: stored bytes go where a packed form took over."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from tests.model.pair import load_fast
from torch import Tensor

from deepinfer.config.load import resolve_model
from deepinfer.device import pick_device
from deepinfer.errors import UnsupportedError
from deepinfer.kernels.expert_linear import Fp4Weight
from deepinfer.kernels.linear import Fp8Weight
from deepinfer.kernels.ops import Ops
from deepinfer.kernels.packed import Decoded, pack_fp4
from deepinfer.kernels.packed.kept import kept_fp4, kept_fp8
from deepinfer.model.fast.balanced import _layer
from deepinfer.model.fast.packing import pack_block, pack_linear
from deepinfer.model.fast.step import Numerics
from deepinfer.parallel.experts import LayerExperts
from deepinfer.parallel.live import _pack, _unpack

OFFICIAL = Numerics(torch.bfloat16, True, True, "final")


def fp8(outputs: int, inputs: int) -> Fp8Weight:
    codes = torch.randint(0, 120, (outputs, inputs), dtype=torch.uint8).view(torch.float8_e4m3fn)
    scale = torch.randint(118, 122, (outputs // 32, inputs // 32), dtype=torch.uint8)
    return Fp8Weight(codes, scale, None)


def fp4(experts: int, outputs: int, inputs: int, low: int = 118) -> Fp4Weight:
    codes = torch.randint(0, 256, (experts, outputs, inputs // 2), dtype=torch.uint8)
    scale = torch.randint(low, 122, (experts, outputs, inputs // 32), dtype=torch.uint8)
    return Fp4Weight(codes, scale, None)


def held(*weights: Fp8Weight | Fp4Weight) -> list[int]:
    return [part.untyped_storage().nbytes() for w in weights for part in (w.codes, w.scale)]


def like_a_card(form: Decoded = Decoded.FP4_BF16) -> Ops:
    """Ops that keep packed forms as those of a card do, and compute nothing."""

    def fp8_linear(x: Tensor, weight: Fp8Weight, quantize: bool) -> Tensor:
        kept_fp8(weight.codes, weight.scale)
        return x.new_zeros(x.shape[0], weight.codes.shape[0])

    def routed(x: Tensor, rows: Tensor, weights: Tensor, offsets: Tensor, *rest: object) -> Tensor:
        first, second = rest[:2]
        assert isinstance(first, Fp4Weight) and isinstance(second, Fp4Weight)
        assert offsets.tolist() == [0] + [1] * second.codes.shape[0]
        for weight in (first, second):
            kept_fp4(weight.codes, weight.scale, form)
        return x.new_zeros(rows.shape[0], second.codes.shape[1])

    plain = Ops.resolve(pick_device("cpu").capability, checked=False)
    return dataclasses.replace(
        plain,
        fp8_linear=fp8_linear,
        grouped_linear=lambda x, weight, quantize: fp8_linear(x[:, 0], weight, quantize),
        routed_experts=routed,
    )


def test_a_matrix_is_freed_once_it_is_packed() -> None:
    weight, small = fp8(256, 512), fp8(96, 64)
    before = kept_fp8(weight.codes.clone(), weight.scale.clone())
    assert pack_linear(like_a_card(), OFFICIAL, weight) == 256 * 512 + 8 * 16
    assert held(weight) == [0, 0] and weight.codes.shape == (256, 512)
    after = kept_fp8(weight.codes, weight.scale)
    assert before is not None and after is not None and torch.equal(before.data, after.data)
    assert pack_linear(like_a_card(), OFFICIAL, small) == 0 and all(held(small))


@pytest.mark.parametrize(
    ("form", "low", "freed"),
    [(Decoded.FP4_BF16, 118, True), (Decoded.FP4_E4M3, 118, True), (Decoded.FP4_E4M3, 60, False)],
)
def test_experts_are_freed_together_or_not_at_all(form: Decoded, low: int, freed: bool) -> None:
    """Where scales of one lie too far apart for a form, both stay."""
    block = load_fast(resolve_model("golden"), "official", with_drafts=False).blocks[0]
    first, second = fp4(2, 512, 256), fp4(2, 256, 256, low)
    moe = dataclasses.replace(block.moe, w1_w3=first, w2=second)
    packed = pack_block(like_a_card(form), OFFICIAL, dataclasses.replace(block, moe=moe), 1)
    assert (held(first, second) == [0] * 4) == freed == (packed > 0)
    assert all(held(first, second)) != freed
    if freed:
        assert kept_fp4(second.codes, second.scale, form) is not None
        other = next(f for f in (Decoded.FP4_BF16, Decoded.FP4_E4M3) if f is not form)
        with pytest.raises(UnsupportedError, match="keep_stored"):
            kept_fp4(second.codes, second.scale, other)


def test_freed_experts_move_as_they_are_packed() -> None:
    """A slot's packed bytes are whole by themselves: they arrive as if packed there."""
    block = load_fast(resolve_model("golden"), "official", with_drafts=False).blocks[0]
    ranks = LayerExperts.__new__(LayerExperts)
    sides = []
    for _ in range(2):
        weights = fp4(2, 512, 256), fp4(2, 256, 256)
        want = [pack_fp4(w.codes, w.scale, Decoded.FP4_BF16) for w in weights]
        moe = dataclasses.replace(block.moe, w1_w3=weights[0], w2=weights[1], ranks=ranks)
        made = dataclasses.replace(block, moe=moe)
        assert pack_block(like_a_card(), OFFICIAL, made, 1) and held(*weights) == [0] * 4
        layer = _layer(moe)
        assert layer is not None
        sides.append((layer, want))
    (here, _), (there, want) = sides
    _unpack(_pack(there.parts, 1), here.parts, 0)
    here.derived(0)
    for at, form in enumerate(want):
        assert torch.equal(here.parts[2 * at][0], form.data[1])
        assert torch.equal(here.parts[2 * at + 1][0], form.row_scale[1])


def test_nothing_is_freed_on_a_cpu() -> None:
    model = load_fast(resolve_model("golden"), "official")
    config = model.config
    blocks = [*model.blocks, *(model.draft.blocks if model.draft is not None else ())]
    assert sum(pack_block(model.ops, model.numerics, b, config.o_groups) for b in blocks) == 0
