"""The index tensors of a decode step, row by row against their definitions."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer.cache.layout import CacheLayout
from deepinfer.config.load import load_model_config, resolve_model
from deepinfer.kernels.rows import ROW_BLOCK
from deepinfer.model.fast.inputs import History, ModelInputs, SequenceRows, build_inputs

BLOCK = 16


@pytest.fixture(scope="module")
def layout() -> CacheLayout:
    return CacheLayout.build(load_model_config(resolve_model("demo")), "official", BLOCK)


@st.composite
def steps(draw: st.DrawFn) -> list[SequenceRows]:
    found = []
    most = draw(st.sampled_from([1, 7]))
    for slot in range(1, 1 + draw(st.integers(1, ROW_BLOCK + 3))):
        start = draw(st.integers(0, 200))
        count = draw(st.integers(1, most))
        held = -(-(start + count) // BLOCK) + draw(st.integers(0, 2))
        found.append(
            SequenceRows(slot, start, list(range(count)), [100 * slot + i for i in range(held)])
        )
    return found


def check_history(
    found: History, step: list[SequenceRows], depth: int, length: int, rows: list[tuple[int, int]]
) -> None:
    loaded = [
        -1 if s.start - back < 0 else s.slot * length + (s.start - back) % length
        for s in step
        for back in range(depth, 0, -1)
    ]
    assert found.load.tolist() == loaded
    # What a row sees, as (sequence, position), for positions before 0 too.
    held = [(b, s.start - back) for b, s in enumerate(step) for back in range(depth, 0, -1)]
    held += [(b, position) for b, position in rows]
    for (b, position), row in zip(rows, found.rows.tolist(), strict=True):
        assert [held[i] for i in row] == [(b, position - back) for back in range(depth + 1)]
    assert found.store_rows.tolist() == list(range(len(rows)))
    assert found.store.tolist() == [step[b].slot * length + p % length for b, p in rows]


@settings(max_examples=40, deadline=None)
@given(step=steps())
def test_every_row_of_a_decode_step(layout: CacheLayout, step: list[SequenceRows]) -> None:
    inputs: ModelInputs = build_inputs(step, True, layout)
    rows = [(b, s.start + i) for b, s in enumerate(step) for i in range(len(s.token_ids))]
    window, ring = layout.window, layout.ring_length
    assert inputs.num_rows == len(rows) and inputs.row_seq.tolist() == [b for b, _ in rows]
    assert inputs.positions.tolist() == [p for _, p in rows]
    assert inputs.token_ids.tolist() == [t for s in step for t in s.token_ids]
    firsts = [max(p - window + 1, 0) for _, p in rows]
    seen = [range(first, p + 1) for first, (_, p) in zip(firsts, rows, strict=True)]
    for i, (b, position) in enumerate(rows):
        base = step[b].slot * ring
        slots = [base + p % ring for p in seen[i]]
        padding = [-1] * (window - len(slots))
        assert inputs.window_slots[i].tolist() == slots + padding
        assert int(inputs.window_store[i]) == base + position % ring
        if inputs.window_runs is not None:
            begin = 2 * base + firsts[i] % ring
            assert (
                inputs.window_runs[i].tolist() == [begin + j for j in range(len(slots))] + padding
            )
    assert (inputs.window_runs is not None) == (len(rows) <= ROW_BLOCK)
    for ratio, part in inputs.ratios.items():
        assert part.visible.tolist() == [(p + 1) // ratio for _, p in rows]
        ends = [(i, b, p) for i, (b, p) in enumerate(rows) if (p + 1) % ratio == 0]
        assert part.emit_rows.tolist() == [i for i, _, _ in ends]
        assert part.emit_starts.tolist() == [p + 1 - ratio for _, _, p in ends]
        flat = [
            step[b].blocks[p // BLOCK] * BLOCK // ratio + p % BLOCK // ratio for _, b, p in ends
        ]
        assert part.emit_entries.tolist() == flat
        lengths = [s.start + len(s.token_ids) for s in step]
        assert part.counts == tuple(length // ratio for length in lengths)
        for b, entries in enumerate(part.entries):
            assert entries.tolist() == [
                step[b].blocks[j * ratio // BLOCK] * (BLOCK // ratio) + j % (BLOCK // ratio)
                for j in range(part.counts[b])
            ]
        for b, length in enumerate(lengths):
            assert not torch.any(part.blocks[b, -(-length // BLOCK) :])
    assert inputs.tail is not None and inputs.engram is not None and layout.engram_tail is not None
    check_history(inputs.tail, step, 1, layout.tails[0][1].length, rows)
    check_history(inputs.engram, step, layout.engram_history, layout.engram_tail.length, rows)
