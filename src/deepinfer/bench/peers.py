"""Published libraries beside our kernels: their own formats at the model's dimensions.

A peer is timed on inputs that it likes best, prepared outside the timed region: a mark to beat, not
a candidate. Libraries that compute an op in our formats are adapters in the dispatch table
(`kernels/*/vendor.py`) and are timed like every other implementation.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from typing import Any, Final, Literal

import torch
from torch import Tensor

from deepinfer.bench.points import Member, Shape, Work
from deepinfer.bench.timing import Call, num_sets
from deepinfer.kernels.hyper import reference as hyper
from deepinfer.kernels.libraries import is_usable
from deepinfer.kernels.linear import DenseWeight

__all__ = ["list_peers"]

_CACHE_BYTES: Final = 12 << 30
_DENSE: Final = {
    "dense wq_a and wkv": (1792, 5120),
    "dense wq_b": (32768, 1280),
    "dense wo_b": (5120, 8192),
    "dense shared gate and up": (4608, 5120),
    "dense shared down": (5120, 2304),
}
_WO_A: Final = (8, 1024, 4096)
_EXPERTS: Final = {"experts gate and up": (4608, 5120), "experts down": (5120, 2304)}
_LOCAL: Final = 48
_TOKENS: Final = (1, 32, 192, 384, 4096)
_PAIRS: Final = (192, 384, 768, 1152, 2304, 24576)
_HEADS, _DIM = 64, 512
_CHECKED: Final = 32  # rows that are compared


def list_peers(shape: Shape, arch: str) -> list[Member]:
    """Return the peers whose library is here, for the real shapes only."""
    if shape != "real" or not arch.startswith("sm"):
        return []
    found: list[Member] = []
    for task, (n, k) in _DENSE.items():
        for rows in _TOKENS:
            found += _dense_peers(task, rows, n, k, arch)
    for rows in _TOKENS:
        found += _grouped_peers(rows, arch)
    for task, (n, k) in _EXPERTS.items():
        for rows in _PAIRS:
            found += _expert_peers(task, rows, n, k, arch)
    found += _attention_peers(arch)
    for rows in (32, 768):
        note = "any order, any choice among ties"
        topk = partial(_torch_topk, rows)
        found.append(_peer("top-512", rows, "torch.topk bf16", topk, note=note))
    if arch == "sm90" and is_usable("deep_gemm"):
        note = "FP8 keys, read three times: its entries take two of the six rows"
        logits = _deep_gemm_logits
        found.append(_peer("index scores", 768, "DeepGEMM paged FP8", logits, "fp8", note))
    return found + _tile_peers(arch)


def _peer(
    task: str,
    rows: int,
    name: str,
    build: Callable[[torch.device], Work],
    math: Literal["bf16", "fp8"] = "bf16",
    note: str = "",
) -> Member:
    return Member(task=task, rows=rows, name=name, build=build, math=math, note=note)


# Inputs


def _normal(device: torch.device, *shape: int) -> Tensor:
    return torch.randn(shape, device=device, dtype=torch.bfloat16)


def _fp8(device: torch.device, *shape: int) -> Tensor:
    out = torch.empty(shape, dtype=torch.float8_e4m3fn, device=device)
    flat = out.view(-1)
    for part in flat.split(1 << 27):  # type: ignore[no-untyped-call]
        part.copy_(torch.randn(part.numel(), device=device, dtype=torch.bfloat16))
    return out


def _scale(device: torch.device, *shape: int) -> Tensor:
    return torch.rand(shape, device=device) * 0.02 + 0.01


def _sets(size: int, make: Callable[[], Any]) -> list[Any]:
    return [make() for _ in range(num_sets(size, _CACHE_BYTES))]


def _relative(got: Tensor, want: Tensor) -> float:
    return float((got.float() - want.float()).norm() / want.float().norm())


def _work(
    sets: Sequence[Any],
    call: Callable[[Any], object],
    flops: float,
    moved: float,
    check: Callable[[], float | None] = lambda: None,
) -> Work:
    def bound(at: Any) -> Call:
        return lambda: call(at)

    return Work(calls=[bound(at) for at in sets], flops=flops, bytes=moved, check=check)


# Linears


def _dense_peers(task: str, rows: int, n: int, k: int, arch: str) -> list[Member]:
    found = [
        _peer(task, rows, "cuBLAS bf16", partial(_mm, rows, n, k), note="a bf16 copy of the weight")
    ]
    if arch == "sm90" and rows in (32, 4096) and is_usable("deep_gemm"):
        build = partial(_deep_gemm_dense, rows, n, k)
        found.append(_peer(task, rows, "DeepGEMM FP8", build, "fp8", "128-wide scales"))
    if is_usable("humming"):
        build = partial(_humming, rows, n, k, 0, "bf16", False)
        found.append(_peer(task, rows, "Humming e4m3 w32", build, note="bf16 input, exact weights"))
    return found


def _mm(rows: int, n: int, k: int, device: torch.device) -> Work:
    def make() -> tuple[Tensor, Tensor, Tensor]:
        out = torch.empty(rows, n, device=device, dtype=torch.bfloat16)
        return _normal(device, rows, k), _normal(device, n, k), out

    sets = _sets(2 * n * k, make)
    moved = 2.0 * (rows * k + n * k + rows * n)

    def call(s: Any) -> Tensor:
        return torch.mm(s[0], s[1].T, out=s[2])

    def check() -> float:
        x, weight, _ = sets[0]
        return _relative(call(sets[0])[:_CHECKED], x[:_CHECKED].float() @ weight.float().T)

    return _work(sets, call, 2.0 * rows * n * k, moved, check)


def _grouped_peers(rows: int, arch: str) -> list[Member]:
    task = "dense wo_a"
    found = [_peer(task, rows, "cuBLAS bf16", partial(_bmm, rows), note="a bf16 copy, one bmm")]
    if arch == "sm90" and rows in (32, 4096) and is_usable("deep_gemm"):
        build = partial(_deep_gemm_masked, rows)
        found.append(_peer(task, rows, "DeepGEMM FP8", build, "fp8", "128-wide scales, masked"))
    return found


def _bmm(rows: int, device: torch.device) -> Work:
    groups, n, k = _WO_A

    def make() -> tuple[Tensor, Tensor, Tensor]:
        out = torch.empty(groups, rows, n, device=device, dtype=torch.bfloat16)
        return _normal(device, groups, rows, k), _normal(device, groups, n, k), out

    sets = _sets(2 * groups * n * k, make)
    moved = 2.0 * groups * (rows * k + n * k + rows * n)
    flops = 2.0 * groups * rows * n * k

    def call(s: Any) -> Tensor:
        return torch.bmm(s[0], s[1].transpose(1, 2), out=s[2])

    def check() -> float:
        x, weight, _ = sets[0]
        part = x[:, :_CHECKED].float() @ weight.float().transpose(1, 2)
        return _relative(call(sets[0])[:, :_CHECKED], part)

    return _work(sets, call, flops, moved, check)


def _as_torch(x: Any) -> Tensor:
    return x if isinstance(x, Tensor) else torch.utils.dlpack.from_dlpack(x)


def _input_scale(device: torch.device, *shape: int) -> Tensor:
    layout = import_module("deep_gemm.utils.layout")
    return _as_torch(layout.get_mn_major_tma_aligned_tensor(_scale(device, *shape)))


def _wide_product(a: Tensor, sa: Tensor, b: Tensor, sb: Tensor, rows: int) -> Tensor:
    """Multiply some rows in fp32, scales of 128."""
    left = a[:rows].float() * sa[:rows].repeat_interleave(128, 1)
    right = b.float() * sb.repeat_interleave(128, 0).repeat_interleave(128, 1)
    return left @ right.T


def _deep_gemm_dense(rows: int, n: int, k: int, device: torch.device) -> Work:
    library = import_module("deep_gemm")

    def make() -> tuple[Any, Any, Tensor]:
        a = _fp8(device, rows, k), _input_scale(device, rows, k // 128)
        b = _fp8(device, n, k), _scale(device, n // 128, k // 128)
        return a, b, torch.empty(rows, n, device=device, dtype=torch.bfloat16)

    sets = _sets(n * k, make)

    def call(s: Any) -> None:
        library.fp8_gemm_nt(s[0], s[1], s[2], disable_ue8m0_cast=True)

    def check() -> float:
        (a, sa), (b, sb), out = sets[0]
        call(sets[0])
        return _relative(out[:_CHECKED], _wide_product(a, sa, b, sb, _CHECKED))

    moved = float(n * k + rows * k + 2 * rows * n)
    return _work(sets, call, 2.0 * rows * n * k, moved, check)


def _deep_gemm_masked(rows: int, device: torch.device) -> Work:
    library = import_module("deep_gemm")
    groups, n, k = _WO_A
    padded = -(-rows // 64) * 64

    def make() -> tuple[Any, Any, Tensor, Tensor]:
        a = _fp8(device, groups, padded, k), _input_scale(device, groups, padded, k // 128)
        b = _fp8(device, groups, n, k), _scale(device, groups, n // 128, k // 128)
        out = torch.empty(groups, padded, n, device=device, dtype=torch.bfloat16)
        return a, b, out, torch.full((groups,), rows, device=device, dtype=torch.int32)

    sets = _sets(groups * n * k, make)

    def call(s: Any) -> None:
        library.fp8_m_grouped_gemm_nt_masked(*s, rows, disable_ue8m0_cast=True)

    def check() -> float:
        (a, sa), (b, sb), out, _ = sets[0]
        call(sets[0])
        return _relative(out[0, :_CHECKED], _wide_product(a[0], sa[0], b[0], sb[0], _CHECKED))

    moved = float(groups * (n * k + rows * k + 2 * rows * n))
    return _work(sets, call, 2.0 * groups * rows * n * k, moved, check)


# Experts


def _expert_peers(task: str, rows: int, n: int, k: int, arch: str) -> list[Member]:
    found = []
    if arch == "sm90" and is_usable("humming"):
        for kind, note in (("bf16", "W4A16, exact"), ("fp8", "W4A8, rows quantized before")):
            name = "Humming W4A16" if kind == "bf16" else "Humming W4A8"
            build = partial(_humming, rows, n, k, _LOCAL, kind, True)
            found.append(_peer(task, rows, name, build, "bf16" if kind == "bf16" else "fp8", note))
    if arch == "sm90" and rows in (768, 24576):
        build = partial(_grouped_mm, rows, n, k)
        found.append(_peer(task, rows, "torch grouped_mm bf16", build, note="bf16 weights"))
        if is_usable("deep_gemm"):
            build = partial(_deep_gemm_contiguous, rows, n, k)
            found.append(_peer(task, rows, "DeepGEMM FP8", build, "fp8", "FP8 weights"))
    return found


def _counts(rows: int) -> list[int]:
    generator = torch.Generator().manual_seed(7 + rows)
    owners = torch.randint(0, _LOCAL, (rows,), generator=generator)
    return [int(c) for c in torch.bincount(owners, minlength=_LOCAL)]


def _grouped_mm(rows: int, n: int, k: int, device: torch.device) -> Work:
    counts = _counts(rows)
    ends = torch.tensor(counts, device=device).cumsum(0).int()
    weight, x = _normal(device, _LOCAL, n, k), _normal(device, rows, k)
    moved = 2.0 * (sum(c > 0 for c in counts) * n * k + rows * (k + n))
    part = slice(0, min(counts[0], _CHECKED))

    def call(_: object) -> Tensor:
        found: Tensor = torch._grouped_mm(
            x, weight.transpose(1, 2), offs=ends, out_dtype=torch.bfloat16
        )
        return found

    def check() -> float:
        return _relative(call(None)[part], x[part].float() @ weight[0].float().T)

    return _work([None], call, 2.0 * rows * n * k, moved, check)


def _deep_gemm_contiguous(rows: int, n: int, k: int, device: torch.device) -> Work:
    library = import_module("deep_gemm")
    counts = _counts(rows)
    align = int(library.get_mk_alignment_for_contiguous_layout())
    owners: list[int] = []
    for expert, count in enumerate(counts):
        owners += [expert] * count + [-1] * (-count % align)
    padded = len(owners)
    a = _fp8(device, padded, k), _input_scale(device, padded, k // 128)
    weight = _fp8(device, _LOCAL, n, k), _scale(device, _LOCAL, n // 128, k // 128)
    out = torch.empty(padded, n, device=device, dtype=torch.bfloat16)
    layout = torch.tensor(owners, device=device, dtype=torch.int32)
    moved = float(sum(c > 0 for c in counts) * n * k + rows * (k + 2 * n))
    part = min(counts[0], _CHECKED)

    def call(_: object) -> None:
        library.m_grouped_fp8_gemm_nt_contiguous(a, weight, out, layout, disable_ue8m0_cast=True)

    def check() -> float:
        call(None)
        return _relative(out[:part], _wide_product(*a, weight[0][0], weight[1][0], part))

    return _work([None], call, 2.0 * rows * n * k, moved, check)


def _humming(
    rows: int, n: int, k: int, experts: int, kind: str, fp4: bool, device: torch.device
) -> Work:
    """Random weights in the checkpoint's format, laid out by the library."""
    ops, tune = import_module("humming.ops"), import_module("humming.tune")
    quantize = import_module("humming.forward").may_quant_input
    layers = import_module("humming.layer")
    fmt: dict[str, object] = (
        {"quant_method": "mxfp4"}
        if fp4
        else {"dtype": "float8e4m3", "group_size": 32, "scale_dtype": "float8e8m0"}
    )
    with device:
        layer = layers.HummingLayer(
            shape_n=n,
            shape_k=k,
            weight_config=fmt,
            input_config=None if kind == "bf16" else {"dtype": "float8e4m3"},
            num_experts=experts,
            torch_dtype=torch.bfloat16,
        )
    layer = layer.to(device)
    codes, scale = layer.weight.data, layer.weight_scale.data
    if fp4:
        codes.view(torch.uint8).random_(0, 256)
    else:
        values = _fp8(device, codes.numel() * codes.element_size())
        codes.copy_(values.view(codes.dtype).view(codes.shape))
    scale.view(torch.uint8).random_(118, 124)
    raw = codes.view(torch.uint8).clone(), scale.view(torch.uint8).clone()
    layer.transform()
    names = ("weight", "weight_scale", "weight_scale_2")
    first = {name: getattr(layer, name, None) for name in names}
    size = sum(t.numel() * t.element_size() for t in first.values() if t is not None)
    copies = _sets(
        size,
        lambda: {name: None if t is None else t.detach().clone() for name, t in first.items()},
    )
    layout = "grouped_contiguous" if experts else "dense"
    config = layer.humming_config
    tuning = json.dumps(tune.get_heuristics_config(config, shape_m=rows, gemm_type=layout))
    x = _normal(device, rows, k)
    inputs, input_scale = quantize(config, x)
    out = torch.empty(rows, n, device=device, dtype=torch.bfloat16)
    counts = _counts(rows) if experts else [rows]
    bounds = None
    if experts:
        bounds = torch.tensor([0, *counts], device=device).cumsum(0)

    def call(at: dict[str, Tensor | None]) -> None:
        ops.humming_gemm(
            layer_config=config.to_str(),
            compute_config=json.dumps({"gemm_type": layout}),
            tuning_config=tuning,
            inputs=inputs,
            input_scale=input_scale,
            outputs=out,
            expert_layout=bounds,
            locks=layer.locks,
            **at,
        )

    def check() -> float | None:
        part = min(counts[0], 16)
        if not part:
            return None
        out.fill_(float("nan"))
        call(copies[0])
        factor = torch.exp2(raw[1].reshape(-1, n, k // 32)[0].float() - 127.0)
        if fp4:
            packed = raw[0].reshape(-1, n, k // 2)[0]
            grid = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], device=device)
            both = torch.stack((packed & 15, packed >> 4), -1).reshape(n, k).long()
            values = grid[both & 7] * torch.where(both > 7, -1.0, 1.0)
        else:
            values = raw[0].reshape(-1, n, k)[0].view(torch.float8_e4m3fn).float()
        right = values * factor.repeat_interleave(32, 1)
        return _relative(out[:part], x[:part].float() @ right.T)

    hit = sum(c > 0 for c in counts)
    weight_bytes = n * k * ((0.5 if fp4 else 1.0) + 1 / 32)
    moved = hit * weight_bytes + rows * ((2 if kind == "bf16" else 1) * k + 2 * n)
    return _work(copies, call, 2.0 * rows * n * k, moved, check)


# Attention, index scores, selection


def _attention_peers(arch: str) -> list[Member]:
    if arch != "sm90" or not is_usable("flash_mla"):
        return []
    note = "584-byte rows"
    found = [
        _peer("attention decode", rows, "FlashMLA", partial(_flash_decode, rows), note=note)
        for rows in (32, 192, 768)
    ]
    note = "bf16 rows, gathered once before"
    return [*found, _peer("attention prefill", 4096, "FlashMLA", _flash_prefill, note=note)]


_PAGE, _ROW = 64, 584
_PAGE_BYTES: Final = -(-_PAGE * _ROW // 576) * 576


def _flash_pool(blocks: int, device: torch.device) -> Tensor:
    raw = torch.zeros(blocks, _PAGE_BYTES, device=device, dtype=torch.uint8)
    for part in raw.split(4096):  # type: ignore[no-untyped-call]
        data = part[:, : _PAGE * 576].view(-1, _PAGE, 576)
        count = data.shape[0]
        data[..., :448] = _fp8(device, count, _PAGE, 448).view(torch.uint8)
        data[..., 448:] = _normal(device, count, _PAGE, 64).view(torch.uint8)
        scales = part[:, _PAGE * 576 : _PAGE * _ROW].view(-1, _PAGE, 8)
        scales[..., :7] = torch.randint(
            125, 129, (count, _PAGE, 7), device=device, dtype=torch.uint8
        )
    return raw


def _flash_rows(raw: Tensor, idx: Tensor) -> Tensor:
    block, place = idx // _PAGE, idx % _PAGE
    byte = torch.arange(576, device=raw.device)
    row = raw[block[:, None], place[:, None] * 576 + byte]
    at = _PAGE * 576 + place[:, None] * 8 + byte[:7]
    factor = torch.exp2(raw[block[:, None], at].float() - 127.0).repeat_interleave(64, 1)
    plain = row[:, :448].contiguous().view(torch.float8_e4m3fn).float() * factor
    return torch.cat([plain, row[:, 448:].contiguous().view(torch.bfloat16).float()], 1)


def _attend(q: Tensor, kv: Tensor, sink: Tensor) -> Tensor:
    scores = q.float() @ kv.T * _DIM**-0.5
    return torch.softmax(torch.cat([scores, sink[:, None]], 1), 1)[:, :-1] @ kv


def _flash_decode(rows: int, device: torch.device) -> Work:
    library = import_module("flash_mla")
    pools = {512: _flash_pool(16384, device), 128: _flash_pool(2048, device)}
    views = {
        count: raw[:, : _PAGE * _ROW].view(torch.float8_e4m3fn).view(-1, _PAGE, 1, _ROW)
        for count, raw in pools.items()
    }
    sink = torch.randn(_HEADS, device=device)
    moved = rows * (640 * _ROW + _HEADS * _DIM * 4)

    def make() -> tuple[Tensor, Tensor, Tensor]:
        places = [
            torch.randint(
                0, raw.shape[0] * _PAGE, (rows, 1, count), device=device, dtype=torch.int32
            )
            for count, raw in pools.items()
        ]
        return _normal(device, rows, 1, _HEADS, _DIM), places[0], places[1]

    sets = _sets(moved, make)[:20]
    meta = library.get_mla_metadata()[0]

    def call(s: Any) -> Tensor:
        out: Tensor = library.flash_mla_with_kvcache(
            s[0],
            views[512],
            None,
            None,
            _DIM,
            meta,
            None,
            softmax_scale=_DIM**-0.5,
            is_fp8_kvcache=True,
            indices=s[1],
            attn_sink=sink,
            extra_k_cache=views[128],
            extra_indices_in_kvcache=s[2],
        )[0]
        return out

    def check() -> float:
        q, main, window = sets[0]
        kv = torch.cat(
            [
                _flash_rows(pools[512], main[0, 0].long()),
                _flash_rows(pools[128], window[0, 0].long()),
            ]
        )
        return _relative(call(sets[0])[0, 0], _attend(q[0, 0], kv, sink))

    return _work(sets, call, 4.0 * _HEADS * 640 * _DIM * rows, moved, check)


def _flash_prefill(device: torch.device) -> Work:
    library = import_module("flash_mla")
    rows, pool, count = 4096, 65536, 640
    kv = _normal(device, pool, 1, _DIM)
    sink = torch.randn(_HEADS, device=device)

    def make() -> tuple[Tensor, Tensor]:
        at = torch.randint(0, pool, (rows, 1, count), device=device, dtype=torch.int32)
        return _normal(device, rows, _HEADS, _DIM), at

    sets = [make() for _ in range(2)]

    def call(s: Any) -> Tensor:
        out: Tensor = library.flash_mla_sparse_fwd(
            s[0], kv, s[1], _DIM**-0.5, d_v=_DIM, attn_sink=sink
        )[0]
        return out

    def check() -> float:
        q, at = sets[0]
        return _relative(call(sets[0])[0], _attend(q[0], kv[at[0, 0].long(), 0].float(), sink))

    moved = float(rows * _HEADS * _DIM * 4 + pool * _DIM * 2)
    return _work(sets, call, 4.0 * _HEADS * count * _DIM * rows, moved, check)


def _torch_topk(rows: int, device: torch.device) -> Work:
    size = 131072
    sets = _sets(2 * rows * size, lambda: _normal(device, rows, size))
    moved = float(rows * (2 * size + 512 * 10))

    def call(x: Tensor) -> Tensor:
        return torch.topk(x, 512, dim=1, sorted=False).values

    def check() -> float:
        part = sets[0][:_CHECKED]
        right = part.float().sort(dim=1, descending=True).values[:, :512]
        return _relative(call(part).float().sort(dim=1, descending=True).values, right)

    return _work(sets, call, 0.0, moved, check)


def _deep_gemm_logits(device: torch.device) -> Work:
    """128 requests of six rows over 65,536 keys each, as three entries of two rows."""
    library = import_module("deep_gemm")
    requests, keys, heads, dim, page = 128, 65536, 32, 128, 64
    blocks = requests * keys // page
    pool = torch.empty(blocks, page * (dim + 4), device=device, dtype=torch.uint8)
    for part in pool.split(4096):  # type: ignore[no-untyped-call]
        part[:, : page * dim] = _fp8(device, part.shape[0], page * dim).view(torch.uint8)
        part[:, page * dim :] = _scale(device, part.shape[0], page).view(torch.uint8)
    keys_view = pool.view(blocks, page, 1, dim + 4)
    table = torch.randperm(blocks, device=device).int().view(requests, -1)
    table = table.repeat_interleave(3, 0).contiguous()
    q = _fp8(device, 3 * requests, 2, heads, dim)
    weight = torch.randn(6 * requests, heads, device=device)
    shapes = ((3 * requests, 2), (3 * requests,))
    for shape in shapes:  # releases differ in what they take
        lengths = torch.full(shape, keys, device=device, dtype=torch.int32)
        try:
            plan = library.get_paged_mqa_logits_metadata(lengths, page, library.get_num_sms())
            library.fp8_paged_mqa_logits(
                q, keys_view, weight, lengths, table, plan, keys, clean_logits=False
            )
            torch.cuda.synchronize()
            break
        except Exception:
            if shape is shapes[-1]:
                raise

    def call(_: object) -> Any:
        return library.fp8_paged_mqa_logits(
            q, keys_view, weight, lengths, table, plan, keys, clean_logits=False
        )

    def check() -> float:
        out = _as_torch(call(None))[0, :256]
        part = pool[table[0, : 256 // page].long()]
        key = part[:, : page * dim].contiguous().view(torch.float8_e4m3fn).view(256, dim).float()
        factor = part[:, page * dim :].contiguous().view(torch.float32).view(256)
        scores = (q[0, 0].float() @ key.T).relu() * weight[0][:, None]
        return _relative(out, scores.sum(0) * factor)

    rows = 6 * requests
    moved = float(requests * keys * (dim + 4) + rows * keys * 4)
    return _work([None], call, 2.0 * rows * heads * dim * keys, moved, check)


# TileKernels


def _tile_peers(arch: str) -> list[Member]:
    if arch != "sm90" or not is_usable("tile_kernels"):
        return []
    found = []
    for rows in (32, 512, 4096):
        if is_usable("deep_gemm"):
            build = partial(_tile_site, rows)
            note = "three launches, tf32 products, collapses with the site's own mix"
            found.append(_peer("hyper site", rows, "TileKernels + DeepGEMM", build, note=note))
        build = partial(_tile_norm, rows)
        found.append(_peer("rms_norm: hidden", rows, "TileKernels", build))
    return found


def _tile_site(rows: int, device: torch.device) -> Work:
    mhc, library = import_module("tile_kernels.mhc"), import_module("deep_gemm")
    streams, dim = 4, 5120
    splits = 4 if rows >= 4096 else 16
    moved = rows * (2 * streams + 3) * dim * 2

    def make() -> dict[str, Tensor]:
        return {
            "streams": _normal(device, rows, streams, dim),
            "fn": torch.randn(24, streams * dim, device=device) * 0.01,
            "product": torch.empty(splits, rows, 24, device=device),
            "squares": torch.empty(splits, rows, device=device),
            "scale": torch.rand(3, device=device),
            "base": torch.randn(24, device=device),
            "post": torch.rand(rows, streams, device=device),
            "comb": torch.rand(rows, streams * streams, device=device),
            "input": torch.empty(rows, dim, device=device, dtype=torch.bfloat16),
            "y": _normal(device, rows, dim),
            "out": torch.empty(rows, streams, dim, device=device, dtype=torch.bfloat16),
        }

    sets = _sets(moved, make)

    def call(s: dict[str, Tensor]) -> None:
        library.tf32_hc_prenorm_gemm(
            s["streams"].flatten(1), s["fn"], s["product"], s["squares"], num_splits=splits
        )
        mhc.mhc_pre_big_fuse_fwd(
            s["product"], s["squares"], s["scale"], s["base"], s["streams"], s["post"], s["comb"],
            s["input"], 1e-6, 1e-6, 1e-6, 2.0, 20, n_splits=splits,
        )  # fmt: skip
        mhc.mhc_post_fwd(
            s["y"][None],
            s["streams"][None],
            s["post"].view(1, rows, streams, 1),
            s["comb"].view(1, rows, streams, streams),
            s["out"][None],
        )

    def check() -> float:
        s = sets[0]
        call(s)
        h, y = s["streams"][:_CHECKED].float(), s["y"][:_CHECKED].float()
        fn = DenseWeight(s["fn"], s["fn"])
        pre, post, comb = hyper.hyper_mix(h, fn, s["scale"], s["base"], 1e-6, 1e-6, 20)
        return max(
            _relative(s["input"][:_CHECKED], hyper.hyper_collapse(h, pre)),
            _relative(s["out"][:_CHECKED], hyper.hyper_expand(h, y, post, comb)),
        )

    return _work(sets, call, 2.0 * rows * 24 * streams * dim, float(moved), check)


def _tile_norm(rows: int, device: torch.device) -> Work:
    quant = import_module("tile_kernels.quant")
    weight = _normal(device, 5120)
    sets = _sets(rows * 5120 * 4, lambda: _normal(device, rows, 5120))
    moved = float(rows * 5120 * 4)

    def check() -> float:
        found = quant.norm_forward(sets[0], weight, 1e-20)
        found = found if isinstance(found, Tensor) else found[0]
        wide = sets[0].float()
        right = wide * wide.square().mean(1, keepdim=True).rsqrt() * weight.float()
        return _relative(found, right)

    return _work(sets, lambda x: quant.norm_forward(x, weight, 1e-20), 0.0, moved, check)
