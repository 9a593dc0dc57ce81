"""The reference's own rules: check vectors, plain loops, independence of rows, other shapes."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.model import golden
from torch import Tensor

from deepinfer.config import ModelConfig
from deepinfer.config.engram import engram_tables
from deepinfer.config.model import YarnConfig
from deepinfer.errors import TokenizerError
from deepinfer.model import reference
from deepinfer.model.reference import Numerics, ReferenceModel

NUMERICS: tuple[Numerics, ...] = ("official", "noq")


# --- check vectors of the specifications -----------------------------------------------------


def test_sinkhorn_vector() -> None:
    """Rows are inputs, columns outputs, and the last step normalizes columns."""
    raw = torch.tensor(
        [[2.0, 0.0, 0.0, 0.0], [0.0, 1.0, 0.0, 0.0], [0.0, 0.0, 3.0, 0.0], [1.0, 0.0, 0.0, 0.0]]
    )
    expected = torch.tensor(
        [
            [0.5517, 0.1526, 0.0667, 0.2290],
            [0.0951, 0.5282, 0.0850, 0.2917],
            [0.0416, 0.0850, 0.7459, 0.1275],
            [0.3116, 0.2343, 0.1024, 0.3517],
        ]
    )
    comb = reference.sinkhorn(raw[None], 20, 1e-6)[0]
    torch.testing.assert_close(comb, expected, rtol=0, atol=6e-5)
    torch.testing.assert_close(comb.sum(0), torch.ones(4), rtol=0, atol=1e-5)


def test_quantizer_vectors() -> None:
    """The written examples of all three formats come back."""
    x = (torch.arange(32) * 0.05 - 0.77).bfloat16().float()
    values, scale = reference.fp8_codes(x)
    assert scale.item() == 2.0**-9
    assert values[0, :6].tolist() == [-384, -384, -352, -320, -288, -256]
    values, scale = reference.fp4_ue8m0_codes(x)
    assert scale.item() == 0.25 and values[0, :4].tolist() == [-3, -3, -3, -2]
    x = (torch.arange(16) * 0.1 - 0.75).bfloat16().float()
    values, scale = reference.fp4_e4m3_codes(x)
    expected = [-6, -6, -4, -4, -3, -2, -1, -0.5, 0.5, 1, 2, 3, 4, 4, 6, 6]
    assert scale.item() == 0.125 and values[0].tolist() == expected


def test_fp4_division_keeps_ties() -> None:
    """An exact midpoint goes to the even code; the reciprocal of the scale would miss it."""
    scale = 0.029296875
    x = torch.zeros(16)
    x[0], x[1] = 6 * scale, 1.25 * scale
    values, found = reference.fp4_e4m3_codes(x)
    assert found.item() == scale and values[0, 1].item() == 1.0


def test_quantizer_extremes() -> None:
    """Zero groups take the floor scale, huge ones saturate, and -0 keeps its sign."""
    zero = torch.zeros(32)
    zero[1] = -0.0
    for quantizer, floor in (
        (reference.fp8_codes, 2.0**-22),
        (reference.fp4_e4m3_codes, 2.0**-9),
        (reference.fp4_ue8m0_codes, 2.0**-126),
    ):
        values, scale = quantizer(zero)
        assert (scale == floor).all() and (values == 0).all()
        assert values.flatten()[:2].signbit().tolist() == [False, True]
    huge = torch.full((16,), 1e5)
    values, scale = reference.fp4_e4m3_codes(huge)
    assert scale.item() == 448 and (values == 6).all()


def test_rope_table() -> None:
    """The released model's frequencies and a few angles at far positions."""
    yarn = YarnConfig(factor=16, beta_fast=32, beta_slow=1, original_max_position_embeddings=65536)
    table = reference.rope_frequencies(64, 160000.0, yarn)
    at = [0, 1, 14, 15, 16, 20, 24, 25, 31]
    expected = [1.0, 6.876560450e-01, 5.286856554e-03, 3.635538509e-03, 2.265624935e-03,
                2.969777852e-04, 1.953125320e-05, 5.372312444e-06, 5.680529398e-07]  # fmt: skip
    assert table[at].tolist() == pytest.approx(expected, rel=1e-9)
    plain = reference.rope_frequencies(64, 10000.0, None)
    assert plain[[1, 16, 31]].tolist() == pytest.approx(
        [7.498942018e-01, 9.999999776e-03, 1.333521504e-04], rel=1e-9
    )
    angle = torch.tensor(1000000.0) * table
    assert torch.cos(angle)[[0, 20, 31]].tolist() == pytest.approx(
        [0.936752, -0.097124, 0.842950], abs=1e-6
    )


