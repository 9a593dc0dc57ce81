"""The official checkpoint as data: every tensor's name, format, shape, scale and shard rule (pure).

`_ROWS` is the whole inventory. `expected_tensors` expands it for one config; reader, writer and
inventory work on the result and know no name of their own. Source: weights specification, 2.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, Literal

from deepinfer.config.mesh import Mesh
from deepinfer.config.model import ModelConfig

__all__ = [
    "DTYPE_BYTES",
    "PARTS",
    "Part",
    "ShardRule",
    "TensorSpec",
    "canonical_name",
    "expected_tensors",
    "is_ignored",
    "is_unfolded_norm",
    "rank_bytes",
]

Part = Literal["backbone", "engram", "draft", "vision"]
ShardRule = Literal["replicated", "expert", "rows"]

PARTS: Final[tuple[Part, ...]] = ("backbone", "engram", "draft", "vision")
BF16: Final = "BF16"
F32: Final = "F32"
FP8: Final = "F8_E4M3"
UE8M0: Final = "F8_E8M0"
FP4: Final = "I8"  # two e2m1 values a byte, the even element in the low nibble
# The storage types that occur, by their names in a safetensors header.
DTYPE_BYTES: Final[Mapping[str, int]] = {BF16: 2, F32: 4, FP8: 1, UE8M0: 1, FP4: 1}
GROUP: Final = 32


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor that a config implies.

    shape        as stored: a packed FP4 matrix [N, K] has shape [N, K/2]
    part         backbone, engram (the tables only), draft (`mtp.*`), vision (with the aligner and
                 the image vectors)
    shard        replicated: every rank holds it; expert: the rank of its expert; rows: each rank
                 of an Engram group holds a run of rows
    scale_name   the tensor of this one's scales, None when it has none
    scale_of     the tensor that this one scales, None when it is no scale
    expert_idx   the routed expert it belongs to
    num_experts  how many experts its layer has, 0 outside routed experts
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    part: Part
    shard: ShardRule = "replicated"
    scale_name: str | None = None
    scale_of: str | None = None
    expert_idx: int | None = None
    num_experts: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the stored data."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]

    @property
    def num_parameters(self) -> int:
        """Weights it holds: a packed byte counts two, a scale none."""
        if self.scale_of is not None:
            return 0
        return math.prod(self.shape) * (2 if self.dtype == FP4 else 1)


@dataclass(frozen=True, slots=True)
class _Row:
    """One line of the inventory.

    where   which layers have it, a key of `_places`
    name    below the layer's prefix; `{e}` runs over the routed experts
    dtype   of the weight
    shape   logical dims, each a key of `_dims`, separated by spaces
    scale   none; tile = one per 32 x 32; row = one per output row and 32 inputs
    """

    where: str
    name: str
    dtype: str
    shape: str
    scale: Literal["", "tile", "row"] = ""
    shard: ShardRule = "replicated"


# fmt: off
_ROWS: Final = (
    _Row("global", "embed.weight", BF16, "V D"),
    # every backbone layer and draft block
    _Row("block", "attn.wq_a.weight", FP8, "Q D", "tile"),
    _Row("block", "attn.q_norm.weight", BF16, "Q"),
    _Row("block", "attn.wq_b.weight", FP8, "HxHd Q", "tile"),
    _Row("block", "attn.wkv.weight", FP8, "Hd D", "tile"),
    _Row("block", "attn.kv_norm.weight", BF16, "Hd"),
    _Row("block", "attn.wo_a.weight", FP8, "OxG HxHd/G", "tile"),
    _Row("block", "attn.wo_b.weight", FP8, "D OxG", "tile"),
    _Row("block", "attn.attn_sink", F32, "H"),
    _Row("block", "attn_norm.weight", BF16, "D"),
    _Row("block", "ffn_norm.weight", BF16, "D"),
    _Row("block", "hc_attn_fn", F32, "Mix MxD"),
    _Row("block", "hc_ffn_fn", F32, "Mix MxD"),
    _Row("block", "hc_attn_base", F32, "Mix"),
    _Row("block", "hc_ffn_base", F32, "Mix"),
    _Row("block", "hc_attn_scale", F32, "3"),
    _Row("block", "hc_ffn_scale", F32, "3"),
    _Row("block", "ffn.gate.weight", BF16, "E D"),
    _Row("block", "ffn.gate.bias", F32, "E"),
    _Row("block", "ffn.gate.bias_vl", F32, "E"),
    _Row("block", "ffn.shared_experts.w1.weight", FP8, "S D", "tile"),
    _Row("block", "ffn.shared_experts.w2.weight", FP8, "D S", "tile"),
    _Row("block", "ffn.shared_experts.w3.weight", FP8, "S D", "tile"),
    _Row("block", "ffn.experts.{e}.w1.weight", FP4, "I D", "row", "expert"),
    _Row("block", "ffn.experts.{e}.w2.weight", FP4, "D I", "row", "expert"),
    _Row("block", "ffn.experts.{e}.w3.weight", FP4, "I D", "row", "expert"),
    # some backbone layers
    _Row("kv source", "attn.compressor.wkv.weight", BF16, "Hd D"),
    _Row("pooling kv source", "attn.compressor.wgate.weight", BF16, "Hd D"),
    _Row("kv source", "attn.compressor.norm.weight", BF16, "Hd"),
    _Row("index source", "attn.indexer.wq_b.weight", FP8, "XxXd Q", "tile"),
    _Row("index source", "attn.indexer.weights_proj.weight", BF16, "X D"),
    _Row("index key source", "attn.indexer.wk.weight", BF16, "Xd Hd"),
    _Row("index key source", "attn.indexer.k_norm.weight", BF16, "Xd"),
    _Row("engram", "engram.embed.weight", FP8, "Rows Gd", "row", "rows"),
    _Row("engram", "engram.wkv.weight", FP8, "(M+1)xD GxGd", "tile"),
    _Row("engram", "engram.q_weight", BF16, "M D"),
    _Row("engram", "engram.k_weight", BF16, "M D"),
    # the first and the last draft block
    _Row("first draft", "main_proj.weight", FP8, "D TxD", "tile"),
    _Row("first draft", "main_norm.weight", BF16, "D"),
    _Row("last draft", "norm.weight", BF16, "D"),
    _Row("last draft", "markov_head.embed.weight", BF16, "V Mk"),
    _Row("last draft", "markov_head.head.weight", BF16, "V Mk"),
    _Row("last draft", "confidence_head.proj.weight", BF16, "1 D+Mk"),
    # the end of the backbone
    _Row("global", "norm.weight", BF16, "D"),
    _Row("global", "head.weight", BF16, "V D"),
    # images
    _Row("vision", "image_start", BF16, "D"),
    _Row("vision", "image_end", BF16, "D"),
    _Row("vision", "image_newline", BF16, "D"),
    _Row("vision", "vision.patch_embed.proj.weight", BF16, "Vd Px"),
    _Row("vision", "vision.patch_embed.proj.bias", BF16, "Vd"),
    _Row("vision block", "norm1.weight", BF16, "Vd"),
    _Row("vision block", "norm2.weight", BF16, "Vd"),
    _Row("vision block", "attn.wqkv.weight", BF16, "3xVd Vd"),
    _Row("vision block", "attn.wqkv.bias", BF16, "3xVd"),
    _Row("vision block", "attn.wo.weight", BF16, "Vd Vd"),
    _Row("vision block", "attn.wo.bias", BF16, "Vd"),
    _Row("vision block", "mlp.w1.weight", BF16, "2xVi Vd"),
    _Row("vision block", "mlp.w2.weight", BF16, "Vd Vi"),
    _Row("vision", "vision.norm.weight", BF16, "Vd"),
    _Row("vision", "aligner.w1.weight", BF16, "D Cell"),
    _Row("vision", "aligner.w1.bias", BF16, "D"),
    _Row("vision", "aligner.w2.weight", BF16, "D D"),
    _Row("vision", "aligner.w2.bias", BF16, "D"),
)
# fmt: on


def _dims(c: ModelConfig) -> dict[str, int]:
    """Return the dims that do not depend on the layer, by their symbols in `_ROWS`."""
    streams, heads_width = c.hc_mult, c.num_attention_heads * c.head_dim
    dims = {
        "1": 1,
        "3": 3,
        "V": c.vocab_size,
        "D": c.hidden_size,
        "Q": c.q_lora_rank,
        "H": c.num_attention_heads,
        "Hd": c.head_dim,
        "HxHd": heads_width,
        "HxHd/G": heads_width // c.o_groups,
        "OxG": c.o_lora_rank * c.o_groups,
        "M": streams,
        "MxD": streams * c.hidden_size,
        "(M+1)xD": (streams + 1) * c.hidden_size,
        "Mix": (2 + streams) * streams,
        "I": c.moe_intermediate_size,
        "S": c.n_shared_experts * c.moe_intermediate_size,
        "X": c.index_n_heads,
        "Xd": c.index_head_dim,
        "XxXd": c.index_n_heads * c.index_head_dim,
        "Gd": c.engram_head_dim,
        "GxGd": (c.engram_max_ngram_size - 1) * c.engram_n_heads * c.engram_head_dim,
        "TxD": len(c.dspark_target_layer_ids) * c.hidden_size,
        "Mk": c.dspark_markov_rank,
        "D+Mk": c.hidden_size + c.dspark_markov_rank,
    }
    if c.vision is not None:
        v = c.vision
        dims |= {
            "Vd": v.hidden_size,
            "3xVd": 3 * v.hidden_size,
            "Vi": v.intermediate_size,
            "2xVi": 2 * v.intermediate_size,
            "Px": 3 * v.patch_size**2,
            "Cell": v.downsample_ratio**2 * v.hidden_size,
        }
    return dims


@dataclass(frozen=True, slots=True)
class _Place:
    """One place that has the rows of a `where`: name prefix, part, dims of its own."""

    prefix: str
    part: Part
    dims: Mapping[str, int]


def _places(c: ModelConfig) -> dict[str, list[_Place]]:
    """Return the places of every `where` of `_ROWS`."""
    drafts = c.num_nextn_predict_layers
    backbone = {"E": c.n_routed_experts}
    layers = [
        _Place(f"layers.{i}.", "backbone", backbone | {"Rows": _engram_rows(c, i)})
        for i in range(c.num_hidden_layers)
    ]
    mtp = [_Place(f"mtp.{i}.", "draft", {"E": c.dspark_n_routed_experts}) for i in range(drafts)]
    towers = c.vision.num_hidden_layers if c.vision is not None else 0
    sources = c.kv_source_layer_ids
    return {
        "global": [_Place("", "backbone", {})],
        "block": layers + mtp,
        "kv source": [layers[i] for i in sources],
        "pooling kv source": [layers[i] for i in sources if c.compress_ratios[i] > 1],
        "index source": [layers[i] for i in c.index_source_layer_ids],
        "index key source": [layers[i] for i in c.index_k_source_layer_ids],
        "engram": [layers[i] for i in c.engram_layer_ids],
        "first draft": mtp[:1],
        "last draft": mtp[-1:],
        "vision": [_Place("", "vision", {})] if towers else [],
        "vision block": [_Place(f"vision.blocks.{i}.", "vision", {}) for i in range(towers)],
    }


def _engram_rows(c: ModelConfig, layer_id: int) -> int:
    """Return the rows of a layer's Engram table, 0 without one."""
    ids = c.engram_layer_ids
    return c.engram_num_embeddings[ids.index(layer_id)] if layer_id in ids else 0


