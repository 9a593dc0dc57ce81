"""THE dispatch table: op -> implementations, the preferred first.

A line here is the whole integration: tests, benchmarks and `doctor` read it. `module` holds a
function of the op's name; it is imported only when chosen.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

__all__ = ["TABLE", "Implementation"]


@dataclass(frozen=True, slots=True)
class Implementation:
    """One way to compute an op.

    name       "reference", "cpu", "triton", ...
    module     dotted path below deepinfer.kernels
    archs      device architectures it runs on, () = any
    invariant  a row's bits do not depend on its batch
    why        one clause for `doctor`
    needs      package that must be installed, "" = none
    """

    name: str
    module: str
    archs: tuple[str, ...] = ()
    invariant: bool = True
    why: str = "the definition, plain torch"
    needs: str = ""


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

TABLE: Final[Mapping[str, tuple[Implementation, ...]]] = {
    "rms_norm": _portable("rms_norm"),
    "cos_sin": _portable("rope"),
    "rotate_tail": _portable("rope"),
    "round_trip": _portable("quantize", "rounding by table"),
    "fp8_linear": _portable("linear", _BUFFERS),
    "dense_linear": _portable("linear", _BUFFERS),
    "grouped_linear": _portable("linear", _BUFFERS),
    "expert_linear": _portable("expert_linear", _BUFFERS),
    "swiglu": _portable("expert_linear", _NUMPY),
    "route": _portable("router", _NUMPY),
    "hyper_mix": _portable("hyper", _NUMPY),
    "hyper_collapse": _portable("hyper", _NUMPY),
    "hyper_expand": _portable("hyper"),
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
