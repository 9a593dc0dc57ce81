"""Ops: the dispatch table resolved once for a device, as a frozen set of callables."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Final, TypeVar

from torch import Tensor

from deepinfer.device.base import Capability
from deepinfer.errors import UnsupportedError
from deepinfer.kernels import (
    attention,
    cache_io,
    compress,
    engram,
    expert_linear,
    hyper,
    hyper_site,
    index_score,
    latent,
    linear,
    paged_attention,
    paged_index,
    quantize,
    rms_norm,
    rope,
    routed_experts,
    router,
    topk,
)
from deepinfer.kernels.libraries import is_usable, why_not
from deepinfer.kernels.table import TABLE, Implementation

__all__ = ["Ops", "choose"]

Op = Callable[..., Tensor]
_Result = TypeVar("_Result")

# The public functions: signature, checks, documentation.
_PUBLIC: Final[Mapping[str, Callable[..., object]]] = {
    "rms_norm": rms_norm.rms_norm,
    "cos_sin": rope.cos_sin,
    "rotate_tail": rope.rotate_tail,
    "latent_entry": latent.latent_entry,
    "latent_store": latent.latent_store,
    "entry_store": latent.entry_store,
    "round_trip": quantize.round_trip,
    "fp8_linear": linear.fp8_linear,
    "dense_linear": linear.dense_linear,
    "grouped_linear": linear.grouped_linear,
    "expert_linear": expert_linear.expert_linear,
    "swiglu": expert_linear.swiglu,
    "routed_experts": routed_experts.routed_experts,
    "route": router.route,
    "route_rounded": router.route_rounded,
    "hyper_mix": hyper.hyper_mix,
    "hyper_collapse": hyper.hyper_collapse,
    "hyper_expand": hyper.hyper_expand,
    "hyper_site": hyper_site.hyper_site,
    "hyper_site_rounded": hyper_site.hyper_site_rounded,
    "compress": compress.compress,
    "index_score": index_score.index_score,
    "paged_index_score": paged_index.paged_index_score,
    "select_topk": topk.select_topk,
    "select_blocks": topk.select_blocks,
    "block_mask": topk.block_mask,
    "sparse_attention": attention.sparse_attention,
    "paged_attention": paged_attention.paged_attention,
    "cache_store": cache_io.cache_store,
    "cache_load": cache_io.cache_load,
    "engram_hash": engram.engram_hash,
    "engram_lookup": engram.engram_lookup,
    "engram_gate": engram.engram_gate,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Ops:
    """One callable per op; signatures and meaning stand in the op's folder.

    choices  op -> the implementation in use
    """

    choices: Mapping[str, Implementation]
    rms_norm: Op
    cos_sin: Callable[..., tuple[Tensor, Tensor]]
    rotate_tail: Op
    latent_entry: Callable[..., tuple[Tensor, Tensor]]
    latent_store: Op
    entry_store: Callable[..., None]
    round_trip: Op
    fp8_linear: Op
    dense_linear: Op
    grouped_linear: Op
    expert_linear: Op
    swiglu: Op
    routed_experts: Op
    route: Callable[..., tuple[Tensor, Tensor]]
    route_rounded: Callable[..., tuple[Tensor, Tensor, Tensor]]
    hyper_mix: Callable[..., tuple[Tensor, Tensor, Tensor]]
    hyper_collapse: Op
    hyper_expand: Op
    hyper_site: Callable[..., tuple[Tensor, Tensor, Tensor, Tensor, Tensor]]
    hyper_site_rounded: Callable[..., tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]]
    compress: Op
    index_score: Op
    paged_index_score: Op
    select_topk: Op
    select_blocks: Op
    block_mask: Op
    sparse_attention: Op
    paged_attention: Op
    cache_store: Callable[..., None]
    cache_load: Op
    engram_hash: Op
    engram_lookup: Op
    engram_gate: Op

    @classmethod
    def resolve(
        cls,
        capability: Capability,
        only_reference: bool = False,
        checked: bool = True,
        invariant: bool = False,
        asked: Mapping[str, str] | None = None,
    ) -> Ops:
        """Pick the first implementation of each op that runs on a device.

        only_reference  take the definitions everywhere: the slow twin of the whole engine
        checked         check every argument; a model whose calls are tested may leave it out
        invariant       none whose bits for a row depend on its batch
        asked           op -> implementation by name, whatever the table prefers
        Raises UnsupportedError when what is asked for does not run there.
        """
        asked = asked or {}
        choices = {
            op: choose(op, capability, only_reference, invariant, asked.get(op, "")) for op in TABLE
        }
        bound = {op: _bind(op, choice, checked) for op, choice in choices.items()}
        return cls(choices=choices, **bound)  # type: ignore[arg-type]  # one per public function


def choose(
    op: str,
    capability: Capability,
    only_reference: bool = False,
    invariant: bool = False,
    asked: str = "",
) -> Implementation:
    """Return the implementation of an op on a device; `asked` names one, "" = the table's order.

    Raises UnsupportedError when none runs there.
    """
    if asked:
        for implementation in TABLE[op]:
            if implementation.name == asked and capability.arch in implementation.archs:
                if implementation.needs and not is_usable(implementation.needs):
                    raise UnsupportedError(f"{op}: {asked}: {why_not(implementation.needs)}")
                return implementation
        raise UnsupportedError(f"{op}: there is no {asked} for {capability.arch}")
    for implementation in TABLE[op]:
        if only_reference and implementation.name != "reference":
            continue
        if not implementation.chosen or (invariant and not implementation.invariant):
            continue
        if implementation.needs and not is_usable(implementation.needs):
            continue
        if not implementation.archs or capability.arch in implementation.archs:
            return implementation
    raise UnsupportedError(f"no implementation of {op} runs on {capability.arch}")


def _bind(op: str, choice: Implementation, checked: bool) -> Callable[..., object]:
    module = import_module(f"deepinfer.kernels.{choice.module}")
    function: Callable[..., object] = getattr(module, op)
    return partial(_PUBLIC[op], impl=function) if checked else function
