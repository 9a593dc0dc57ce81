"""The fast model on other configs, other numerics, other memory budgets, and with damage."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.model import golden
from tests.model.conftest import BETA_CONFIG
from tests.model.pair import MODES, Bench, Pair, assert_rows_equal, load_fast, load_reference
from torch import Tensor

from deepinfer.cache.layout import CacheLayout
from deepinfer.config.engine import NumericsConfig
from deepinfer.errors import ConfigError, ShapeError, TokenizerError
from deepinfer.model.fast.inputs import SequenceRows, build_inputs
from deepinfer.model.fast.model import FastModel, resolve_numerics
from deepinfer.model.fast.session import Session
from deepinfer.model.reference import Numerics
from deepinfer.weights.reader import Checkpoint
from deepinfer.weights.synth import write_synthetic

PairOf = Callable[[str, Numerics], Pair]

_NO_ENGRAM: Mapping[str, object] = {"engram_layer_ids": [], "engram_num_embeddings": []}
_NO_DRAFTS: Mapping[str, object] = {
    "num_nextn_predict_layers": 0,
    "dspark_target_layer_ids": [],
    "compress_ratios": [0, 2, 2, 2, 2, 1, 1, 1, 1, 1],
}
CONFIGS: dict[str, Mapping[str, object]] = {
    "no Engram": _NO_ENGRAM,
    "no drafts": _NO_DRAFTS,
    "neither": {**_NO_ENGRAM, **_NO_DRAFTS},
    "no candidates": {"candidate_source_layer_id": None},
    "fp8 entries": {"use_fp4_sparse_kv": False},
    "3 streams": {"hc_mult": 3},
    "1 stream": {"hc_mult": 1},
    "1 draft block": {"num_nextn_predict_layers": 1,
                      "compress_ratios": [0, 2, 2, 2, 2, 1, 1, 1, 1, 1, 0]},
    "window of 1": {"sliding_window": 1},
    "top-k of 1": {"index_topk": 1},
    "wide top-k": {"index_topk": 70, "candidate_topk_blocks": 20},
    "candidate blocks of 1": {"candidate_block_size": 1, "candidate_topk_blocks": 17},
    "no ratio 2": {
        "compress_ratios": [0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 0, 0],
        "engram_layer_ids": [0],
        "kv_source_layer_ids": [1, 5],
        "index_source_layer_ids": [1, 3, 5, 7],
        "candidate_source_layer_id": 1,
    },
    "no ratio 1": {
        "compress_ratios": [2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 0, 0],
        "kv_source_layer_ids": [0, 4],
        "index_source_layer_ids": [0, 3, 4, 6],
        "candidate_source_layer_id": 4,
    },
    "windows only": {
        "compress_ratios": [0] * 12,
        "kv_source_layer_ids": [],
        "index_source_layer_ids": [],
        "candidate_source_layer_id": None,
    },
    "a window layer between": {
        "compress_ratios": [0, 2, 0, 2, 2, 1, 0, 1, 1, 1, 0, 0],
        "kv_source_layer_ids": [1, 4, 5],
        "index_source_layer_ids": [1, 3, 4, 5, 7],
    },
    "2-grams": {"engram_max_ngram_size": 2},
    "all experts": {"num_experts_per_tok": 6},
    "no clamp": {"swiglu_limit": 0.0},
}  # fmt: skip


def changed(changes: Mapping[str, object]) -> dict[str, object]:
    """The second checkpoint's config with some values of `text_config` changed."""
    raw = json.loads(BETA_CONFIG.read_text())
    text = raw["text_config"] | changes
    if text["engram_layer_ids"] and "engram_max_ngram_size" in changes:
        text["engram_num_embeddings"] = [61 + 67 + 71]  # the primes of one order
    raw["text_config"] = text
    return raw  # type: ignore[no-any-return]


RARE = ("no Engram", "no drafts", "1 draft block", "2-grams", "all experts", "no clamp")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow) if n in RARE else n for n in CONFIGS]
)
def test_configs(name: str, tmp_path: Path) -> None:
    """Both arithmetics, prefill, chunks, decode and drafts have the reference's bits."""
    folder = write_synthetic(changed(CONFIGS[name]), 3, tmp_path / "checkpoint")
    plans: tuple[tuple[Numerics, int | None], ...] = (("noq", None), ("official", 37))
    for mode, chunk in plans:
        pair = Pair.load(folder, mode, 100)
        assert float(pair.expected["logits"].std()) > 0.05
        trace: dict[str, Tensor] = {}
        Session(pair.fast, 100).prefill(pair.ids, chunk, trace)
        assert_rows_equal(trace, pair.expected)
        session = Session(pair.fast, 100, 16)
        session.prefill(pair.ids[:46])
        for position in range(46, 51):
            trace = {}
            trace["logits"] = session.decode(pair.ids[position], trace)[None]
            assert_rows_equal(trace, pair.expected, position)
        if pair.config.num_nextn_predict_layers:
            want = pair.reference.draft(pair.expected["main_hidden"], 50, pair.ids[51])
            for actual, expected in zip(session.draft(pair.ids[51]), want, strict=True):
                assert torch.equal(actual, expected)


