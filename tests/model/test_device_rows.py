"""Decode steps laid out from slot state alone: the bits of the reference, padding harmless."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from tests.model.pair import MODES, Bench, Pair

from deepinfer.kernels.decode_rows import lay_out_plain
from deepinfer.kernels.table import Implementation
from deepinfer.model.fast.block import sites_of
from deepinfer.model.fast.device_rows import device_inputs, layout_form
from deepinfer.model.fast.inputs import SequenceRows, build_inputs
from deepinfer.model.fast.model import FastModel
from deepinfer.model.reference import Numerics

PairOf = Callable[[str, Numerics], Pair]
LENGTHS = (1, 2, 31, 64, 129, 200)
DRAFTS = (0, 3, 1, 5, 0, 2)


def slot_state(bench: Bench, pair: Pair) -> tuple[torch.Tensor, ...]:
    """Lengths (one token more than is cached), last tokens, drafts and block tables by slot."""
    slots = len(bench.rows) + 1
    width = max(len(row.blocks) for row in bench.rows)
    length, last = torch.zeros(2, slots, dtype=torch.int64)
    drafts = torch.zeros(slots, 5, dtype=torch.int64)
    table = torch.zeros(slots, width, dtype=torch.int64)
    for row in bench.rows:
        at = row.length
        length[row.slot], last[row.slot] = at + 1, pair.ids[at]
        drafts[row.slot] = torch.tensor(pair.ids[at + 1 : at + 6])
        table[row.slot] = torch.tensor(row.blocks)
    return length, last, drafts, table


def step_rows(bench: Bench, padding: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Slot and place of every row: last token and drafts of each sequence, then padding."""
    pairs = [(row.slot, i) for row, k in zip(bench.rows, DRAFTS, strict=True) for i in range(1 + k)]
    pairs += [(0, 0)] * padding
    slots, places = torch.tensor(pairs).T
    return slots.contiguous(), places.contiguous()


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> Callable[[FastModel], None]:
    """Makes a model run the ops that join others, as on a card."""

    def fuse(model: FastModel) -> None:
        sites = [sites_of(block, model.numerics.dtype) for block in model.blocks]
        monkeypatch.setattr(model, "_fused", True)
        monkeypatch.setattr(model, "_sites", sites)
        choices = {**model.ops.choices, "latent_entry": Implementation("fused", "latent.reference")}
        monkeypatch.setattr(model, "ops", dataclasses.replace(model.ops, choices=choices))

    return fuse


@pytest.mark.parametrize("name", ["alpha", "beta"])
@pytest.mark.parametrize("mode", MODES)
def test_a_step_from_slot_state_has_the_bits_of_the_reference(
    name: str, mode: Numerics, pair_of: PairOf, fused: Callable[[FastModel], None]
) -> None:
    pair = pair_of(name, mode)
    fused(pair.fast)
    bench = Bench(pair.fast, len(LENGTHS), 320, 32, fill=0xFF)
    bench.feed([(i, pair.ids[:n]) for i, n in enumerate(LENGTHS)])
    bench.caches.slots[0] = 0  # what padding reads is finite
    for _ in range(3):  # entries that one step completes are read by the next
        slots, places = step_rows(bench, padding=4)
        inputs = device_inputs(
            slots, places, *slot_state(bench, pair), layout_form(bench.layout), most_tokens=256
        )
        every = torch.arange(len(slots))
        with torch.inference_mode():
            logits = pair.fast.forward(inputs, bench.caches, every)
        begin = 0
        for row, k in zip(bench.rows, DRAFTS, strict=True):
            want = pair.expected["logits"][row.length : row.length + 1 + k]
            assert torch.equal(logits[begin : begin + 1 + k], want), (row.length, k)
            begin += 1 + k
            row.length += 1 + k


def test_rows_lie_where_the_host_lays_them_out(pair_of: PairOf) -> None:
    pair = pair_of("alpha", "official")
    bench = Bench(pair.fast, len(LENGTHS), 320, 32)
    for row, n in zip(bench.rows, LENGTHS, strict=True):
        row.length = n
    slots, places = step_rows(bench, padding=0)
    length, last, drafts, table = slot_state(bench, pair)
    got = lay_out_plain(slots, places, length, last, drafts, table, layout_form(bench.layout))
    want = build_inputs(
        [
            SequenceRows(
                row.slot, row.length, pair.ids[row.length : row.length + 1 + k], row.blocks
            )
            for row, k in zip(bench.rows, DRAFTS, strict=True)
        ],
        True,
        bench.layout,
    )
    for name in ("token_ids", "positions", "window_store", "window_slots"):
        assert torch.equal(getattr(got, name), getattr(want, name)), name
    for i, part in enumerate(want.ratios.values()):
        assert torch.equal(got.visible[i], part.visible)
        emits = got.emit_entries[i] >= 0
        assert torch.equal(torch.nonzero(emits).flatten(), part.emit_rows)
        assert torch.equal(got.emit_entries[i][emits], part.emit_entries)
        assert torch.equal(got.emit_starts[i][emits], part.emit_starts)
    assert want.tail is not None and want.engram is not None
    assert torch.equal(got.tail_store, want.tail.store)
    assert torch.equal(got.engram_store, want.engram.store)


def test_padding_writes_nothing_outside_slot_0(pair_of: PairOf) -> None:
    pair = pair_of("alpha", "official")
    bench = Bench(pair.fast, len(LENGTHS), 320, 32)
    bench.feed([(i, pair.ids[:n]) for i, n in enumerate(LENGTHS)])
    blocks, slots = bench.caches.blocks.clone(), bench.caches.slots.clone()
    none = torch.zeros(8, dtype=torch.int64)
    state = slot_state(bench, pair)
    inputs = device_inputs(none, none, *state, layout_form(bench.layout), most_tokens=256)
    with torch.inference_mode():
        logits = pair.fast.forward(inputs, bench.caches, none)
    assert torch.isfinite(logits).all()
    assert torch.equal(bench.caches.blocks, blocks)
    assert torch.equal(bench.caches.slots[1:], slots[1:])
