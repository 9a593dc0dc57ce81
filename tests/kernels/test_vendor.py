"""Adapters of published libraries, against stand-ins that do what the libraries' texts say.

No library runs here: what is held is that an adapter hands over the right layouts and gives back
what the op's definition gives. On a card `deepinfer bench kernels` compares the libraries
themselves with the reference.
"""

from __future__ import annotations

import importlib.metadata
import json
import sys
from collections.abc import Iterator
from importlib import import_module
from itertools import pairwise
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from deepinfer.device.base import Capability
from deepinfer.errors import UnsupportedError
from deepinfer.kernels import libraries
from deepinfer.kernels.attention import reference as attention
from deepinfer.kernels.cases import all_cases
from deepinfer.kernels.engram import reference as engram
from deepinfer.kernels.expert_linear import Fp4Weight
from deepinfer.kernels.hyper import reference as hyper
from deepinfer.kernels.linear import Fp8Weight
from deepinfer.kernels.linear.reference import dequantize_blocks
from deepinfer.kernels.ops import choose
from deepinfer.kernels.quantize import reference as quantize
from deepinfer.kernels.table import TABLE

VENDORS = [
    (op, line)
    for op, lines in TABLE.items()
    for line in lines
    if not line.chosen and line.needs != "nvcc"
]


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Forget what was found about packages, before and after."""
    libraries.why_not.cache_clear()
    yield
    libraries.why_not.cache_clear()


def install(monkeypatch: pytest.MonkeyPatch, package: str, **modules: object) -> None:
    """Put a stand-in of a package in place, in the release that adapters are written for.

    modules  dotted name below the package ("" as `top`) -> what it holds
    """
    name, releases = next(iter(libraries.LIBRARIES[package].distributions.items()))
    held = {key.replace("__", "."): value for key, value in modules.items()}
    for path in ("top", *(key for key in held if key != "top")):
        module = ModuleType(package if path == "top" else f"{package}.{path}")
        module.__dict__.update(vars(held.get(path, SimpleNamespace())))
        module.__path__ = []  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, module.__name__, module)
    known = importlib.metadata.version
    monkeypatch.setattr(
        importlib.metadata, "version", lambda n: releases[0] if n == name else known(n)
    )
    monkeypatch.setattr(libraries, "find_spec", lambda n: object() if n == package else None)


def both(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every package pass: several stand-ins at once."""
    monkeypatch.setattr(libraries, "why_not", lambda package: "")


def close(mine: Tensor, want: Tensor, tolerance: float = 8e-3) -> None:
    assert mine.shape == want.shape and mine.dtype == want.dtype
    gap = (mine.double() - want.double()).norm()
    assert float(gap) <= tolerance * float(want.double().norm()), float(gap)


# The table


def test_no_library_is_chosen_and_none_is_imported_to_know() -> None:
    assert len(VENDORS) >= 13
    for op, line in VENDORS:
        assert line.needs in libraries.LIBRARIES and line.archs and line.why
        assert "cpu" not in line.archs
        for arch in line.archs:
            assert choose(op, Capability(name="", arch=arch, total_bytes=0)).chosen
    assert not {"tile_kernels", "deep_gemm", "humming", "flash_mla"} & set(sys.modules)


@pytest.mark.parametrize(("op", "line"), VENDORS, ids=lambda v: getattr(v, "name", v))
def test_an_absent_library_breaks_no_import_and_is_named(op: str, line: Any) -> None:
    function = getattr(import_module(f"deepinfer.kernels.{line.module}"), op)
    assert callable(function)
    if libraries.is_usable(line.needs):
        pytest.skip(f"{line.needs} is here")
    with pytest.raises(UnsupportedError, match=libraries.LIBRARIES[line.needs].advice):
        libraries.library(line.needs)


def test_another_release_counts_as_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "deep_gemm")
    assert libraries.is_usable("deep_gemm")
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.1.7")
    libraries.why_not.cache_clear()
    assert "sgl-deep-gemm 0.1.7" in libraries.why_not("deep_gemm")
    with pytest.raises(UnsupportedError, match=r"pip install sgl-deep-gemm==0\.1\.5"):
        libraries.library("deep_gemm")


def test_a_release_without_a_record_counts_as_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    install(monkeypatch, "humming")
    monkeypatch.setattr(importlib.metadata, "version", nothing)
    libraries.why_not.cache_clear()
    assert "without a record" in libraries.why_not("humming")
    monkeypatch.setattr(libraries, "find_spec", lambda name: object())
    assert libraries.why_not("json") == ""  # no pin: being there is enough


