"""BatchBuilder: the arrays that it keeps from step to step against plans and slot state."""

from __future__ import annotations

import random

import pytest
import torch

from deepinfer.cache.layout import CacheLayout
from deepinfer.config.load import load_model_config, resolve_model
from deepinfer.engine.batch import BatchBuilder
from deepinfer.engine.plan import FROM_SLOT, Admission, RowPlan, StepKind, StepPlan
from deepinfer.engine.request import SamplingParams
from deepinfer.engine.state import SlotState
from deepinfer.model.fast.inputs import SequenceRows, build_inputs

BLOCK, SLOTS = 16, 9
CPU = torch.device("cpu")


@pytest.mark.parametrize("num_drafts", [0, 3])
@pytest.mark.parametrize("seed", range(3))
def test_steps_of_changing_rows(seed: int, num_drafts: int) -> None:
    """Sequences come, grow, change slots, end on the device and go."""
    rng = random.Random(seed)
    layout = CacheLayout.build(load_model_config(resolve_model("demo")), "official", BLOCK)
    state, builder = SlotState(SLOTS, num_drafts, CPU), BatchBuilder(layout, CPU)
    rows: dict[int, RowPlan] = {}
    params = SamplingParams()
    for number in range(60):
        for slot in range(1, SLOTS):
            if slot not in rows or rng.random() < 0.1:
                length = rng.randint(1, 150)
                state.admit(Admission(slot, 1, params, 0, limit=length + 50, length=length))
                blocks = tuple(rng.sample(range(1, 999), (length + 60) // BLOCK + 1))
                rows[slot] = RowPlan(number, slot, FROM_SLOT, (), blocks, True, num_drafts)
            elif rng.random() < 0.1:
                more = (*rows[slot].blocks, rng.randint(1, 999))
                fewer = rng.randint(0, num_drafts)
                rows[slot] = RowPlan(0, slot, FROM_SLOT, (), more, True, fewer)
            elif rng.random() < 0.1:
                state.alive[slot] = False
        planned = rng.sample(sorted(rows), rng.randint(1, len(rows)))
        if number % 5 == 4:
            planned = planned[:1]
        if num_drafts:
            every = torch.arange(SLOTS)
            counts = torch.randint(0, num_drafts + 1, (SLOTS,))
            drafts = torch.randint(100, 200, (SLOTS, num_drafts))
            state.propose(every, drafts, counts, torch.zeros(SLOTS, num_drafts))
        plan = StepPlan(number, StepKind.DECODE, tuple(rows[slot] for slot in planned))
        for _ in range(2):  # the same rows again, as in most steps
            batch = builder.build(plan, state)
            alive = [slot for slot in planned if state.alive[slot]]
            want = []
            for slot in alive:
                start = int(state.length[slot]) - 1
                room = int(state.limit[slot]) - start - 2
                most = min(rows[slot].num_drafts, int(state.num_drafts[slot]), room)
                ids = [int(state.last_token[slot]), *state.drafts[slot, :most].tolist()]
                held = -(-(start + len(ids)) // BLOCK)
                want.append(SequenceRows(slot, start, ids, rows[slot].blocks[:held]))
            assert batch.rows == tuple(rows[slot] for slot in alive)
            if not want:
                assert batch.inputs is None
                continue
            inputs = build_inputs(want, True, layout)
            assert batch.inputs is not None
            for name in ("token_ids", "positions", "window_slots", "window_store", "row_seq"):
                assert torch.equal(getattr(batch.inputs, name), getattr(inputs, name)), name
            for ratio, part in inputs.ratios.items():
                assert torch.equal(batch.inputs.ratios[ratio].table, part.table)
            flat = [(s, s.start + 1 + i) for s in want for i in range(len(s.token_ids))]
            assert batch.row_slots == [s.slot for s, _ in flat]
            assert batch.positions == [position for _, position in flat]
            assert [batch.sequence(i)._replace(blocks=s.blocks) for i, s in enumerate(want)] == want
            state.length[torch.tensor(alive)] += 1
            state.alive &= state.length < state.limit