def test_packed_weights() -> None:
    """The even element sits in the low nibble; int8 and uint8 storage mean the same."""
    packed = torch.tensor([[0x21, 0xF8] + [0] * 14], dtype=torch.uint8)
    scale = torch.tensor([[128]], dtype=torch.uint8)
    dense = reference.dequantize(packed, scale)
    assert dense[0, :4].tolist() == [1.0, 2.0, 0.0, -12.0] and dense[0, 2].signbit()
    same = reference.dequantize(packed.view(torch.int8), scale.view(torch.float8_e8m0fnu))
    assert torch.equal(dense, same)


def test_tile_scales() -> None:
    """One scale covers 32 outputs and 32 inputs; ragged output tiles are cut."""
    weight = torch.ones(40, 64).to(torch.float8_e4m3fn)
    scale = torch.tensor([[127, 128], [129, 126]], dtype=torch.uint8)
    dense = reference.dequantize(weight, scale)
    corners = dense[[0, 0, 39, 39], [31, 32, 0, 63]].tolist()
    assert dense.shape == (40, 64) and corners == [1.0, 2.0, 4.0, 0.5]


# --- selections and attention against plain loops --------------------------------------------


@given(
    st.lists(
        st.lists(st.sampled_from([-math.inf, -1.0, 0.0, -0.0, 0.5, 2.0]), min_size=6, max_size=6),
        min_size=1,
        max_size=4,
    ),
    st.integers(1, 8),
)
def test_top_k_is_stable(scores: list[list[float]], count: int) -> None:
    """Higher scores first, then smaller indices; the result ascends and is padded."""
    got = reference.top_k(torch.tensor(scores), count).tolist()
    for row, found in zip(scores, got, strict=True):
        present = [i for i, score in enumerate(row) if score > -math.inf]
        best = sorted(sorted(present, key=lambda i: (-row[i], i))[:count])
        assert found == best + [-1] * (count - len(best))


def test_top_k_of_nothing() -> None:
    """No entries give padding only."""
    assert reference.top_k(torch.empty(2, 0), 3).tolist() == [[-1] * 3] * 2


@pytest.mark.parametrize("slots", [5, 64, 130])
def test_attention_is_a_softmax_with_sink(slots: int) -> None:
    """The blocked walk equals one softmax in fp64, wherever the absent slots are."""
    q, entries = torch.randn(9, 3, 32), torch.randn(40, 32)
    sink = torch.randn(3)
    chosen = torch.randint(-1, 40, (9, slots))
    chosen[4] = -1
    out = reference.sparse_attention(q, entries, chosen, sink, 0.3, round_weights=False)
    for row in range(9):
        keys = entries[chosen[row][chosen[row] >= 0]].double()
        logits = torch.cat([q[row].double() @ keys.T * 0.3, sink[:, None].double()], dim=1)
        expected = logits.softmax(-1)[:, :-1] @ keys
        torch.testing.assert_close(out[row].double(), expected, rtol=0, atol=1e-5)
    assert (out[4] == 0).all()


def test_matmul_rows_are_independent() -> None:
    """A row's bits depend neither on its place nor on its company."""
    x, weight = torch.randn(70, 96), torch.randn(33, 96)
    whole = reference.matmul(x, weight)
    for start, end in ((0, 1), (3, 10), (15, 17), (16, 70), (69, 70)):
        assert torch.equal(reference.matmul(x[start:end], weight), whole[start:end])
    assert reference.matmul(x[:0], weight).shape == (0, 33)
    torch.testing.assert_close(whole, x @ weight.T, rtol=1e-4, atol=1e-4)


