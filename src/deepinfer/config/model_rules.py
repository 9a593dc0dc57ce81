"""What the values of a model config must satisfy among each other (pure).

Each rule yields one line per problem and stops silently where a value that it needs is missing or
bad. Limits of particular kernels are not checked here: they belong to the contract of the kernel
that has them. Source: weights specification, 1.4; backbone specification, 3.1 and 5.4.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from deepinfer.config.engram import engram_primes
from deepinfer.config.fields import Values, show
from deepinfer.config.model_json import MAX_ENGRAM_ROWS

__all__ = ["RULES", "nearest_source"]

_MAX_ENGRAM_COLUMNS: Final = 1024


def nearest_source(sources: tuple[int, ...], layer_id: int) -> int | None:
    """Return the largest source at or below a layer, None when there is none."""
    return max((s for s in sources if s <= layer_id), default=None)


def _wrong(key: str, found: object, expected: str) -> str:
    """Spell a problem of a `text_config` key."""
    return f"text_config.{key}: found {show(found)}, expected {expected}"


def _rule_token_ids(v: Values) -> Iterator[str]:
    """Every special id lies inside the vocabulary."""
    vocab = v.one("vocab_size")
    for key in ("bos_token_id", "eos_token_id", "pad_token_id", "image_token_id"):
        if key in v.items and v.one(key) >= vocab:
            yield f"{key}: found {v.one(key)}, expected an id below vocab_size ({vocab})"


def _rule_multiples(v: Values) -> Iterator[str]:
    """Quantization groups run along whole dimensions."""
    for key in (
        "hidden_size",
        "moe_intermediate_size",
        "q_lora_rank",
        "o_lora_rank",
        "head_dim",
        "index_head_dim",
    ):
        if key in v.items and v.one(key) % 32:
            yield _wrong(key, v.one(key), "a multiple of 32 (quantization groups)")


def _rule_rotary(v: Values) -> Iterator[str]:
    """The rotary dims are pairs at the end of a head and of an index head."""
    rotary = v.one("qk_rope_head_dim")
    if rotary % 2:
        yield _wrong("qk_rope_head_dim", rotary, "an even number")
    for key in ("head_dim", "index_head_dim"):
        if key in v.items and rotary > v.one(key):
            yield _wrong("qk_rope_head_dim", rotary, f"at most {key} ({v.one(key)})")


def _rule_groups(v: Values) -> Iterator[str]:
    """Output groups hold whole heads."""
    groups, heads = v.one("o_groups"), v.one("num_attention_heads")
    if heads % groups:
        yield _wrong("o_groups", groups, f"a divisor of num_attention_heads ({heads})")


def _rule_experts(v: Values) -> Iterator[str]:
    """No token asks for more experts than there are."""
    active, total = v.one("num_experts_per_tok"), v.one("n_routed_experts")
    if active > total:
        yield _wrong("num_experts_per_tok", active, f"at most n_routed_experts ({total})")


def _rule_ratios(v: Values) -> Iterator[str]:
    """One ratio a layer, 0, 1 or 2; draft layers have a window only."""
    ratios = v.many("compress_ratios")
    if any(r not in (0, 1, 2) for r in ratios):
        yield _wrong("compress_ratios", ratios, "values out of 0, 1, 2")
    depth, drafts = v.one("num_hidden_layers"), v.one("num_nextn_predict_layers")
    if len(ratios) != depth + drafts:
        yield _wrong(
            "compress_ratios",
            ratios,
            f"{depth + drafts} values (num_hidden_layers {depth} + "
            f"num_nextn_predict_layers {drafts}), not {len(ratios)}",
        )
    elif any(ratios[depth:]):
        yield _wrong("compress_ratios", ratios, f"ratio 0 for the last {drafts} (draft) layers")


def _rule_sources(v: Values) -> Iterator[str]:
    """Sources are sorted layers with a compressed KV; every such layer has one of its ratio."""
    ratios = v.many("compress_ratios")[: v.one("num_hidden_layers")]
    kv, index = v.many("kv_source_layer_ids"), v.many("index_source_layer_ids")
    sound = True
    for key, ids in (("kv_source_layer_ids", kv), ("index_source_layer_ids", index)):
        if list(ids) != sorted(set(ids)):
            yield _wrong(key, ids, "ascending layer ids without repeats")
            sound = False
        outside = [i for i in ids if i >= len(ratios) or ratios[i] == 0]
        if outside:
            yield _wrong(key, ids, f"backbone layers with compress_ratio > 0 only, not {outside}")
            sound = False
    if not set(kv) <= set(index):
        yield _wrong("kv_source_layer_ids", kv, f"a subset of index_source_layer_ids {show(index)}")
        sound = False
    if not sound:
        return
    first = ratios.index(1) if 1 in ratios else len(ratios)
    blamed: set[int | None] = set()  # each source once, at its first layer that does not fit
    for layer_id, ratio in enumerate(ratios):
        source = nearest_source(kv, layer_id)
        if ratio == 0 or source in blamed:
            continue
        expected = None
        if source is None:
            expected = f"a source at or below layer {layer_id}"
        elif ratios[source] != ratio:
            expected = (
                f"a source of ratio {ratio} for layer {layer_id}; its nearest, layer {source}, "
                f"has ratio {ratios[source]}"
            )
        elif source < first <= layer_id:
            expected = (
                f"layer {layer_id} of the decoder half to have a source at or above its first "
                f"layer {first}, not {source}"
            )
        if expected is not None:
            blamed.add(source)
            yield _wrong("kv_source_layer_ids", kv, expected)


def _rule_index_keys(v: Values) -> Iterator[str]:
    """Index keys are made where the compressed KV is made."""
    keys, kv = v.many("index_k_source_layer_ids"), v.many("kv_source_layer_ids")
    if keys != kv:
        yield _wrong("index_k_source_layer_ids", keys, f"kv_source_layer_ids {show(kv)}")


def _rule_candidates(v: Values) -> Iterator[str]:
    """The candidate source is an indexer whose blocks mean the same to every later indexer."""
    source = v.optional("candidate_source_layer_id")
    if source is None:
        return
    ratios, index = v.many("compress_ratios"), v.many("index_source_layer_ids")
    if source not in index:
        yield _wrong(
            "candidate_source_layer_id", source, f"one of index_source_layer_ids {show(index)}"
        )
    else:
        later = [i for i in index if i > source and i < len(ratios) and source < len(ratios)]
        other = [i for i in later if ratios[i] != ratios[source]]
        if other:
            yield _wrong(
                "candidate_source_layer_id",
                source,
                f"a layer with the compress_ratio of the later index sources {other}",
            )
    block, blocks = v.one("candidate_block_size"), v.one("candidate_topk_blocks")
    least = v.one("index_topk") + block - 1
    if block * blocks < least:
        yield _wrong(
            "candidate_topk_blocks",
            blocks,
            f"candidate_topk_blocks * candidate_block_size >= index_topk + "
            f"candidate_block_size - 1 ({least}), not {block * blocks}",
        )


def _rule_engram_layers(v: Values) -> Iterator[str]:
    """Engram layers are sorted and lie in the encoder half."""
    ids, depth = v.many("engram_layer_ids"), v.one("num_hidden_layers")
    if list(ids) != sorted(set(ids)):
        yield _wrong("engram_layer_ids", ids, "ascending layer ids without repeats")
    ratios = v.many("compress_ratios")[:depth]
    first = ratios.index(1) if 1 in ratios else depth
    if any(i >= first for i in ids):
        yield _wrong("engram_layer_ids", ids, f"layers below the first of ratio 1 ({first})")


def _rule_engram_sizes(v: Values) -> Iterator[str]:
    """Engram's ids and dims fit the vocabulary and the quantization groups."""
    if not v.many("engram_layer_ids"):
        return
    if "engram_head_dim" in v.items and v.one("engram_head_dim") % 32:
        yield _wrong(
            "engram_head_dim", v.one("engram_head_dim"), "a multiple of 32 (quantization groups)"
        )
    vocab = v.one("vocab_size")
    if "engram_pad_token_id" in v.items and v.one("engram_pad_token_id") >= vocab:
        yield _wrong(
            "engram_pad_token_id", v.one("engram_pad_token_id"), f"an id below vocab_size ({vocab})"
        )
    compressed = v.one("engram_compressed_vocab_size")
    if compressed > vocab:
        yield _wrong("engram_compressed_vocab_size", compressed, f"at most vocab_size ({vocab})")


