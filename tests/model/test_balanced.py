"""What stands beside moved weights follows them."""

from __future__ import annotations

import torch

from deepinfer.kernels.expert_linear import Fp4Weight
from deepinfer.kernels.packed import Decoded, pack_fp4
from deepinfer.kernels.packed.kept import kept_fp4, repack_fp4
from deepinfer.model.fast.balanced import _kept_again


def weight(experts: int, outputs: int, inputs: int) -> Fp4Weight:
    codes = torch.randint(0, 256, (experts, outputs, inputs // 2), dtype=torch.uint8)
    scale = torch.randint(120, 126, (experts, outputs, inputs // 32), dtype=torch.uint8)
    made = Fp4Weight(codes, scale, None)
    dense = torch.stack([made.dequantize(e) for e in range(experts)])
    return Fp4Weight(codes, scale, dense)


def test_packed_and_dense_copies_follow_a_slot() -> None:
    held, other = weight(3, 256, 256), weight(1, 256, 256)
    kept = {d: kept_fp4(held.codes, held.scale, d) for d in (Decoded.FP4_BF16, Decoded.FP4_E4M3)}
    held.codes[1], held.scale[1] = other.codes[0], other.scale[0]
    _kept_again((held,))(1)
    assert held.dense is not None and other.dense is not None
    assert torch.equal(held.dense[1], other.dense[0])
    for decoded, packed in kept.items():
        want = pack_fp4(held.codes, held.scale, decoded)
        assert packed is not None and torch.equal(packed.data, want.data)
        assert torch.equal(packed.row_scale, want.row_scale)


def test_a_packed_form_that_no_longer_fits_is_given_up() -> None:
    held = weight(2, 256, 256)
    assert kept_fp4(held.codes, held.scale, Decoded.FP4_E4M3) is not None
    held.codes.fill_(0x11)
    held.scale[1, 0] = torch.arange(100, 108, dtype=torch.uint8) * 2 - 100
    repack_fp4(held.codes, held.scale, 1)
    assert kept_fp4(held.codes, held.scale, Decoded.FP4_E4M3) is None
    assert kept_fp4(held.codes, held.scale, Decoded.FP4_BF16) is not None