# --- the whole model on other shapes ---------------------------------------------------------


def other_config(hc_mult: int = 4) -> ModelConfig:
    """A config in which every dimension differs from the packaged one."""
    return ModelConfig(
        bos_token_id=0, eos_token_id=1, pad_token_id=3, image_token_id=98,
        tokenizer_compatibility="native", vocab_size=99, hidden_size=96, num_hidden_layers=7,
        max_position_embeddings=4096, rms_norm_eps=1e-20, num_attention_heads=3, head_dim=128,
        qk_rope_head_dim=32, q_lora_rank=64, o_groups=3, o_lora_rank=32, rope_theta=1000.0,
        rope_scaling=YarnConfig(
            factor=4, beta_fast=8, beta_slow=1, original_max_position_embeddings=64
        ),
        compress_rope_theta=20000.0, sliding_window=48, compress_ratios=(0, 2, 2, 1, 1, 1, 1, 0, 0),
        kv_source_layer_ids=(1, 3), index_source_layer_ids=(1, 3, 5),
        index_k_source_layer_ids=(1, 3), index_n_heads=3, index_head_dim=64, index_topk=12,
        candidate_source_layer_id=3, candidate_topk_blocks=5, candidate_block_size=4,
        hc_mult=hc_mult, hc_sinkhorn_iters=7, hc_eps=1e-6, n_routed_experts=5, n_shared_experts=1,
        num_experts_per_tok=2, moe_intermediate_size=64, routed_scaling_factor=2.5,
        swiglu_limit=1.5, engram_layer_ids=(0, 2), engram_num_embeddings=(240, 306),
        engram_max_ngram_size=3, engram_vocab_size=53, engram_n_heads=2, engram_head_dim=32,
        engram_pad_token_id=3, engram_compressed_vocab_size=70, num_nextn_predict_layers=2,
        dspark_block_size=4, dspark_noise_token_id=97, dspark_target_layer_ids=(2, 6),
        dspark_markov_rank=64, dspark_n_routed_experts=3, dspark_num_experts_per_tok=1,
    )  # fmt: skip