# FlashMLA


def flash_sparse(
    q: Tensor, kv: Tensor, indices: Tensor, sm_scale: float, d_v: int, attn_sink: Tensor
) -> tuple[Tensor, None, None]:
    assert q.dtype == kv.dtype == torch.bfloat16 and indices.dtype == torch.int32
    assert indices.shape[2] % 128 == 0 and d_v == 512 and q.is_contiguous()
    idx = indices[:, 0].long()
    out = attention.sparse_attention(
        q, kv[:, 0].float(), idx, None, None, attn_sink, sm_scale, True
    )
    empty = (idx < 0).all(1)
    return out.masked_fill(empty[:, None, None], float("nan")), None, None


@pytest.mark.parametrize("gathered", [False, True])
def test_flash_mla_reads_window_and_selection_as_one_list(
    monkeypatch: pytest.MonkeyPatch, gathered: bool
) -> None:
    from deepinfer.kernels.attention.vendor import sparse_attention

    install(monkeypatch, "flash_mla", top=SimpleNamespace(flash_mla_sparse_fwd=flash_sparse))
    q = torch.randn(3, 64, 512).bfloat16()
    sink = torch.randn(64)
    rows = (3, 40) if gathered else (50,)
    window = torch.randn(*rows, 512).bfloat16().float()
    main = torch.randn(*((3, 9) if gathered else (20,)), 512).bfloat16().float()
    window_idx = torch.randint(-1, 50, (3, 40))
    main_idx = torch.randint(-1, 20, (3, 9))
    window_idx[2], main_idx[2] = -1, -1
    arguments = (q, window, window_idx, main, main_idx, sink, 512**-0.5, True)
    want = attention.sparse_attention(*arguments)
    close(sparse_attention(*arguments), want)
    assert not sparse_attention(*arguments)[2].any()
    alone = (q, window, window_idx, None, None, sink, 512**-0.5, True)
    close(sparse_attention(*alone), attention.sparse_attention(*alone))


# TileKernels


def tile_mhc() -> SimpleNamespace:
    def reduce(product, squares, out_mul, sums, out, size, eps, splits):  # type: ignore[no-untyped-def]
        assert product.shape[0] == squares.shape[0] == splits and product.shape[2] == 1
        norm = torch.rsqrt(squares.sum(0) / size + eps)
        out.copy_(product.sum(0)[:, 0] * norm)

    def split(mixes, scale, base, pre, post, comb, post_gain, eps):  # type: ignore[no-untyped-def]
        m = pre.shape[1]
        gain = torch.cat([scale[0].expand(m), scale[1].expand(m), scale[2].expand(m * m)])
        raw = mixes * gain + base
        pre.copy_(raw[:, :m].sigmoid() + eps)
        post.copy_(raw[:, m : 2 * m].sigmoid() * post_gain)
        comb.copy_(raw[:, 2 * m :])

    def sinkhorn(raw, out, repeat, eps):  # type: ignore[no-untyped-def]
        out.copy_(hyper.sinkhorn(raw, repeat, eps))

    def apply(x, mix, out):  # type: ignore[no-untyped-def]
        out.copy_(hyper.hyper_collapse(x, mix))

    def post(x, residual, gain, comb):  # type: ignore[no-untyped-def]
        assert gain.shape[-1] == 1 and x.shape[0] == residual.shape[0] == 1
        return hyper.hyper_expand(residual[0], x[0], gain[0, ..., 0], comb[0]).unsqueeze(0)

    return SimpleNamespace(
        mhc_reduce_partials_and_rmsnorm_fwd=reduce,
        mhc_pre_split_mixes_fwd=split,
        mhc_sinkhorn_fwd=sinkhorn,
        mhc_pre_apply_mix_fwd=apply,
        mhc_post_fwd=post,
    )


def prenorm(a: Tensor, b: Tensor, d: Tensor, squares: Tensor, num_splits: int) -> None:
    d.zero_()
    squares.zero_()
    d[0], squares[1] = a.float() @ b.T, a.float().square().sum(1)
    assert d.shape[0] == num_splits