def expected_tensors(config: ModelConfig) -> dict[str, TensorSpec]:
    """Return every tensor of a complete checkpoint by name, in model order.

    A scale follows its weight; a layer's tensors are neighbours.
    """
    return dict(_expected(config))


@lru_cache(maxsize=1)  # some 96,000 tensors of the released model, asked for several times in a row
def _expected(config: ModelConfig) -> Mapping[str, TensorSpec]:
    dims, places = _dims(config), _places(config)
    by_prefix: dict[str, list[TensorSpec]] = {}
    for row in _ROWS:
        for place in places[row.where]:
            # Global rows keep the place that they have in the table.
            key = place.prefix or row.name
            by_prefix.setdefault(key, []).extend(_expand(row, place, {**dims, **place.dims}))
    groups = sorted(by_prefix.items(), key=lambda item: _order(item[0]))
    return {spec.name: spec for _, specs in groups for spec in specs}


def _order(prefix: str) -> tuple[int, int]:
    """Order groups: embedding, layers, end of the backbone, drafts, images."""
    kinds = ("embed.", "layers.", "norm.", "head.", "mtp.", "image_", "vision.", "aligner.")
    kind = next(i for i, start in enumerate(kinds) if prefix.startswith(start))
    number = re.search(r"\d+", prefix) if prefix.endswith(".") else None
    return kind, int(number[0]) if number else -1


