"""Runner: what reaches the model and the sampler, and what comes back, with a stand-in model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

import deepinfer.engine.batch as batch_module
import deepinfer.engine.runner as runner_module
from deepinfer.engine.plan import (
    FROM_SLOT,
    Admission,
    Masks,
    RowPlan,
    StepKind,
    StepPlan,
    StepResult,
)
from deepinfer.engine.request import SamplingParams
from deepinfer.engine.runner import Runner
from deepinfer.engine.state import SlotState
from deepinfer.errors import RequestError
from deepinfer.model.fast.inputs import DecodeRows, SequenceRows
from deepinfer.sampling.sampler import Sampler

VOCAB = 20
CPU = torch.device("cpu")


@dataclass
class FakeModel:
    """Logits peak at (last token + 1); tokens of `poisoned` give NaN."""

    poisoned: set[int] = field(default_factory=set)
    seen: list[tuple[list[Any], bool]] = field(default_factory=list)
    diagnosed: list[list[int]] = field(default_factory=list)

    def forward(self, inputs: Any, caches: Any, logits_rows: Tensor) -> Tensor:
        sequences, _ = inputs
        self.seen.append(inputs)
        flat = [token for sequence in sequences for token in sequence.token_ids]
        logits = torch.zeros(len(logits_rows), VOCAB)
        for row, flat_row in enumerate(logits_rows.tolist()):
            logits[row, (flat[flat_row] + 1) % VOCAB] = 5.0
            if flat[flat_row] in self.poisoned:
                logits[row, 3] = math.nan
        return logits

    def diagnose(self, inputs: Any, caches: Any) -> str:
        self.diagnosed.append([t for sequence in inputs[0] for t in sequence.token_ids])
        return "layer 5, feed-forward"


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> FakeModel:
    def build(sequences: Sequence[Any], decode: bool, layout: Any, device: Any, replay: str) -> Any:
        return list(sequences), decode

    def build_decode(rows: DecodeRows, layout: Any, device: Any) -> Any:
        assert rows.counts is None
        parts = zip(rows.slots, rows.starts, rows.token_ids, rows.blocks, strict=True)
        return [SequenceRows(int(s), int(p), [int(t)], b.tolist()) for s, p, t, b in parts], True

    monkeypatch.setattr(batch_module, "build_inputs", build)
    monkeypatch.setattr(batch_module, "decode_inputs", build_decode)
    monkeypatch.setattr(runner_module, "build_inputs", build)
    return FakeModel()


def make_runner(model: FakeModel, **options: Any) -> Runner:
    """A runner without caches."""
    sampler = Sampler(VOCAB, 5, CPU)
    state = SlotState(5, 0, CPU)
    return Runner(model, None, Layout(), sampler, state, CPU, **options)  # type: ignore[arg-type]


class Layout:
    """As much of a layout as a batch needs."""

    tokens_per_block = 128


def run(runner: Runner, plan: StepPlan, masks: Masks | None = None) -> StepResult:
    """The outcome of a plan."""
    return runner.run(plan, lambda: masks)


def row(slot: int, start: int, token_ids: list[int], samples: bool = True) -> RowPlan:
    return RowPlan(100 + slot, slot, start, token_ids, (slot,), samples)


def going_on(slot: int) -> RowPlan:
    return RowPlan(100 + slot, slot, FROM_SLOT, (), (slot,), True)


def admit(slot: int, prompt: int, **params: Any) -> Admission:
    sampling = SamplingParams(**{"temperature": 0, **params})
    eos = () if sampling.ignore_eos else (1,)
    return Admission(
        slot,
        prompt,
        sampling,
        seed=0,
        limit=prompt + sampling.max_tokens,
        ending_ids=(*eos, *sampling.stop_ids),
        length=prompt,
        history=tuple(range(prompt)),
    )


def test_rows_positions_and_inner_chunks(model: FakeModel) -> None:
    runner = make_runner(model)
    plan = StepPlan(
        0,
        StepKind.PREFILL,
        (row(2, 0, [4, 5, 6]), row(1, 8, [7, 9]), row(3, 0, [2], samples=False)),
        (admit(2, 3), admit(3, 9), admit(1, 10, forced_token_ids=[17])),
    )
    result = run(runner, plan)
    sequences, decode = model.seen[0]
    assert not decode
    assert [(s.slot, s.start, list(s.token_ids), list(s.blocks)) for s in sequences] == [
        (2, 0, [4, 5, 6], [2]),
        (1, 8, [7, 9], [1]),
        (3, 0, [2], [3]),
    ]
    # The second row draws position 10, the first output of its request: the forced id.
    assert [(r.request_id, r.token_ids) for r in result.rows] == [(102, (7,)), (101, (17,))]
    assert result.step_id == 0
    again = run(runner, StepPlan(1, StepKind.DECODE, (going_on(1),)))
    assert model.seen[1][1] and again.rows[0].token_ids == (18,)


def test_a_step_of_inner_chunks_samples_nothing(model: FakeModel) -> None:
    plan = StepPlan(0, StepKind.PREFILL, (row(1, 0, [4, 5], samples=False),), (admit(1, 9),))
    assert run(make_runner(model), plan).rows == ()


def test_each_row_reports_what_it_asked_for(model: FakeModel) -> None:
    runner = make_runner(model)
    admissions = (
        admit(1, 1),
        admit(2, 1, logprobs=True),
        admit(3, 1, top_logprobs=2),
        admit(4, 1, top_logprobs=3),
    )
    rows = tuple(row(slot, 0, [slot]) for slot in (1, 2, 3, 4))
    a, b, c, d = run(runner, StepPlan(0, StepKind.PREFILL, rows, admissions)).rows
    assert a.logprobs is None and a.top_logprobs is None
    assert b.logprobs is not None and b.top_logprobs is None
    assert c.top_logprobs is not None and [i for i, _ in c.top_logprobs[0]] == [4, 0]
    assert d.top_logprobs is not None and [i for i, _ in d.top_logprobs[0]] == [5, 0, 1]
    expected = 5.0 - math.log(math.exp(5.0) + VOCAB - 1)
    assert b.logprobs[0] == pytest.approx(expected, abs=1e-5)
    assert d.top_logprobs[0][0][1] == d.logprobs[0]  # type: ignore[index]


def test_min_tokens_masks_the_end(model: FakeModel) -> None:
    runner = make_runner(model)
    plan = StepPlan(0, StepKind.PREFILL, (row(1, 0, [0]),), (admit(1, 1, min_tokens=1),))
    assert run(runner, plan).rows[0].token_ids != (1,)
    free = StepPlan(1, StepKind.PREFILL, (row(1, 0, [0]),), (admit(1, 1),))
    assert run(runner, free).rows[0].token_ids == (1,)
    ignoring = (admit(1, 1, min_tokens=1, ignore_eos=True),)
    through = StepPlan(2, StepKind.PREFILL, (row(1, 0, [0]),), ignoring)
    assert run(runner, through).rows[0].token_ids == (1,)


def test_a_bad_row_is_explained_and_the_others_go_on(model: FakeModel) -> None:
    model.poisoned = {6, 8}
    asked = 0

    def find() -> str:
        nonlocal asked
        asked += 1
        return "layers.5.ffn.gate.weight"

    runner = make_runner(model, find_bad_weight=find)
    rows = (row(1, 0, [2, 6]), row(2, 0, [3]), row(3, 0, [8]))
    admissions = (admit(1, 2), admit(2, 1), admit(3, 1))
    results = run(runner, StepPlan(0, StepKind.PREFILL, rows, admissions)).rows
    assert [r.token_ids for r in results] == [(), (4,), ()]
    for bad in (results[0], results[2]):
        assert "layer 5" in (bad.error or "") and "layers.5.ffn.gate.weight" in (bad.error or "")
    assert model.diagnosed == [[2, 6]], "one row explains the step"
    run(runner, StepPlan(1, StepKind.PREFILL, (row(4, 0, [8]),), (admit(4, 1),)))
    assert asked == 1


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_processor_that_spoils_its_logits_ends_its_own_request(
    model: FakeModel, value: float
) -> None:
    def factory() -> Any:
        return lambda ids, logits: torch.full_like(logits, value)

    runner = make_runner(model)
    admissions = (admit(1, 1, logits_processors=[factory]), admit(2, 1))
    rows = (row(1, 0, [3]), row(2, 0, [3]))
    bad, good = run(runner, StepPlan(0, StepKind.PREFILL, rows, admissions)).rows
    assert bad.token_ids == () and "logits processor returned" in (bad.error or "")
    assert good.token_ids == (4,) and not model.diagnosed
    again = run(runner, StepPlan(1, StepKind.DECODE, (going_on(1), going_on(2)))).rows
    assert [r.token_ids for r in again] == [(), (5,)], "the spoilt one has ended on the device too"


@pytest.mark.parametrize(
    ("returned", "told"),
    [
        (None, "returned NoneType"),
        (torch.zeros(3), "returned a tensor of shape .3., not"),
    ],
)
def test_a_processor_that_returns_no_logits_is_named(
    model: FakeModel, returned: object, told: str
) -> None:
    def clumsy(ids: Any, logits: Any) -> Any:
        return returned

    admission = admit(1, 1, logits_processors=[lambda: clumsy])
    plan = StepPlan(0, StepKind.PREFILL, (row(1, 0, [3]),), (admission,))
    with pytest.raises(RequestError, match=f"clumsy failed: TypeError: it {told}"):
        run(make_runner(model), plan)