def test_tile_kernels_hyper_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    from deepinfer.kernels.hyper import vendor

    install(monkeypatch, "tile_kernels", mhc=tile_mhc())
    install(monkeypatch, "deep_gemm", top=SimpleNamespace(tf32_hc_prenorm_gemm=prenorm))
    both(monkeypatch)
    case = next(c for c in all_cases() if (c.op, c.name) == ("hyper_mix", "real"))
    h, fn, scale, base, norm_eps, hc_eps, iters = case.build(3, torch.Generator().manual_seed(1))
    arguments = (h, fn, scale, base, norm_eps, hc_eps, iters)
    for mine, want in zip(vendor.hyper_mix(*arguments), hyper.hyper_mix(*arguments), strict=True):
        close(mine, want, 1e-4)
    pre, post, comb = hyper.hyper_mix(*arguments)
    close(vendor.hyper_collapse(h, pre), hyper.hyper_collapse(h, pre))
    y = torch.randn(3, 5120).bfloat16()
    close(vendor.hyper_expand(h, y, post, comb), hyper.hyper_expand(h, y, post, comb))


def test_tile_kernels_routing(monkeypatch: pytest.MonkeyPatch) -> None:
    from deepinfer.kernels.router import reference
    from deepinfer.kernels.router.vendor import route

    def gate(logits, k, shared, num_shared, scaling, rank, bias):  # type: ignore[no-untyped-def]
        assert logits.dtype == torch.float32 and not shared and not num_shared
        scores = torch.nn.functional.softplus(logits).sqrt()
        chosen = (scores + bias).topk(k).indices
        weight = scores.gather(1, chosen)
        return chosen, weight / weight.sum(1, keepdim=True) * scaling

    install(monkeypatch, "tile_kernels", moe=SimpleNamespace(moe_topk_gate_forward=gate))
    case = next(c for c in all_cases() if (c.op, c.name) == ("route", "steep"))
    arguments = case.build(7, torch.Generator().manual_seed(2))
    chosen, weight = route(*arguments)  # type: ignore[arg-type]
    want = reference.route(*arguments)  # type: ignore[arg-type]
    assert torch.equal(chosen, want[0])
    close(weight, want[1], 1e-5)


@pytest.mark.parametrize("fmt", ["act8", "act4_e8", "act4_e4"])
def test_tile_kernels_rounding_leaves_its_input(monkeypatch: pytest.MonkeyPatch, fmt: str) -> None:
    from deepinfer.kernels.quantize.vendor import round_trip

    def cast(x, name, group, round_sf=False, use_e4m3_sf=False):  # type: ignore[no-untyped-def]
        assert x.ndim == 2 and x.stride(1) == 1 and round_sf != use_e4m3_sf
        form = {("e4m3", 32): "act8", ("e2m1", 32): "act4_e8", ("e2m1", 16): "act4_e4"}
        x.copy_(quantize.round_trip(x, form[name, group]))  # type: ignore[arg-type]

    install(monkeypatch, "tile_kernels", quant=SimpleNamespace(per_token_cast_and_cast_back=cast))
    x = torch.randn(3, 2, 128).bfloat16()
    kept = x.clone()
    assert torch.equal(round_trip(x, fmt), quantize.round_trip(x, fmt))  # type: ignore[arg-type]
    assert torch.equal(x, kept)
    odd = torch.randn(2, 96).bfloat16()
    assert torch.equal(round_trip(odd, fmt), quantize.round_trip(odd, fmt))  # type: ignore[arg-type]


@pytest.mark.parametrize("beside", [True, False])
def test_tile_kernels_swiglu(monkeypatch: pytest.MonkeyPatch, beside: bool) -> None:
    from deepinfer.kernels.expert_linear import reference
    from deepinfer.kernels.expert_linear.vendor import swiglu

    def forward(x, fmt, topk_weights=None, clamp_value=None):  # type: ignore[no-untyped-def]
        assert x.is_contiguous() and fmt == "bf16"
        gate, up = x.chunk(2, dim=1)
        return reference.swiglu(gate, up, clamp_value or 0.0, topk_weights)

    install(monkeypatch, "tile_kernels", quant=SimpleNamespace(swiglu_forward=forward))
    whole = torch.randn(5, 256).bfloat16() * 4
    gate, up = whole.chunk(2, dim=1)
    if not beside:
        gate, up = gate.clone(), up.clone()
    for limit, weight, rounds in ((10.0, torch.rand(5), False), (0.0, None, True)):
        want = reference.swiglu(gate, up, limit, weight, rounds)
        assert torch.equal(swiglu(gate, up, limit, weight, rounds), want)