# --- switches --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["alpha", "beta"])
@pytest.mark.parametrize("mode", MODES)
def test_memory_changes_no_bit(
    name: str, mode: Numerics, pair_of: PairOf, folder_of: dict[str, Path]
) -> None:
    """Without any fp32 copy of a weight, with some of them, and with decoded cache entries."""
    pair = pair_of(name, mode)
    for dense in (0, 1 << 20):
        logits = Session(load_fast(folder_of[name], mode, dense=dense), 30).prefill(pair.ids[:20])
        assert torch.equal(logits, pair.expected["logits"][:20]), dense
    for dense_cache in (1 << 16, 1 << 22, 1 << 28):
        bench = Bench(pair.fast, 2, 150, dense_cache=dense_cache)
        bench.feed([(1, pair.ids[:66])])
        for at in (66, 67):
            step = bench.feed([(1, [pair.ids[at]])], decode=True)[0]
            assert torch.equal(step, pair.expected["logits"][at : at + 1]), (dense_cache, at)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("only_reference", [False, True])
def test_chosen_ops(
    mode: Numerics, only_reference: bool, pair_of: PairOf, folder_of: dict[str, Path]
) -> None:
    """The ops that a CPU runs have the bits of their definitions, checked or not."""
    pair = pair_of("beta", mode)
    fast = load_fast(folder_of["beta"], mode, only_reference=only_reference, checked=False)
    trace: dict[str, Tensor] = {}
    session = Session(fast, 140)
    session.prefill(pair.ids[:130], 60, trace)
    assert_rows_equal(trace, pair.expected)
    assert torch.equal(session.decode(pair.ids[130]), pair.expected["logits"][130])


def test_without_drafts(pair_of: PairOf, folder_of: dict[str, Path]) -> None:
    """A model that keeps no draft keys computes the same; `main_hidden` is there when traced."""
    pair = pair_of("alpha", "official")
    fast = load_fast(folder_of["alpha"], "official", with_drafts=False)
    assert fast.draft is None
    trace: dict[str, Tensor] = {}
    Session(fast, 70).prefill(pair.ids[:70], 30, trace)
    assert_rows_equal(trace, pair.expected)
    assert "main_hidden" in trace


@pytest.mark.parametrize("name", ["alpha", "beta"])
def test_serving_output_projection(name: str, folder_of: dict[str, Path], pair_of: PairOf) -> None:
    """With FP8 output projection both paths agree bit for bit, and differ from the other form."""
    folder, ids = folder_of[name], pair_of(name, "official").ids[:140]
    want: dict[str, Tensor] = {}
    load_reference(folder, "official", "fp8").forward(ids, want, window_slots="full")
    fast = load_fast(folder, "official", output_projection="fp8")
    trace: dict[str, Tensor] = {}
    Session(fast, 140).prefill(ids, 64, trace)
    assert_rows_equal(trace, want)
    other = pair_of(name, "official").expected["logits"][:140]
    assert not torch.equal(trace["logits"], other)


@pytest.mark.parametrize("name", ["alpha", "beta"])
def test_final_index_scores(name: str, folder_of: dict[str, Path], pair_of: PairOf) -> None:
    """Index scores rounded once, at the end: both paths agree, and choose otherwise somewhere."""
    pair = pair_of(name, "official")
    want: dict[str, Tensor] = {}
    pair.reference.forward(pair.ids[:300], want, window_slots="full", index_rounding="final")
    fast = load_fast(folder_of[name], "official", index_scores="final")
    trace: dict[str, Tensor] = {}
    Session(fast, 300).prefill(pair.ids[:300], 128, trace)
    assert_rows_equal(trace, want)
    assert not torch.equal(trace["idx_topk"], pair.expected["idx_topk"][:, :300].int())


@pytest.mark.parametrize(
    ("mode", "device", "given", "fp8_output", "rounding"),
    [
        ("official", "cpu", {}, False, "reference"),
        ("official", "cuda", {}, True, "final"),
        ("official", "cpu", {"output_projection": "fp8", "index_scores": "final"}, True, "final"),
        ("official", "cuda", {"output_projection": "bf16", "index_scores": "reference"}, False,
         "reference"),
        ("noq", "cpu", {}, False, "none"),
        ("noq", "cuda", {}, False, "none"),
        ("noq", "cpu", {"output_projection": "fp8", "index_scores": "final"}, False, "none"),
    ],
)  # fmt: skip
def test_auto(
    mode: str, device: str, given: dict[str, str], fp8_output: bool, rounding: str
) -> None:
    """Auto is the recorded arithmetic on a CPU, the serving one elsewhere; noq rounds nothing."""
    config = NumericsConfig(mode=mode, **given)  # type: ignore[arg-type]
    found = resolve_numerics(config, torch.device(device))
    assert (found.fp8_output, found.index_rounding) == (fp8_output, rounding)
    assert found.quantize == (mode == "official")
    assert found.dtype == (torch.bfloat16 if mode == "official" else torch.float32)