def _rule_engram_rows(v: Values) -> Iterator[str]:
    """The table sizes are the sums of the bucket primes."""
    ids = v.many("engram_layer_ids")
    if not ids:
        return
    order, heads = v.one("engram_max_ngram_size"), v.one("engram_n_heads")
    columns = len(ids) * (order - 1) * heads
    if columns > _MAX_ENGRAM_COLUMNS:
        yield _wrong(
            "engram_n_heads",
            heads,
            f"at most {_MAX_ENGRAM_COLUMNS} hash columns in all layers, not {columns}",
        )
        return
    start = v.one("engram_vocab_size")
    primes = engram_primes(len(ids), start, order, heads)
    rows = tuple(sum(sum(group) for group in layer) for layer in primes)
    if max(rows) > MAX_ENGRAM_ROWS:
        yield _wrong("engram_vocab_size", start, "tables below 2**31 rows")
    found = v.many("engram_num_embeddings")
    if found != rows:
        yield _wrong(
            "engram_num_embeddings", found, f"{show(rows)} (sums of primes from engram_vocab_size)"
        )


def _rule_drafts(v: Values) -> Iterator[str]:
    """Draft taps are sorted backbone layers; draft sizes fit together."""
    if v.one("num_nextn_predict_layers") == 0:
        return
    vocab, depth = v.one("vocab_size"), v.one("num_hidden_layers")
    if "dspark_noise_token_id" in v.items and v.one("dspark_noise_token_id") >= vocab:
        yield _wrong(
            "dspark_noise_token_id",
            v.one("dspark_noise_token_id"),
            f"an id below vocab_size ({vocab})",
        )
    if "dspark_target_layer_ids" in v.items:
        taps = v.many("dspark_target_layer_ids")
        if not taps or list(taps) != sorted(set(taps)) or taps[-1] >= depth:
            yield _wrong(
                "dspark_target_layer_ids",
                taps,
                f"one or more ascending layer ids below num_hidden_layers ({depth})",
            )
    if "dspark_confidence_temperatures" in v.items:
        given = len(v.many("dspark_confidence_temperatures"))
        block = v.one("dspark_block_size")
        if given not in (0, 1, block):
            yield _wrong(
                "dspark_confidence_temperatures",
                v.items["dspark_confidence_temperatures"],
                f"none, one or dspark_block_size ({block}) values",
            )
    active, total = v.one("dspark_num_experts_per_tok"), v.one("dspark_n_routed_experts")
    if active > total:
        yield _wrong(
            "dspark_num_experts_per_tok", active, f"at most dspark_n_routed_experts ({total})"
        )


RULES: Final = (
    _rule_token_ids,
    _rule_multiples,
    _rule_rotary,
    _rule_groups,
    _rule_experts,
    _rule_ratios,
    _rule_sources,
    _rule_index_keys,
    _rule_candidates,
    _rule_engram_layers,
    _rule_engram_sizes,
    _rule_engram_rows,
    _rule_drafts,
)