class RandomWeights(dict[str, Tensor]):
    """Stored tensors in the released types, drawn as they are added."""

    def fp8(self, name: str, rows: int, columns: int) -> None:
        """A block-scaled matrix."""
        self[f"{name}.weight"] = (torch.randn(rows, columns) * 100).to(torch.float8_e4m3fn)
        centre = 120 - round(math.log2(columns**0.5))
        shape = (-(-rows // 32), columns // 32)
        self[f"{name}.scale"] = (torch.randint(-1, 2, shape) + centre).to(torch.uint8)

    def fp4(self, name: str, rows: int, columns: int) -> None:
        """A packed expert matrix."""
        self[f"{name}.weight"] = torch.randint(-128, 128, (rows, columns // 2)).to(torch.int8)
        centre = 126 - round(math.log2(columns**0.5))
        scale = torch.randint(-1, 2, (rows, columns // 32)) + centre
        self[f"{name}.scale"] = scale.to(torch.uint8)

    def bf16(self, name: str, *shape: int) -> None:
        """An unquantized matrix, or a norm around 1."""
        noise = torch.randn(shape)
        value = noise / shape[-1] ** 0.5 if len(shape) > 1 else 1 + noise * 0.1
        self[name] = value.bfloat16()

    def block(self, config: ModelConfig, name: str, num_experts: int) -> None:
        """The tensors of any block."""
        c, streams = config, config.hc_mult
        hidden, mixes = c.hidden_size, (2 + c.hc_mult) * c.hc_mult
        self.fp8(f"{name}.attn.wq_a", c.q_lora_rank, hidden)
        self.fp8(f"{name}.attn.wq_b", c.num_attention_heads * c.head_dim, c.q_lora_rank)
        self.fp8(f"{name}.attn.wkv", c.head_dim, hidden)
        width = c.num_attention_heads * c.head_dim // c.o_groups
        self.fp8(f"{name}.attn.wo_a", c.o_groups * c.o_lora_rank, width)
        self.fp8(f"{name}.attn.wo_b", hidden, c.o_groups * c.o_lora_rank)
        self.bf16(f"{name}.attn.q_norm.weight", c.q_lora_rank)
        self.bf16(f"{name}.attn.kv_norm.weight", c.head_dim)
        self[f"{name}.attn.attn_sink"] = torch.randn(c.num_attention_heads)
        for part in ("attn", "ffn"):
            self.bf16(f"{name}.{part}_norm.weight", hidden)
            self[f"{name}.hc_{part}_fn"] = torch.randn(mixes, streams * hidden) / hidden**0.5
            self[f"{name}.hc_{part}_base"] = torch.randn(mixes)
            self[f"{name}.hc_{part}_scale"] = torch.rand(3)
        self.bf16(f"{name}.ffn.gate.weight", num_experts, hidden)
        self[f"{name}.ffn.gate.bias"] = torch.randn(num_experts) * 0.1
        for part in ("w1", "w2", "w3"):
            shape = (hidden, c.moe_intermediate_size)
            shape = shape if part == "w2" else shape[::-1]
            self.fp8(f"{name}.ffn.shared_experts.{part}", *shape)
            for expert in range(num_experts):
                self.fp4(f"{name}.ffn.experts.{expert}.{part}", *shape)


def random_model(config: ModelConfig, numerics: Numerics) -> ReferenceModel:
    """A model with random weights; the same for the same torch seed."""
    c, w = config, RandomWeights()
    for name in ("embed", "head"):
        w.bf16(f"{name}.weight", c.vocab_size, c.hidden_size)
    w.bf16("norm.weight", c.hidden_size)
    for layer in c.layers:
        name = f"layers.{layer.layer_id}"
        w.block(c, name, c.n_routed_experts)
        if layer.owns_kv:
            w.bf16(f"{name}.attn.compressor.wkv.weight", c.head_dim, c.hidden_size)
            w.bf16(f"{name}.attn.compressor.wgate.weight", c.head_dim, c.hidden_size)
            w.bf16(f"{name}.attn.compressor.norm.weight", c.head_dim)
            w.bf16(f"{name}.attn.indexer.wk.weight", c.index_head_dim, c.head_dim)
            w.bf16(f"{name}.attn.indexer.k_norm.weight", c.index_head_dim)
        if layer.owns_index:
            w.fp8(f"{name}.attn.indexer.wq_b", c.index_n_heads * c.index_head_dim, c.q_lora_rank)
            w.bf16(f"{name}.attn.indexer.weights_proj.weight", c.index_n_heads, c.hidden_size)
        if layer.engram_idx is not None:
            rows = c.engram_num_embeddings[layer.engram_idx]
            columns = (c.engram_max_ngram_size - 1) * c.engram_n_heads * c.engram_head_dim
            codes = (torch.randn(rows, c.engram_head_dim) * 100).to(torch.float8_e4m3fn)
            w[f"{name}.engram.embed.weight"] = codes
            scale = torch.randint(118, 122, (rows, c.engram_head_dim // 32))
            w[f"{name}.engram.embed.scale"] = scale.to(torch.uint8)
            w.fp8(f"{name}.engram.wkv", (c.hc_mult + 1) * c.hidden_size, columns)
            w.bf16(f"{name}.engram.q_weight", c.hc_mult, c.hidden_size)
            w.bf16(f"{name}.engram.k_weight", c.hc_mult, c.hidden_size)
    for stage in range(c.num_nextn_predict_layers):
        w.block(c, f"mtp.{stage}", c.dspark_n_routed_experts)
    last = f"mtp.{c.num_nextn_predict_layers - 1}"
    taps = len(c.dspark_target_layer_ids)
    w.fp8("mtp.0.main_proj", c.hidden_size, taps * c.hidden_size)
    w.bf16("mtp.0.main_norm.weight", c.hidden_size)
    w.bf16(f"{last}.norm.weight", c.hidden_size)
    for part in ("embed", "head"):
        w.bf16(f"{last}.markov_head.{part}.weight", c.vocab_size, c.dspark_markov_rank)
    width = c.hidden_size + c.dspark_markov_rank
    w.bf16(f"{last}.confidence_head.proj.weight", 1, width)
    token_map = np.arange(c.vocab_size) % c.engram_compressed_vocab_size
    return ReferenceModel(c, w, token_map, numerics=numerics)


@pytest.mark.parametrize("numerics", NUMERICS)
def test_rows_do_not_depend_on_length(numerics: Numerics) -> None:
    """Every value of a row has the same bits whatever follows it, at lengths around the edges."""
    model = random_model(other_config(), numerics)
    ids = torch.randint(0, 99, (131,))
    whole: dict[str, Tensor] = {}
    model.forward(ids, whole, window_slots="full")
    assert whole["logits"].isfinite().all() and float(whole["logits"].std()) > 0.05
    for length in (1, 2, 3, 16, 47, 48, 49, 100):
        part: dict[str, Tensor] = {}
        model.forward(ids[:length], part, window_slots="full")
        assert torch.equal(part["logits"], whole["logits"][:length]), length
        for name in ("stream_out", "attn_out", "ffn_out", "engram_out", "idx_topk", "route_idx"):
            assert torch.equal(part[name], whole[name][:, :length]), (length, name)


def test_trace_shapes() -> None:
    """The trace has the documented names, shapes and types."""
    c = other_config()
    trace: dict[str, Tensor] = {}
    random_model(c, "official").forward(torch.arange(30), trace)
    layers, rows = c.num_hidden_layers, 30
    expected = {
        "tokens": ((rows,), torch.int32),
        "logits": ((rows, c.vocab_size), torch.float32),
        "stream_out": ((layers, rows, c.hc_mult, c.hidden_size), torch.bfloat16),
        "engram_out": ((2, rows, c.hc_mult, c.hidden_size), torch.bfloat16),
        "pre_mix": ((layers, rows, c.hc_mult), torch.float32),
        "attn_out": ((layers, rows, c.hidden_size), torch.bfloat16),
        "ffn_out": ((layers, rows, c.hidden_size), torch.bfloat16),
        "main_hidden": ((rows, 2 * c.hidden_size), torch.bfloat16),
        "idx_topk": ((3, rows, c.index_topk), torch.int32),
        "cand_blocks": ((rows, 8), torch.uint8),
        "route_idx": ((layers, rows, 2), torch.int32),
        "route_weight": ((layers, rows, 2), torch.float32),
        "engram_hash": ((rows, 2, 4), torch.int32),
        "idx_margin": ((3, rows), torch.float32),
        "idx_kth_score": ((3, rows), torch.float32),
        "cand_margin": ((rows,), torch.float32),
        "route_margin": ((layers, rows), torch.float32),
    }
    assert {k: (tuple(v.shape), v.dtype) for k, v in trace.items()} == expected


def test_selection_rules() -> None:
    """Selections obey visibility, top-k size and the candidate blocks, and pin the newest block."""
    c = other_config()
    trace: dict[str, Tensor] = {}
    random_model(c, "noq").forward(torch.randint(0, 99, (120,)), trace)
    for source, layer_id in enumerate(c.index_source_layer_ids):
        ratio = c.compress_ratios[layer_id]
        for position in range(120):
            visible = (position + 1) // ratio
            found = [e for e in trace["idx_topk"][source, position].tolist() if e >= 0]
            assert all(e < visible for e in found)
            blocks = trace["cand_blocks"][position].nonzero().flatten().tolist()
            assert len(blocks) == min(5, -(-(position + 1) // 4)) and blocks[-1] == position // 4
            room = min(12, visible)
            if layer_id == 5:
                assert {e // 4 for e in found} <= set(blocks)
                room = min(room, sum(min(4, visible - 4 * b) for b in blocks))
            assert len(found) == room and found == sorted(found)


def test_hash_against_loops() -> None:
    """Rows follow the written recipe for another n-gram order, with padding before the start."""
    c = other_config()
    tables, token_map = engram_tables(c), torch.arange(99) % 70
    ids = [5, 98, 3, 3, 41, 7]
    got = reference.engram_rows(c, torch.tensor(ids), token_map)
    compressed = [3, 3] + [i % 70 for i in ids]
    for t in range(len(ids)):
        for layer in range(2):
            m = [int(x) for x in tables.multipliers[layer]]
            key = [compressed[t + 2 - r] for r in range(3)]
            acc, rows, offset = key[0] * m[0], [], 0
            for n in (1, 2):
                acc ^= key[n] * m[n]
                for prime in tables.primes[layer, n - 1].tolist():
                    rows.append(acc % prime + offset)
                    offset += prime
            assert got[t, layer].tolist() == rows


@pytest.mark.parametrize("numerics", NUMERICS)
@pytest.mark.parametrize("position", [0, 3, 47, 60, 120])
def test_draft_reads_its_window_only(numerics: Numerics, position: int) -> None:
    """Later features and features beyond the window change no bit; the newest one does."""
    c = other_config()
    model = random_model(c, numerics)
    features = torch.randn(122, 2 * c.hidden_size).bfloat16()
    tokens, conf, logits = model.draft(features, position, 7)
    assert tokens.shape == (5,) and conf.shape == (4,) and logits.shape == (4, 99)
    assert tokens[0] == 7 and logits.argmax(-1).tolist() == tokens[1:].tolist()
    other = features.clone()
    other[position + 1 :] += 1
    other[: max(0, position - 47)] += 1
    assert torch.equal(model.draft(other, position, 7)[2], logits)
    other[position] += 1
    assert not torch.equal(model.draft(other, position, 7)[2], logits)


def test_window_layout_changes_roundings_only() -> None:
    """In strict arithmetic the slot layout and the rounding of index scores do not matter."""
    model = random_model(other_config(), "noq")
    ids = torch.randint(0, 99, (60,))
    recorded = model.forward(ids)
    full = model.forward(ids, window_slots="full", index_rounding="final")
    torch.testing.assert_close(full, recorded, rtol=0, atol=1e-4)


def test_decode_rows_use_their_own_layout() -> None:
    """Decoding equals prefill in strict arithmetic; its prompt rows are those of the prefill."""
    ids = golden.prompt_ids("p7")
    args = (golden.config(), golden.weights(), golden.token_map())
    strict = ReferenceModel(*args, numerics="noq")
    torch.testing.assert_close(
        strict.decode(ids[:3], ids[3:]), strict.forward(ids)[3:], rtol=0, atol=1e-5
    )
    official = ReferenceModel(*args)
    trace: dict[str, Tensor] = {}
    official.decode(ids[:3], ids[3:], trace)
    assert torch.equal(trace["logits"][:3], official.forward(ids[:3]))


def test_other_numbers_of_streams() -> None:
    """Nothing depends on four streams."""
    logits = random_model(other_config(hc_mult=3), "official").forward(torch.arange(20))
    assert logits.isfinite().all()


def test_model_without_extras() -> None:
    """No Engram, no drafts and no candidate filter are a model too."""
    config = replace(
        other_config(), engram_layer_ids=(), engram_num_embeddings=(),
        candidate_source_layer_id=None, num_nextn_predict_layers=0,
        compress_ratios=(0, 2, 2, 1, 1, 1, 1), dspark_target_layer_ids=(),
    )  # fmt: skip
    full = random_model(other_config(), "noq")
    model = ReferenceModel(config, full._stored, None, numerics="noq")
    trace: dict[str, Tensor] = {}
    assert model.forward([1, 2, 3], trace).isfinite().all()
    assert not {"engram_out", "engram_hash", "main_hidden", "cand_blocks"} & set(trace)


def test_missing_token_map() -> None:
    """Engram layers without the compressed vocabulary are refused by name."""
    model = ReferenceModel(golden.config(), golden.weights())
    with pytest.raises(TokenizerError, match="token_map"):
        model.forward([1])