def _expand(row: _Row, place: _Place, dims: Mapping[str, int]) -> Iterator[TensorSpec]:
    """Yield the tensors of one row at one place: weight, then scale, for every expert."""
    shape = tuple(dims[symbol] for symbol in row.shape.split())
    stored = (*shape[:-1], shape[-1] // 2) if row.dtype == FP4 else shape
    scale_shape: tuple[int, ...] = ()
    if row.scale:
        tall = GROUP if row.scale == "tile" else 1
        scale_shape = (-(-shape[0] // tall), -(-shape[1] // GROUP))
    part: Part = "engram" if row.shard == "rows" else place.part
    num_experts = dims["E"] if row.shard == "expert" else 0
    for expert_idx in range(num_experts) if num_experts else (None,):
        name = place.prefix + row.name.replace("{e}", str(expert_idx))
        scale_name = name.removesuffix("weight") + "scale" if row.scale else None
        yield TensorSpec(
            name, row.dtype, stored, part, row.shard, scale_name, None, expert_idx, num_experts
        )
        if scale_name is not None:
            yield TensorSpec(
                scale_name, UE8M0, scale_shape, part, row.shard, None, name, expert_idx, num_experts
            )  # fmt: skip


def canonical_name(name: str) -> str:
    """Return a stored name without the optional `model.` prefix."""
    return name.removeprefix("model.")


def is_ignored(name: str) -> bool:
    """Tell whether a canonical name may be present without being expected.

    Drafts share the backbone's embedding and head; copies of them carry no information.
    """
    return re.fullmatch(r"mtp\.\d+\.(embed|head)\..+", name) is not None


def is_unfolded_norm(name: str) -> bool:
    """Tell whether a name is a norm weight that has to be folded into its `hc_*_fn`."""
    return re.search(r"(^|\.)hc_(attn|ffn|head)_norm\.weight$", name) is not None


def rank_bytes(specs: Iterable[TensorSpec], mesh: Mesh, rank: int) -> dict[Part, int]:
    """Return the bytes that one rank holds, by part.

    Raises ConfigError when the experts do not divide evenly or there is no such rank.
    """
    held: dict[Part, int] = dict.fromkeys(PARTS, 0)
    experts: dict[int, range] = {}
    for spec in specs:
        nbytes = spec.nbytes
        if spec.expert_idx is not None:
            count = spec.num_experts
            if count not in experts:
                experts[count] = mesh.expert_range(rank, count)
            if spec.expert_idx not in experts[count]:
                continue
        elif spec.shard == "rows":
            rows = spec.shape[0]
            nbytes = nbytes // rows * len(mesh.engram_rows(rank, rows))
        held[spec.part] += nbytes
    return held