# --- mistakes --------------------------------------------------------------------------------


def poisoned(folder: Path, out: Path, name: str, at: tuple[int, ...]) -> Path:
    """Copy a checkpoint and write NaN into one element of a BF16 or F32 tensor."""
    shutil.copytree(folder, out)
    reader = Checkpoint.open(out)
    shard = out / json.loads((out / "model.safetensors.index.json").read_text())["weight_map"][name]
    with shard.open("r+b") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        data_at = file.tell()
        info = header[name]
        width = {"BF16": 2, "F32": 4}[info["dtype"]]
        flat = int(np.ravel_multi_index(at, info["shape"]))
        file.seek(data_at + info["data_offsets"][0] + flat * width)
        file.write(b"\xff" * width)
    del reader
    return out


DAMAGE = {
    "layers.3.ffn_norm.weight": ((5,), "layers.3 is the first bad layer, in its experts"),
    "layers.0.attn.attn_sink": ((1,), "layers.0 is the first bad layer, in its attention"),
    "layers.4.engram.k_weight": ((0, 3), "layers.4 is the first bad layer, in its engram"),
    "layers.6.hc_attn_base": ((4,), "layers.6 is the first bad layer, in its hyper-connections"),
    "layers.2.hc_ffn_scale": ((1,), "layers.2 is the first bad layer, in its hyper-connections"),
    "layers.5.attn.kv_norm.weight": ((7,), "layers.5 is the first bad layer, in its attention"),
    "norm.weight": ((1,), "the final norm or head is not"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_diagnose(name: str, golden_checkpoint: Path, tmp_path: Path) -> None:
    """NaN in one weight is found in its layer, and named by its part."""
    at, message = DAMAGE[name]
    fast = load_fast(poisoned(golden_checkpoint, tmp_path / "copy", name, at), "official")
    session = Session(fast, 40)
    ids = golden.prompt_ids("p7")
    assert bool(session.prefill(ids).isnan().any())
    inputs = build_inputs([SequenceRows(1, len(ids) - 1, ids[-1:], [1])], False, session.layout)
    with torch.inference_mode():
        assert message in fast.diagnose(inputs, session.caches)


def test_diagnose_embedding(golden_checkpoint: Path, tmp_path: Path) -> None:
    """One token's damaged embedding is named, and other tokens are fine."""
    ids = golden.prompt_ids("p7")
    folder = poisoned(golden_checkpoint, tmp_path / "copy", "embed.weight", (ids[-1], 0))
    fast = load_fast(folder, "official")
    layout = CacheLayout.build(fast.config, "official")
    bench = Bench(fast, 1, 100)
    inputs = build_inputs([SequenceRows(1, 0, ids, [1])], False, layout)
    with torch.inference_mode():
        assert "embed.weight" in fast.diagnose(inputs, bench.caches)
        fine = [i for i in ids if i != ids[-1]]
        inputs = build_inputs([SequenceRows(1, 0, fine, [1])], False, layout)
        assert "finite" in fast.diagnose(inputs, bench.caches)


def test_bad_steps() -> None:
    """Empty steps, empty sequences, uncovered rows and too many decode rows are refused."""
    layout = CacheLayout.build(golden.config(), "official", 16)
    most = layout.max_rollback + 1
    row = SequenceRows(1, 0, [1], [1])
    cases: list[tuple[list[SequenceRows], bool, str]] = [
        ([], False, "at least one"),
        ([], True, "at least one"),
        ([row, SequenceRows(2, 0, [], [2])], False, "at least one"),
        ([SequenceRows(1, 0, [1] * 17, [1])], False, "17 positions need 2 blocks of 16"),
        ([SequenceRows(1, 16, [1], [1])], True, "17 positions need 2 blocks of 16"),
        ([SequenceRows(1, 0, [1] * (most + 1), [1])], True, f"max_rollback {most - 1}"),
    ]
    for sequences, decode, message in cases:
        with pytest.raises(ShapeError, match=message):
            build_inputs(sequences, decode, layout)
    build_inputs([SequenceRows(1, 0, [1] * most, [1])], True, layout)
    with pytest.raises(ConfigError, match="tokens_per_block"):
        CacheLayout.build(golden.config(), "official", 15)


def test_out_of_vocabulary(pair_of: PairOf) -> None:
    """A token beyond the vocabulary raises; it never reads other memory."""
    pair = pair_of("alpha", "noq")
    with pytest.raises(IndexError):
        Session(pair.fast, 10).prefill([0, pair.config.vocab_size])


def test_engram_needs_the_map(golden_checkpoint: Path) -> None:
    """Engram layers without the compressed vocabulary are refused by name."""
    checkpoint = Checkpoint.open(golden_checkpoint)
    with pytest.raises(TokenizerError, match=r"tokenizer\.json"):
        FastModel.load(checkpoint, NumericsConfig(), "cpu", None, 0)