def test_tile_kernels_engram_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    from deepinfer.kernels.engram.vendor import engram_gate

    def forward(x, kv, weight, eps, clamp, save_for_backward):  # type: ignore[no-untyped-def]
        assert clamp == 1e-6 and not save_for_backward and kv.ndim == 3
        return engram.engram_gate(x, kv.flatten(1), weight, eps), None, None, None, None

    install(monkeypatch, "tile_kernels", engram=SimpleNamespace(engram_gate_fwd=forward))
    case = next(c for c in all_cases() if (c.op, c.name) == ("engram_gate", "real"))
    arguments = case.build(2, torch.Generator().manual_seed(3))
    close(engram_gate(*arguments), engram.engram_gate(*arguments))  # type: ignore[arg-type]


# DeepGEMM


def test_deep_gemm_takes_weights_with_wide_scales_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from deepinfer.kernels.linear.deepgemm import fp8_linear

    def gemm(a, b, out, disable_ue8m0_cast):  # type: ignore[no-untyped-def]
        (x, sx), (w, sw) = a, b
        left = x.float() * sx.repeat_interleave(128, 1)
        right = w.float() * sw.repeat_interleave(128, 0).repeat_interleave(128, 1)
        out.copy_(left @ right.T)

    layout = SimpleNamespace(get_mn_major_tma_aligned_tensor=lambda x: x)
    install(
        monkeypatch,
        "deep_gemm",
        top=SimpleNamespace(fp8_gemm_nt=gemm),
        utils=SimpleNamespace(),
        utils__layout=layout,
    )
    codes = torch.randn(256, 256).to(torch.float8_e4m3fn)
    wide = torch.randint(120, 126, (2, 2), dtype=torch.uint8)
    scale = wide.repeat_interleave(4, 0).repeat_interleave(4, 1)
    x = torch.randn(5, 256).bfloat16()
    weight = Fp8Weight(codes, scale, None)
    want = (x.float() @ dequantize_blocks(codes, scale).T).bfloat16()
    close(fp8_linear(x, weight, True), want, 4e-2)
    assert torch.equal(fp8_linear(x, weight, True), fp8_linear(x, weight, True))
    narrow = scale.clone()
    narrow[0, 0] += 1
    with pytest.raises(UnsupportedError, match="32 wide"):
        fp8_linear(x, Fp8Weight(codes, narrow, None), True)
    with pytest.raises(UnsupportedError):
        fp8_linear(x, weight, False)


def test_deep_gemm_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    from deepinfer.kernels.index_score import reference
    from deepinfer.kernels.index_score.vendor import index_score

    def logits(q, kv, weights, begin, end, clean_logits):  # type: ignore[no-untyped-def]
        keys, factor = kv
        assert q.dtype == keys.dtype == torch.float8_e4m3fn and factor.shape == keys.shape[:1]
        assert int(begin.max()) == 0 and int(end.min()) == keys.shape[0]
        dots = torch.einsum("thd,sd->ths", q.float(), keys.float()).relu()
        return (dots * weights[:, :, None]).sum(1) * factor

    install(monkeypatch, "deep_gemm", top=SimpleNamespace(fp8_mqa_logits=logits))
    case = next(c for c in all_cases() if (c.op, c.name) == ("index_score", "rounded once"))
    q, weight, keys, rounding = case.build(4, torch.Generator().manual_seed(5))
    close(
        index_score(q, weight, keys, rounding),  # type: ignore[arg-type]
        reference.index_score(q, weight, keys, rounding),  # type: ignore[arg-type]
    )
    own = keys.expand(4, -1, -1)  # type: ignore[attr-defined]
    with pytest.raises(UnsupportedError):
        index_score(q, weight, own, rounding)  # type: ignore[arg-type]


# Humming


