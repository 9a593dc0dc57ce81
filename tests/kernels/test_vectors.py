"""Recorded and published values: golden unit vectors, check vectors of the specifications."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from deepinfer.config import ModelConfig
from deepinfer.config.engram import engram_tables
from deepinfer.config.load import load_model_config, resolve_model
from deepinfer.kernels.attention import sparse_attention
from deepinfer.kernels.engram import engram_hash
from deepinfer.kernels.expert_linear import Fp4Weight, expert_linear
from deepinfer.kernels.hyper import cpu, hyper_mix, reference
from deepinfer.kernels.linear import DenseWeight, Fp8Weight, fp8_linear
from deepinfer.kernels.quantize import act4_e4, act4_e8, act8, pow2_ceil, round_trip
from deepinfer.kernels.rope import cos_sin
from deepinfer.kernels.rope.tables import compressed_inv_freq, window_inv_freq


@pytest.fixture(scope="module")
def units(golden_folder: Path) -> dict[str, Tensor]:
    return load_file(golden_folder / "units.safetensors")


@pytest.fixture(scope="module")
def real_config(real_config_file: Path) -> ModelConfig:
    return load_model_config(real_config_file.parent)


def raw(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


@pytest.mark.parametrize(
    ("quantizer", "fmt", "codes", "prefix"),
    [
        (act8, "act8", "fp8_values", "fp8"),
        (act4_e8, "act4_e8", "fp4_block32_packed", "fp4_block32"),
        (act4_e4, "act4_e4", "fp4_block16_packed", "fp4_block16"),
    ],
)
def test_golden_quantizers(
    units: dict[str, Tensor], quantizer: object, fmt: str, codes: str, prefix: str
) -> None:
    assert callable(quantizer)
    got_codes, got_scales = quantizer(units["quant_input"])
    assert torch.equal(raw(got_codes), raw(units[codes]))
    assert torch.equal(raw(got_scales), raw(units[f"{prefix}_scales"]))
    back = round_trip(units["quant_input"], fmt)  # type: ignore[arg-type]
    assert torch.equal(raw(back), raw(units[f"{prefix}_dequant"]))


def test_golden_products(units: dict[str, Tensor]) -> None:
    fp8 = Fp8Weight(units["gemm_fp8_weight"], units["gemm_fp8_scale"].view(torch.uint8), None)
    assert torch.equal(fp8_linear(units["gemm_act"], fp8, True), units["gemm_fp8_out"])
    codes, scale = units["gemm_fp4_weight"], units["gemm_fp4_scale"]
    fp4 = Fp4Weight(codes.view(torch.uint8)[None], scale.view(torch.uint8)[None], None)
    rows = units["gemm_act"].shape[0]
    assert torch.equal(
        expert_linear(units["gemm_act"], fp4, [0, rows], True), units["gemm_fp4_out"]
    )


@pytest.mark.parametrize("cut", [16, 64, 80])
def test_golden_attention(units: dict[str, Tensor], cut: int) -> None:
    """However the slots are divided between window and selection."""
    q, kv, slots = units["attn_q"][0], units["attn_kv"][0].float(), units["attn_idx"][0].long()
    window, selected = slots[:, :cut].contiguous(), slots[:, cut:].contiguous()
    rest = (kv, selected) if cut < 80 else (None, None)
    scale = q.shape[-1] ** -0.5
    got = sparse_attention(q, kv, window, *rest, units["attn_sink"], scale, True)
    assert torch.equal(got, units["attn_out"][0])
    exact = sparse_attention(q.float(), kv, window, *rest, units["attn_sink"], scale, False)
    torch.testing.assert_close(exact, units["attn_out_fp32"][0], atol=1e-6, rtol=0.0)


def test_golden_hyper_mix(units: dict[str, Tensor]) -> None:
    """Projections are recorded: feed them through an identity, with the norm divided out."""
    mixes, scale, base = units["hc_mixes"], units["hc_scale"], units["hc_base"]
    raw_mix = (mixes[:, 8:] * scale[2] + base[8:]).view(-1, 4, 4)
    assert torch.equal(reference.sinkhorn(raw_mix, 20, 1e-6), units["hc_comb"])
    norm = mixes.square().mean(-1, keepdim=True).sqrt()
    assert mixes.shape[1] == 24
    for function in (hyper_mix, cpu.hyper_mix):
        for row in range(len(mixes)):
            fn = torch.eye(24) * norm[row]
            h = mixes[row].view(1, 4, 6)
            pre, post, comb = function(h, DenseWeight(fn, fn), scale, base, 1e-20, 1e-6, 20)
            torch.testing.assert_close(pre[0], units["hc_pre"][row], atol=1e-6, rtol=1e-5)
            torch.testing.assert_close(post[0], units["hc_post"][row], atol=1e-6, rtol=1e-5)
            torch.testing.assert_close(comb[0], units["hc_comb"][row], atol=1e-6, rtol=1e-5)


def test_sinkhorn_check_vector() -> None:
    given = torch.tensor([[[2.0, 0, 0, 0], [0, 1, 0, 0], [0, 0, 3, 0], [1, 0, 0, 0]]])
    want = [
        [0.5517, 0.1526, 0.0667, 0.2290],
        [0.0951, 0.5282, 0.0850, 0.2917],
        [0.0416, 0.0850, 0.7459, 0.1275],
        [0.3116, 0.2343, 0.1024, 0.3517],
    ]
    got = reference.sinkhorn(given, 20, 1e-6)[0]
    torch.testing.assert_close(got, torch.tensor(want), atol=6e-5, rtol=0.0)
    torch.testing.assert_close(got.sum(0), torch.ones(4), atol=1e-5, rtol=0.0)


def test_fp8_check_vector() -> None:
    x = (0.05 * torch.arange(32) - 0.77).bfloat16()
    codes, scale = act8(x)
    assert scale.tolist() == [118]
    assert codes.float()[:6].tolist() == [-384, -384, -352, -320, -288, -256]


def test_fp4_check_vectors() -> None:
    codes, scale = act4_e4((0.1 * torch.arange(16) - 0.75).bfloat16())
    assert scale.tolist() == [32]
    assert codes.numpy().tobytes().hex() == "ffeecd9a21546677"
    x = (0.05 * torch.arange(32) - 0.77).bfloat16()
    codes, scale = act4_e8(x)
    assert scale.tolist() == [125]
    assert (round_trip(x, "act4_e8")[:4] / 0.25).tolist() == [-3, -3, -3, -2]


def test_fp4_divides_by_its_scale() -> None:
    """The reciprocal of a scale that is no power of two would push this off the midpoint."""
    x = torch.zeros(16)
    x[0], x[1] = 6 * 0.029296875, 1.25 * 0.029296875
    codes, scale = act4_e4(x.bfloat16())
    assert scale.tolist() == [15]
    assert codes[0].item() == 7 | 2 << 4


@pytest.mark.parametrize(("quantizer", "byte"), [(act8, 127 - 22), (act4_e8, 1), (act4_e4, 1)])
def test_zeros_take_the_floor_scale(quantizer: object, byte: int) -> None:
    assert callable(quantizer)
    codes, scales = quantizer(torch.zeros(2, 32).bfloat16())
    assert set(scales.flatten().tolist()) == {byte}
    assert not raw(codes).any()


def test_pow2_ceil_for_every_bf16() -> None:
    bits = torch.arange(0x0080, 0x7E80, dtype=torch.int32)  # positive normal values
    x = (bits << 16).view(torch.float32)
    got = pow2_ceil(x)
    mantissa, exponent = np.frexp(x.numpy().astype(np.float64))
    want = np.ldexp(1.0, np.where(mantissa == 0.5, exponent - 1, exponent))
    assert np.array_equal(got.numpy(), want)


def test_real_fp8_sample() -> None:
    codes = torch.tensor(list(bytes.fromhex("d871f2797069f0e5") + bytes(24)), dtype=torch.uint8)
    scale = torch.tensor([[0x73]], dtype=torch.uint8)
    weight = Fp8Weight(codes[None].view(torch.float8_e4m3fn), scale, None)
    want = [-0.00390625, 0.03515625, -0.0390625, 0.0703125, 0.03125, 0.017578125, -0.03125]
    assert weight.dequantize()[0, :8].tolist() == [*want, -0.0126953125]


FREQUENCIES = {  # j -> compressed with YaRN, window
    0: (1.000000000e00, 1.000000000e00),
    1: (6.876560450e-01, 7.498942018e-01),
    14: (5.286856554e-03, 1.778279431e-02),
    15: (3.635538509e-03, 1.333521493e-02),
    16: (2.265624935e-03, 9.999999776e-03),
    20: (2.969777852e-04, 3.162277862e-03),
    24: (1.953125320e-05, 1.000000047e-03),
    25: (5.372312444e-06, 7.498941850e-04),
    31: (5.680529398e-07, 1.333521504e-04),
}


def test_rope_tables_of_the_release(real_config: ModelConfig) -> None:
    compressed, window = compressed_inv_freq(real_config), window_inv_freq(real_config)
    assert compressed.shape == window.shape == (32,)
    for j, (stretched, plain) in FREQUENCIES.items():
        assert float(compressed[j]) == float(np.float32(stretched)), j
        assert float(window[j]) == float(np.float32(plain)), j


@pytest.mark.parametrize(
    ("position", "want"),
    [
        (127, [(0.232359, 0.972630), (0.999289, 0.037707), (1.000000, 0.000072)]),
        (65535, [(0.192344, 0.981328), (0.817993, 0.575228), (0.999307, 0.037219)]),
        (1000000, [(0.936752, -0.349994), (-0.097124, 0.995272), (0.842950, 0.537992)]),
    ],
)
def test_rope_angles_of_the_release(
    real_config: ModelConfig, position: int, want: list[tuple[float, float]]
) -> None:
    cos, sin = cos_sin(torch.tensor([position]), compressed_inv_freq(real_config))
    got = torch.stack([cos[0], sin[0]], 1)[[0, 20, 31]]
    torch.testing.assert_close(got, torch.tensor(want), atol=1e-6, rtol=0.0)


def test_rope_tables_of_the_golden_checkpoint(golden_folder: Path) -> None:
    config = load_model_config(resolve_model("golden"))
    static = load_file(golden_folder / "static.safetensors")
    names = [name for name in static if "freq" in name]
    assert len(names) == 2
    for name in names:  # recorded as angles at position 1: one ulp of freedom
        table = compressed_inv_freq(config) if "compress" in name else window_inv_freq(config)
        torch.testing.assert_close(static[name].float().flatten(), table, rtol=2e-7, atol=0.0)


def test_engram_hash_of_the_release(real_config: ModelConfig) -> None:
    """The published rows of a conversation's first tokens, in compressed ids."""
    ids = torch.tensor([0, 98615, 15844, 14, 1751, 3, 98616, 98634])
    padded = torch.cat([torch.full((3,), 2), ids])  # pad id 2 before the start
    ngrams = torch.stack([padded[3 - back : 11 - back] for back in range(4)], 1)
    tables = engram_tables(real_config)
    first, second = (
        engram_hash(
            ngrams,
            torch.from_numpy(tables.multipliers[layer]),
            torch.from_numpy(tables.primes[layer]),
            torch.from_numpy(tables.offsets[layer]),
        )
        for layer in range(2)
    )
    columns = [0, 1, 2, 8, 9, 16, 17, 23]
    assert first[0, columns].tolist() == [
        5702652, 24393184, 39183301, 131476717, 152385926, 257520185, 283540304, 380066193
    ]  # fmt: skip
    assert second[0, columns].tolist() == [
        14361964, 29977809, 32716444, 132225184, 150270452, 261362261, 279862797, 372375971
    ]  # fmt: skip
    assert first[1, columns].tolist() == [
        3695168, 27059552, 42236950, 138321737, 144335154, 267086655, 278689864, 371393845
    ]  # fmt: skip
    assert first[7, columns].tolist() == [
        6145177, 29200083, 42970516, 134618019, 159768824, 258454660, 281286821, 383476300
    ]  # fmt: skip
    assert second[7, columns].tolist() == [
        13564020, 18908159, 36913214, 138133144, 148397614, 265064945, 284672458, 370580572
    ]  # fmt: skip
