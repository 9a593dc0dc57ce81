"""The values of a trace: names, types, and the order in which a forward pass computes them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from deepinfer.config.model import ModelConfig

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["KINDS", "Item", "Kind", "LayerIds", "first_not_finite", "in_order"]


@dataclass(frozen=True, slots=True)
class Kind:
    """One named value.

    dtype   torch's name; "held" is bf16 under official and fp32 under noq
    layers  which layers have one: then these are axis 0 and positions are axis 1; None = positions
            are axis 0
    """

    dtype: str
    layers: Literal["all", "engram", "index"] | None = None


KINDS: Final = {
    "tokens": Kind("int32"),
    "engram_hash": Kind("int32"),
    "engram_out": Kind("held", "engram"),
    "idx_topk": Kind("int32", "index"),
    "cand_blocks": Kind("uint8"),
    "attn_out": Kind("held", "all"),
    "route_idx": Kind("int32", "all"),
    "route_weight": Kind("float32", "all"),
    "ffn_out": Kind("held", "all"),
    "stream_out": Kind("held", "all"),
    "pre_mix": Kind("float32", "all"),
    "main_hidden": Kind("held"),
    "logits": Kind("float32"),
    "greedy_tokens": Kind("int32"),
    "decode_logits": Kind("float32"),
    "draft_tokens": Kind("int32"),
    "draft_conf": Kind("float32"),
    "draft_logits": Kind("float32"),
}
_BEFORE_LAYERS: Final = ("tokens", "engram_hash")
_IN_LAYERS: Final = tuple(n for n, kind in KINDS.items() if kind.layers or n == "cand_blocks")


class Item(NamedTuple):
    """A value at one place of the computation, [positions, ...]."""

    name: str
    layer: int | None
    value: Tensor

    def __str__(self) -> str:
        """Return the name, and the layer where there is one."""
        return self.name if self.layer is None else f"{self.name} of layer {self.layer}"


@dataclass(frozen=True, slots=True)
class LayerIds:
    """Which layers the rows of axis 0 belong to; () where nothing is known, so rows count."""

    engram: tuple[int, ...] = ()
    index: tuple[int, ...] = ()
    candidate: tuple[int, ...] = ()

    @classmethod
    def of(cls, config: ModelConfig) -> LayerIds:
        """Return those of a model."""
        candidate = config.candidate_source_layer_id
        return cls(
            config.engram_layer_ids,
            tuple(layer.layer_id for layer in config.layers if layer.owns_index),
            () if candidate is None else (candidate,),
        )

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, str]) -> LayerIds:
        """Read what `to_metadata` wrote; what is absent or unreadable is not known."""

        def ids(key: str) -> tuple[int, ...]:
            parts = metadata.get(key, "").split(",")
            return tuple(map(int, parts)) if all(part.isdecimal() for part in parts) else ()

        return cls(ids("engram_layers"), ids("index_layers"), ids("candidate_layer"))

    def to_metadata(self) -> dict[str, str]:
        """Return entries for the head of a file."""
        lists = {
            "engram_layers": self.engram,
            "index_layers": self.index,
            "candidate_layer": self.candidate,
        }
        return {key: ",".join(map(str, ids)) for key, ids in lists.items()}

    def rows(self, name: str, count: int) -> list[int]:
        """Return the layer of each row of a layered value."""
        kind = KINDS[name].layers
        known = {"engram": self.engram, "index": self.index}.get(kind or "", ())
        return list(known) if len(known) == count else list(range(count))


def in_order(values: Mapping[str, Tensor], layer_ids: LayerIds) -> Iterator[Item]:
    """Yield the values in the order of the computation, layer after layer; unknown names last."""
    for name in _BEFORE_LAYERS:
        if name in values:
            yield Item(name, None, values[name])
    by_layer: list[tuple[int, int, Item]] = []
    for order, name in enumerate(_IN_LAYERS):
        if name not in values:
            continue
        if name == "cand_blocks":
            layer = layer_ids.candidate[0] if layer_ids.candidate else 0
            by_layer.append((layer, order, Item(name, layer, values[name])))
            continue
        rows = values[name].unbind(0) if values[name].dim() else ()
        for layer, row in zip(layer_ids.rows(name, len(rows)), rows, strict=True):
            by_layer.append((layer, order, Item(name, layer, row)))
    for _, _, item in sorted(by_layer, key=lambda entry: entry[:2]):
        yield item
    done = {*_BEFORE_LAYERS, *_IN_LAYERS}
    rest = [name for name in KINDS if name not in done]
    for name in [*rest, *sorted(set(values) - set(KINDS))]:
        if name in values:
            yield Item(name, None, values[name])


def first_not_finite(values: Mapping[str, Tensor], layer_ids: LayerIds) -> Item | None:
    """Return the first value that holds NaN or infinity."""
    for item in in_order(values, layer_ids):
        if item.value.is_floating_point() and not bool(item.value.isfinite().all()):
            return item
    return None