class HummingLayer:
    """Weights as the checkpoint stores them; `transform` only marks them."""

    made = 0

    def __init__(self, shape_n, shape_k, weight_config, input_config, num_experts, torch_dtype):  # type: ignore[no-untyped-def]
        HummingLayer.made += 1
        self.fp4 = weight_config.get("quant_method") == "mxfp4"
        assert input_config is None and torch_dtype == torch.bfloat16
        many = (num_experts,) if num_experts else ()
        width = shape_k // 2 if self.fp4 else shape_k
        self.weight = torch.nn.Parameter(
            torch.zeros(*many, shape_n, width // 4, dtype=torch.int32), requires_grad=False
        )
        self.weight_scale = torch.nn.Parameter(
            torch.zeros(*many, shape_n, shape_k // 32, dtype=torch.uint8), requires_grad=False
        )
        self.locks = None
        self.done = False
        self.humming_config = SimpleNamespace(shape_n=shape_n, to_str=lambda: "config")
        layers.append(self)

    def to(self, device: object) -> HummingLayer:
        return self

    def transform(self) -> None:
        self.done = True


layers: list[HummingLayer] = []


def humming_gemm(inputs, outputs, expert_layout, weight, weight_scale, **rest):  # type: ignore[no-untyped-def]
    assert inputs.dtype == torch.bfloat16 and inputs.is_contiguous()
    layer = next(x for x in layers if x.weight is weight)
    assert layer.done and rest["tuning_config"] == json.dumps({"rows": inputs.shape[0]})
    codes = weight.data.view(torch.uint8)
    if expert_layout is None:
        factor = torch.exp2(weight_scale.float() - 127.0).repeat_interleave(32, 1)
        dense = codes.view(torch.float8_e4m3fn).float() * factor
        outputs.copy_(inputs.float() @ dense.T)
        return
    held = Fp4Weight(codes, weight_scale.data, None)
    ends = expert_layout.tolist()
    for e, (begin, end) in enumerate(pairwise(ends)):
        outputs[begin:end] = inputs[begin:end].float() @ held.dequantize(e).T


@pytest.fixture
def humming(monkeypatch: pytest.MonkeyPatch) -> None:
    layers.clear()
    install(
        monkeypatch,
        "humming",
        layer=SimpleNamespace(HummingLayer=HummingLayer),
        ops=SimpleNamespace(humming_gemm=humming_gemm),
        tune=SimpleNamespace(
            get_heuristics_config=lambda config, shape_m, gemm_type: {"rows": shape_m}
        ),
    )


@pytest.mark.usefixtures("humming")
@pytest.mark.parametrize("op", ["expert_linear", "fp8_linear"])
def test_humming_gets_the_checkpoints_bytes_once(op: str) -> None:
    module, folder = (
        import_module(f"deepinfer.kernels.{'linear' if op == 'fp8_linear' else op}"),
        ("linear" if op == "fp8_linear" else op),
    )
    vendor = getattr(import_module(f"deepinfer.kernels.{folder}.vendor"), op)
    for case in all_cases():
        if case.op != op or case.large or "strict" in case.name or "ragged" in case.name:
            continue
        arguments = case.build(9, torch.Generator().manual_seed(6))
        before = HummingLayer.made
        mine = vendor(*arguments)
        close(mine, getattr(module, op)(*arguments))
        assert torch.equal(vendor(*arguments), mine) and HummingLayer.made == before + 1


@pytest.mark.usefixtures("humming")
def test_a_packed_copy_goes_with_its_weight() -> None:
    from deepinfer.kernels.linear import vendor

    vendor._packed.clear()
    x = torch.randn(2, 64).bfloat16()
    weight = Fp8Weight(
        torch.randn(32, 64).to(torch.float8_e4m3fn),
        torch.full((1, 2), 127, dtype=torch.uint8),
        None,
    )
    vendor.fp8_linear(x, weight, False)
    assert len(vendor._packed) == 1
    del weight
    assert not vendor._packed


# DeepSelect


def test_deep_select_keeps_the_ops_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    from deepinfer.kernels.topk import reference
    from deepinfer.kernels.topk.vendor import select_topk

    def topk(scores, count, end, indices_type, sorted_index, idx_oob_fill_value, **rest):  # type: ignore[no-untyped-def]
        assert scores.stride(0) % 8 == 0 and scores.stride(1) == 1 and end.dtype == torch.int32
        assert not rest["return_value"] and sorted_index and indices_type == torch.int64
        out = torch.full((scores.shape[0], count), idx_oob_fill_value, dtype=indices_type)
        for row, last in enumerate(end.tolist()):
            found = scores[row, :last].topk(min(count, last)).indices.sort().values
            out[row, : found.shape[0]] = found
        return None, out

    fake = SimpleNamespace(topk=topk, get_stride_requirement=lambda: (32, 32))
    install(monkeypatch, "deep_select", top=fake)
    scores = torch.randperm(5 * 61).float().view(5, 61)
    scores[1, ::2] = float("-inf")
    visible = torch.tensor([61, 61, 0, 3, 40])
    for count in (4, 16, 70):
        want = reference.select_topk(scores, visible, count)
        assert torch.equal(select_topk(scores, visible, count), want)
