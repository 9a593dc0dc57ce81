"""THE dispatch table: op -> implementations, the preferred first.

A line here is the whole integration: tests, benchmarks and `doctor` read it. `module` holds a
function of the op's name; it is imported only when chosen.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

__all__ = ["COPIES", "TABLE", "W4A8", "Implementation"]


@dataclass(frozen=True, slots=True)
class Implementation:
    """One way to compute an op.

    name       "reference", "cpu", "triton", ...
    module     dotted path below deepinfer.kernels
    archs      device architectures it runs on, () = any
    invariant  a row's bits do not depend on its batch
    why        one clause for `doctor`
    needs      package that must be installed, in a release that `libraries.py` knows; "" = none
    chosen     the engine may choose it; else it is timed by benchmarks and `why` says what differs
    """

    name: str
    module: str
    archs: tuple[str, ...] = ()
    invariant: bool = True
    why: str = "the definition, plain torch"
    needs: str = ""
    chosen: bool = True


_CARDS: Final = (
    "sm80", "sm86", "sm87", "sm89", "sm90", "sm100", "sm103", "sm110", "sm120", "sm121",
)  # fmt: skip


def _portable(folder: str, cpu: str = "") -> tuple[Implementation, ...]:
    """The reference, Triton on NVIDIA cards, and where `cpu` says why, a twin for the CPU."""
    triton = Implementation(
        "triton", f"{folder}.triton", _CARDS, why="one kernel for every card", needs="triton"
    )
    lines = (triton, Implementation("reference", f"{folder}.reference"))
    return (Implementation("cpu", f"{folder}.cpu", ("cpu",), why=cpu), *lines) if cpu else lines


_NUMPY: Final = "elementwise work in numpy: fewer and cheaper calls"
_BUFFERS: Final = "kept 16-row buffers, quantization by table"

_OWN: Final[Mapping[str, tuple[Implementation, ...]]] = {
    "rms_norm": _portable("rms_norm"),
    "cos_sin": _portable("rope"),
    "rotate_tail": _portable("rope"),
    "latent_entry": _portable("latent"),
    "latent_store": _portable("latent"),
    "entry_store": _portable("latent"),
    "round_trip": _portable("quantize", "rounding by table"),
    "fp8_linear": _portable("linear", _BUFFERS),
    "dense_linear": _portable("linear", _BUFFERS),
    "grouped_linear": _portable("linear", _BUFFERS),
    "expert_linear": _portable("expert_linear", _BUFFERS),
    "swiglu": _portable("expert_linear", _NUMPY),
    "routed_experts": _portable("routed_experts", "its ops in numpy"),
    "route": _portable("router", _NUMPY),
    "route_rounded": _portable("router"),
    "hyper_mix": _portable("hyper", _NUMPY),
    "hyper_collapse": _portable("hyper", _NUMPY),
    "hyper_expand": _portable("hyper"),
    "hyper_site": _portable("hyper_site"),
    "hyper_site_rounded": _portable("hyper_site"),
    "compress": _portable("compress"),
    "index_score": _portable("index_score", _NUMPY),
    "paged_index_score": _portable("paged_index"),
    "select_topk": _portable("topk", _NUMPY),
    "select_blocks": _portable("topk", _NUMPY),
    "block_mask": _portable("topk"),
    "sparse_attention": _portable("attention", "decode reads windows in place; sums in numpy"),
    "paged_attention": _portable("paged_attention"),
    "cache_store": _portable("cache_io", "rounding by table"),
    "cache_load": _portable("cache_io"),
    "engram_hash": _portable("engram"),
    "engram_lookup": _portable("engram"),
    "engram_gate": _portable("engram"),
}


def _hopper(
    module: str, why: str, name: str = "cuda", invariant: bool = True, chosen: bool = True
) -> Implementation:
    """CUDA C++ for SM90, built at its first use."""
    return Implementation(name, module, ("sm90",), invariant, why, needs="nvcc", chosen=chosen)


W4A8: Final = "cuda W4A8"
"""Expert products in e4m3: other numbers, so taken only where asked for."""

COPIES: Final = "cuda and cuBLAS"
"""Products of many rows on bf16 copies of FP8 weights: memory for speed, taken where asked for."""

_PACKED: Final = (
    "weights packed as tensor instructions read them; their K shared where rows are few"
)
_ROUTED: Final = "one launch: weights in registers, scores exchanged between blocks"
_COPIED: Final = _hopper(
    "linear.copied",
    "many rows on bf16 copies of the weights: numerics.dense_copies",
    name=COPIES,
    invariant=False,
    chosen=False,
)
_FIXED: Final = _hopper(
    "linear.sm90_fixed",
    "packed weights, their K shared as the weight says",
    name="cuda fixed",
)
_HOPPER: Final[Mapping[str, tuple[Implementation, ...]]] = {
    "dense_linear": (
        Implementation(
            "cublas", "linear.cublas", ("sm90",), False, "the head through cuBLAS", needs="triton"
        ),
    ),
    "fp8_linear": (_hopper("linear.sm90", _PACKED, invariant=False), _FIXED, _COPIED),
    "grouped_linear": (_hopper("linear.sm90", _PACKED, invariant=False), _FIXED, _COPIED),
    "expert_linear": (
        _hopper("expert_linear.sm90", "weights packed as tensor instructions read them, exact"),
        _hopper(
            "expert_linear.sm90_w4a8",
            "products in e4m3, a power of two per row",
            name=W4A8,
            chosen=False,
        ),
    ),
    "routed_experts": (
        _hopper("routed_experts.sm90", "packed weights, exact; one kernel between the products"),
        _hopper(
            "routed_experts.sm90_w4a8",
            "products in e4m3, a power of two per row: numerics.expert_products",
            name=W4A8,
            chosen=False,
        ),
    ),
    "paged_attention": (
        _hopper("paged_attention.sm90", "few rows split between blocks", invariant=False),
        _hopper(
            "paged_attention.sm90_whole",
            "entries decoded on the way, one block a row",
            name="cuda whole",
        ),
    ),
    "swiglu": (_hopper("expert_linear.gate", "bf16, eight values a thread"),),
    "route": (_hopper("router.sm90", _ROUTED),),
    "route_rounded": (_hopper("router.sm90", _ROUTED),),
    "rotate_tail": (_hopper("rope.sm90", "in place, tails alone or rounding behind"),),
    "round_trip": (_hopper("quantize.sm90", "ACT8 of bf16, eight values a thread"),),
    "hyper_mix": (_hopper("hyper.sm90", "a site's kernel with nothing to write"),),
    "hyper_site": (_hopper("hyper_site.sm90", "one launch, whole stretches of a token"),),
    "hyper_site_rounded": (_hopper("hyper_site.sm90", "one launch, whole stretches of a token"),),
    "paged_index_score": (
        _hopper("paged_index.sm90", "FP4 keys decoded into registers, products in FP8"),
    ),
    "select_topk": (_hopper("topk.sm90", "one read of the scores"),),
    "select_blocks": (_hopper("topk.sm90", "one read of the scores"),),
}

_NO_WGMMA: Final = (
    "expert_linear.gate", "rope.sm90", "quantize.sm90", "hyper.sm90", "hyper_site.sm90",
    "router.sm90", "topk.sm90",
)  # fmt: skip
"""Modules whose sources use no instruction that SM90 alone has: they build for SM100, too."""

_UNSEEN: Final[Mapping[str, tuple[Implementation, ...]]] = {
    op: tuple(
        replace(
            line,
            name="cuda sm100",
            archs=("sm100", "sm103"),
            why="Hopper's source built for this card, which none has run yet",
            chosen=False,
        )
        for line in lines
        if line.module in _NO_WGMMA
    )
    for op, lines in _HOPPER.items()
}


def _library(
    name: str, module: str, package: str, why: str, *archs: str, invariant: bool = False
) -> Implementation:
    """An adapter of a published library; none is chosen yet, by its numbers or its speed."""
    return Implementation(
        name, module, archs or ("sm90",), invariant, why, needs=package, chosen=False
    )


_TILES: Final = "TileKernels"
_PUBLISHED: Final[Mapping[str, tuple[Implementation, ...]]] = {
    "round_trip": (
        _library(_TILES, "quantize.vendor", "tile_kernels", "a copy first, it works in place"),
    ),
    "fp8_linear": (
        _library("Humming", "linear.vendor", "humming", "exact; keeps weights a second time"),
        _library("DeepGEMM", "linear.deepgemm", "deep_gemm", "scales of 128: other numbers"),
    ),
    "expert_linear": (
        _library("Humming", "expert_linear.vendor", "humming", "exact; weights a second time"),
    ),
    "swiglu": (_library(_TILES, "expert_linear.vendor", "tile_kernels", "the library's"),),
    "route": (_library(_TILES, "router.vendor", "tile_kernels", "behind torch's product"),),
    "hyper_mix": (
        _library(_TILES, "hyper.vendor", "tile_kernels", "products in tf32, four launches"),
    ),
    "hyper_collapse": (_library(_TILES, "hyper.vendor", "tile_kernels", "the library's"),),
    "hyper_expand": (_library(_TILES, "hyper.vendor", "tile_kernels", "the library's"),),
    "index_score": (
        _library("DeepGEMM", "index_score.vendor", "deep_gemm", "heads summed in any order"),
    ),
    "select_topk": (
        _library("DeepSelect", "topk.vendor", "deep_select", "ties to any index", "sm100", "sm103"),
    ),
    "sparse_attention": (
        _library("FlashMLA", "attention.vendor", "flash_mla", "gathers all entries as bf16 first"),
    ),
    "engram_gate": (_library(_TILES, "engram.vendor", "tile_kernels", "the library's"),),
}

TABLE: Final[Mapping[str, tuple[Implementation, ...]]] = {
    op: (*_HOPPER.get(op, ()), *lines, *_UNSEEN.get(op, ()), *_PUBLISHED.get(op, ()))
    for op, lines in _OWN.items()
}
