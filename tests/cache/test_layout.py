"""Byte sizes and places of every cache, against the published figures of the release."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer.cache.layout import CacheLayout, FormatName, entry_format
from deepinfer.config import ModelConfig
from deepinfer.config.load import load_model_config, resolve_model
from deepinfer.errors import ConfigError

MODES: tuple[Literal["official", "noq"], ...] = ("official", "noq")


@pytest.fixture(scope="module")
def real_config(real_config_file: Path) -> ModelConfig:
    return load_model_config(real_config_file.parent)


@pytest.fixture(scope="module")
def demo_config() -> ModelConfig:
    return load_model_config(resolve_model("golden"))


@pytest.mark.parametrize(
    ("name", "dim", "codes", "scales"),
    [
        ("window_fp8", 512, 512, 16),
        ("main_fp4", 512, 256, 32),
        ("index_fp4", 128, 64, 4),
        ("fp32", 512, 2048, 0),
        ("window_fp8", 128, 128, 4),
        ("main_fp4", 64, 32, 4),
        ("index_fp4", 64, 32, 2),
        ("fp32", 64, 256, 0),
    ],
)
def test_entry_sizes(name: FormatName, dim: int, codes: int, scales: int) -> None:
    form = entry_format(name, dim)
    assert (form.name, form.dim, form.code_bytes, form.scale_bytes) == (name, dim, codes, scales)
    assert form.entry_bytes == codes + scales


def test_a_block_of_the_release(real_config: ModelConfig) -> None:
    """890 bytes a token, in the published places."""
    layout = CacheLayout.build(real_config, "official")
    assert layout.tokens_per_block == 128 and layout.ratios == (1, 2)
    assert [
        (p.layer_id, p.kind, p.ratio, p.num_entries, p.offset, p.num_bytes) for p in layout.parts
    ] == [
        (2, "index", 2, 64, 0, 4352),
        (2, "main", 2, 64, 4352, 18432),
        (8, "index", 2, 64, 22784, 4352),
        (8, "main", 2, 64, 27136, 18432),
        (14, "index", 2, 64, 45568, 4352),
        (14, "main", 2, 64, 49920, 18432),
        (20, "index", 1, 128, 68352, 8704),
        (20, "main", 1, 128, 77056, 36864),
    ]
    assert sum(p.num_bytes for p in layout.parts) == 113_920 == 128 * 890
    assert layout.block_bytes == 113_920
    assert {p.format.entry_bytes for p in layout.parts if p.kind == "main"} == {288}
    assert {p.format.entry_bytes for p in layout.parts if p.kind == "index"} == {68}


def test_a_slot_of_the_release(real_config: ModelConfig) -> None:
    """134 window entries per layer, 7 compressor pairs, 3 ids of history and 6 to step back."""
    layout = CacheLayout.build(real_config, "official")
    assert layout.max_rollback == 6 and layout.ring_length == 134 and layout.tail_length == 7
    assert layout.window_format.entry_bytes == 528
    assert len(layout.windows) == 43
    ring_bytes = 134 * 528
    assert [w.offset for w in layout.windows] == [i * ring_bytes for i in range(43)]
    assert 40 * ring_bytes == 2_830_080 and 43 * ring_bytes == 3_042_336
    assert [layer for layer, _ in layout.tails] == [2, 8, 14]
    sizes = [ring.length * ring.entry_bytes for _, ring in layout.tails]
    assert sizes == [28_672] * 3
    assert layout.engram_tail is not None and layout.engram_history == 3
    assert layout.engram_tail.offset == 3_128_352
    assert (layout.engram_tail.length, layout.engram_tail.entry_bytes) == (9, 4)
    assert layout.slot_bytes == 3_128_352 + 64  # 36 bytes, aligned


def test_fp8_main_entries_are_a_choice_of_the_checkpoint(real_config: ModelConfig) -> None:
    config = dataclasses.replace(real_config, use_fp4_sparse_kv=False)
    layout = CacheLayout.build(config, "official")
    assert {p.format.name for p in layout.parts if p.kind == "main"} == {"window_fp8"}
    assert sum(p.num_bytes for p in layout.parts) == 128 * (528 * 5 // 2 + 170)


def test_strict_mode_keeps_fp32(real_config: ModelConfig) -> None:
    layout = CacheLayout.build(real_config, "noq")
    assert {p.format.name for p in layout.parts} == {"fp32"} == {layout.window_format.name}
    assert sum(p.num_bytes for p in layout.parts) == 128 * (512 + 128) * 4 * 5 // 2
    assert layout.window_format.entry_bytes == 2048


def test_no_drafts_need_no_rollback(real_config: ModelConfig) -> None:
    config = dataclasses.replace(
        real_config,
        num_nextn_predict_layers=0,
        compress_ratios=real_config.compress_ratios[:40],
    )
    layout = CacheLayout.build(config, "official")
    assert layout.max_rollback == 0 and layout.ring_length == 128 and len(layout.windows) == 40
    assert layout.tail_length == 2 and {r.length for _, r in layout.tails} == {2}
    assert layout.engram_tail is not None and layout.engram_tail.length == 3


@pytest.mark.parametrize("tokens", [0, -2, 3, 127])
def test_a_block_holds_whole_entries(real_config: ModelConfig, tokens: int) -> None:
    with pytest.raises(ConfigError, match=rf"cache.tokens_per_block: found {tokens}, expected"):
        CacheLayout.build(real_config, "official", tokens)


@settings(max_examples=60)
@given(
    mode=st.sampled_from(MODES),
    tokens=st.integers(1, 64).map(lambda n: 2 * n),
    rollback=st.integers(0, 9),
)
def test_nothing_overlaps(
    demo_config: ModelConfig, mode: Literal["official", "noq"], tokens: int, rollback: int
) -> None:
    layout = CacheLayout.build(demo_config, mode, tokens, rollback)
    block = [(p.offset, p.num_bytes) for p in layout.parts]
    rings = [*layout.windows, *(ring for _, ring in layout.tails)]
    if layout.engram_tail:
        rings.append(layout.engram_tail)
    slot = [(r.offset, r.length * r.entry_bytes) for r in rings]
    for regions, total in ((block, layout.block_bytes), (slot, layout.slot_bytes)):
        assert regions[0][0] == 0 and total % 32 == 0
        ends = [offset + size for offset, size in regions]
        for end, (start, _) in zip(ends, regions[1:], strict=False):
            assert end <= start < end + 32 and start % 32 == 0
        assert ends[-1] <= total < ends[-1] + 32
    assert layout.ring_length == demo_config.sliding_window + rollback
    owners = [layer for layer in demo_config.layers if layer.owns_kv]
    assert [(p.layer_id, p.kind) for p in layout.parts] == [
        (layer.layer_id, kind) for layer in owners for kind in ("index", "main")
    ]
    assert all(p.num_entries * p.ratio == tokens for p in layout.parts)
