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
    """

    name: str
    module: str
    archs: tuple[str, ...] = ()
    invariant: bool = True
    why: str = "the definition, plain torch"


def _only_reference(folder: str) -> tuple[Implementation, ...]:
    return (Implementation("reference", f"{folder}.reference"),)


TABLE: Final[Mapping[str, tuple[Implementation, ...]]] = {
    "rms_norm": _only_reference("rms_norm"),
    "cos_sin": _only_reference("rope"),
    "rotate_tail": _only_reference("rope"),
    "round_trip": _only_reference("quantize"),
    "fp8_linear": _only_reference("linear"),
    "dense_linear": _only_reference("linear"),
    "grouped_linear": _only_reference("linear"),
    "expert_linear": _only_reference("expert_linear"),
    "swiglu": _only_reference("expert_linear"),
    "route": _only_reference("router"),
    "hyper_mix": (
        Implementation(
            "cpu", "hyper.cpu", ("cpu",), why="Sinkhorn in numpy: fewer and cheaper calls"
        ),
        *_only_reference("hyper"),
    ),
    "hyper_collapse": _only_reference("hyper"),
    "hyper_expand": _only_reference("hyper"),
    "compress": _only_reference("compress"),
    "index_score": _only_reference("index_score"),
    "select_topk": _only_reference("topk"),
    "select_blocks": _only_reference("topk"),
    "block_mask": _only_reference("topk"),
    "sparse_attention": _only_reference("attention"),
    "cache_store": _only_reference("cache_io"),
    "cache_load": _only_reference("cache_io"),
    "engram_hash": _only_reference("engram"),
    "engram_lookup": _only_reference("engram"),
    "engram_gate": _only_reference("engram"),
}
