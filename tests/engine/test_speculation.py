"""How many drafts to verify: the optimum by brute force, cost curves, switching off, simulation."""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer.bench.speculation import NODE_CURVE, Policy, simulate
from deepinfer.engine.costs import CostCurve, load_curve, measure_curve, save_curve
from deepinfer.engine.request import DraftCounts
from deepinfer.engine.speculation import Choice, DraftPlanner, SpeculationStats, choose_rows

FLAT = CostCurve((1, 1000), (1.0, 1.0))
LINEAR = CostCurve((1, 1000), (1.0, 1000.0))
STEPPED = CostCurve((1, 2, 4, 8), (1.0, 1.1, 1.3, 3.0), padded=True)


def brute_force(
    reach: list[list[float]], curve: CostCurve, extra: float, most: int | None
) -> float:
    """The best rate over every way to choose prefixes."""
    best = 0.0
    for counts in itertools.product(*(range(len(r) + 1) for r in reach)):
        rows = len(reach) + sum(counts)
        seconds = float(curve.step_s(rows)) + extra
        if not math.isfinite(seconds) or (most is not None and rows > max(most, len(reach))):
            continue
        expected = len(reach) + sum(sum(r[:c]) for r, c in zip(reach, counts, strict=True))
        best = max(best, expected / seconds)
    return best


@settings(max_examples=150, deadline=None)
@given(
    confidences=st.lists(st.lists(st.floats(0, 1), max_size=3), min_size=1, max_size=4),
    times=st.lists(st.floats(0.05, 5), min_size=3, max_size=6),
    padded=st.booleans(),
    extra=st.sampled_from([0.0, 0.7]),
    most=st.sampled_from([None, 1, 5, 9]),
)
def test_the_choice_is_the_optimum(
    confidences: list[list[float]],
    times: list[float],
    padded: bool,
    extra: float,
    most: int | None,
) -> None:
    reach = [list(itertools.accumulate(row, lambda a, b: a * b)) for row in confidences]
    sizes = (4, 6, 9, 12, 16, 20)[: len(times)]
    curve = CostCurve(sizes, tuple(times), padded=padded)
    counts, expected, seconds = choose_rows(reach, curve, max_rows=most, extra_s=extra)
    assert all(0 <= c <= len(r) for c, r in zip(counts, reach, strict=True))
    told = len(reach) + sum(sum(r[:c]) for r, c in zip(reach, counts, strict=True))
    assert expected == pytest.approx(told)
    assert seconds == pytest.approx(float(curve.step_s(len(reach) + sum(counts))) + extra)
    assert expected / seconds == pytest.approx(brute_force(reach, curve, extra, most))


def test_plain_cases() -> None:
    reach = [[0.9, 0.8], [0.5, 0.1]]
    assert choose_rows(reach, FLAT)[0] == [2, 2], "rows cost nothing"
    assert choose_rows(reach, LINEAR)[0] == [0, 0], "a row costs as much as it can bring"
    assert choose_rows(reach, FLAT, max_rows=3)[0] == [1, 0]
    assert choose_rows(reach, STEPPED)[0] == [2, 0], "four rows fit, the next size is dear"
    assert choose_rows(reach, FLAT, max_rows=1)[0] == [0, 0], "each sequence has its row"
    assert choose_rows([[]], FLAT)[0] == [0]
    zero = [[0.0, 0.0]]
    assert choose_rows(zero, FLAT)[0] == [0], "fewest rows on ties"


def test_curves() -> None:
    curve = CostCurve((2, 4, 10), (1.0, 0.5, 3.0), (1, 3), (0.1, 0.3))
    assert curve.seconds == (1.0, 1.0, 3.0), "a dip is lifted"
    assert [float(curve.step_s(n)) for n in (1, 2, 3, 7, 10)] == pytest.approx([1, 1, 1, 2, 3])
    assert float(curve.step_s(13)) == pytest.approx(4.0), "the last slope goes on"
    assert float(curve.step_s(10, slope=0.1)) == pytest.approx(4.0)
    assert [curve.draft_s(n) for n in (1, 2, 5)] == pytest.approx([0.1, 0.2, 0.5])
    assert [float(t) for t in STEPPED.step_s([1, 3, 8, 9])] == [1.0, 1.3, 3.0, math.inf]
    text = str(curve)
    assert "rows" in text and "3000.000" in text and "100.000" in text
    for rows, seconds in (((), ()), ((1, 1), (1.0, 2.0)), ((1,), (math.nan,)), ((0,), (1.0,))):
        with pytest.raises(ValueError):
            CostCurve(rows, seconds)


def test_measuring_drops_the_extremes() -> None:
    now = 0.0
    calls: list[int] = []

    def run(size: int) -> None:
        nonlocal now
        calls.append(size)
        slow = 100.0 if len(calls) == 3 else 0.0  # one slow run
        now += size + slow

    def draft(size: int) -> None:
        nonlocal now
        now += size / 10

    curve = measure_curve(run, draft, (2, 8), (1, 2), clock=lambda: now)
    assert curve.seconds == pytest.approx((2.0, 8.0))
    assert curve.draft_seconds == pytest.approx((0.1, 0.2))
    assert len(calls) == 12, "one to warm up and five measured, each size"


def test_curves_on_disk(tmp_path: Path) -> None:
    file = tmp_path / "deep" / "curve.json"
    mark = {"model": "abc", "threads": 1, "sizes": (1, 2)}
    assert load_curve(file, mark, 10.0) is None
    save_curve(file, STEPPED, mark)
    assert load_curve(file, mark, 10.0) == STEPPED
    assert [f.name for f in file.parent.iterdir()] == ["curve.json"]
    assert load_curve(file, {**mark, "threads": 2}, 10.0) is None, "of something else"
    made = json.loads(file.read_text())["measured_at"]
    assert load_curve(file, mark, 10.0, made + 11) is None, "too old"
    assert load_curve(file, mark, 10.0, made - 5) is None, "from the future"
    for broken in ("", "{", "[]", '{"format": 1}', file.read_text().replace("1.1", '"x"')):
        file.write_text(broken)
        assert load_curve(file, mark, 10.0) is None


@pytest.mark.parametrize(
    "change",
    [
        {"rows": [1, math.inf]},
        {"seconds": [1, 10**400]},
        {"seconds": [0.0, 0.0]},
        {"seconds": [0.1]},
        {"rows": None},
        {"measured_at": 1e15},
        "[" * 100_000,
        "[]",
        "",
    ],
    ids=lambda change: str(change)[:30],
)
def test_damaged_curves_on_disk_are_measured_again(tmp_path: Path, change: Any) -> None:
    path = tmp_path / "curve.json"
    save_curve(path, CostCurve((1, 2), (0.1, 0.2)), {"model": "a"})
    told = json.loads(path.read_text())
    assert load_curve(path, {"model": "a"}, 100) is not None
    path.write_text(change if isinstance(change, str) else json.dumps({**told, **change}))
    assert load_curve(path, {"model": "a"}, 100) is None


def test_confidences_that_are_not_numbers_count_as_none() -> None:
    """Damaged draft blocks cost time, never output."""
    planner = DraftPlanner(2, variable=True, curve=LINEAR)
    bad = (math.nan, 0.5)
    for _ in range(3):
        choice = planner.choose([bad, (0.9, 0.9)])
        planner.count([((2, 2, 0, 1), bad)])
    assert choice.budget == 0
    told = planner.summary()
    json.dumps(told, allow_nan=False)
    assert told["calibration"] == [{"confidence": 0.0, "accepted": 0.0, "count": 3}]


def test_a_bonus_token_is_one_that_was_kept() -> None:
    stats = SpeculationStats(3)
    ended = (3, 2, 2, 2)  # by its second draft
    outcomes = [(3, 2, 2, 3), ended, (3, 2, 1, 1)]
    stats.add([(outcome, ()) for outcome in outcomes])
    told = stats.summary()
    assert (told["bonus"], told["tokens"], told["wasted_rows"]) == (1, 6, 1)
    request = DraftCounts.of(Counter(outcomes)).to_json()
    assert request == {name: told[name] for name in request}
    assert request["proposed"] == [3, 3, 3] and request["accepted"] == [3, 2, 0]
    assert DraftCounts.of({}).to_json()["mean_accepted_length"] is None


def test_fixed_planners() -> None:
    rows = [(0.5, 0.5)] * 3
    assert DraftPlanner(0).choose(rows) == Choice(0, 0, False)
    assert DraftPlanner(2).choose(rows) == Choice(2, None, True)
    assert DraftPlanner(2, variable=True).choose(rows) == Choice(2, None, True), "no curve"
    assert DraftPlanner(2, variable=True, curve=FLAT).choose([]) == Choice(2, None, True)


def test_sequences_near_their_limit_have_fewer_drafts() -> None:
    planner = DraftPlanner(3, variable=True, curve=FLAT)
    assert planner.choose([(0.9, 0.9, 0.9), (0.8,)]).budget == 4


def test_sequences_without_reports_count_with_the_mean() -> None:
    planner = DraftPlanner(2, variable=True, curve=FLAT)
    assert planner.choose([(), ()]) == Choice(2, 4, True)
    planner = DraftPlanner(2, variable=True, curve=LINEAR, patience=1000)
    assert planner.choose([(0.1, 0.1), ()]).budget == 0


def test_the_budget_of_the_lagging_planner_ignores_the_present() -> None:
    dear = CostCurve((1, 1000), (10.0, 1009.0))
    one, two = [(0.9, 0.9)] * 4, [(0.0, 0.0)] * 4
    planner = DraftPlanner(2, variable=True, curve=dear, lag=True)
    planner.choose(one)
    now = planner.choose(two)
    assert now.budget == 8, "from the confidences before"
    assert planner.choose(one).budget == 0


def test_drafting_goes_off_where_it_does_not_pay_and_comes_back() -> None:
    curve = CostCurve((1, 4, 1000), (1.0, 1.0, 997.0), (1, 1000), (0.2, 20.0))
    planner = DraftPlanner(3, variable=True, curve=curve, patience=4, probe_steps=50)
    good = (0.9, 0.9, 0.9)
    assert planner.choose([good]).budget == 3
    busy = [(0.3, 0.3, 0.3)] * 100
    choices = [planner.choose(busy) for _ in range(8)]
    assert not planner.is_drafting and planner.times_switched_off == 1
    assert choices[-1] == Choice(0, 0, False)
    assert planner.summary()["drafting"] is False
    assert planner.choose([()]) == Choice(3, 0, True), "one sequence again: it pays at once"
    for _ in range(9):
        planner.choose(busy)
    assert not planner.is_drafting
    probes = [planner.choose([()] * 100).propose for _ in range(60)]
    assert sum(probes) >= 1, "looked again after a while"


def test_measured_times_move_the_curve() -> None:
    planner = DraftPlanner(2, variable=True, curve=FLAT)
    for _ in range(64):
        planner.observe(8, 4, False, 1.0 + 8 * 0.25)
    assert planner.slope == pytest.approx(0.25)
    told = planner.summary()
    assert told["steps_by_rows"] == {"8-15": 64} and told["measured_step_s"] == 3.0
    # The first 32 were told by the curve alone, the others with what was learned.
    assert told["predicted_step_s"] == pytest.approx((32 * 1.0 + 32 * 3.0) / 64)
    for _ in range(512):
        planner.observe(8, 4, False, 0.9)
    assert planner.slope == 0.0, "never below the curve"


def test_what_every_step_takes_is_no_cost_of_rows() -> None:
    """Two sizes tell a constant from a slope; the constant leaves large steps worth it."""
    planner = DraftPlanner(2, variable=True, curve=FLAT)
    for _ in range(64):
        planner.observe(1, 1, False, 1.0 + 0.5)
        planner.observe(4, 2, False, 1.0 + 0.5)
    assert planner.slope == pytest.approx(0.0) and planner.offset_s == pytest.approx(0.5)
    for _ in range(512):
        planner.observe(1, 1, False, 1.0 + 0.5 + 0.1)
        planner.observe(4, 2, False, 1.0 + 0.5 + 0.4)
    assert planner.slope == pytest.approx(0.1) and planner.offset_s == pytest.approx(0.5)


@pytest.mark.parametrize(("drafted_s", "pays"), [(2.5, False), (1.5, True)])
def test_what_steps_really_take_decides(drafted_s: float, pays: bool) -> None:
    """The curve says that drafts cost nothing; two tokens a sequence are found to take so long."""
    planner = DraftPlanner(2, variable=True, curve=FLAT, probe_steps=100)
    drafting = []
    for _ in range(400):
        choice = planner.choose([(0.6, 0.5)] * 8)
        if choice.budget:
            planner.observe(24, 8, True, drafted_s)
        elif not choice.propose:
            planner.observe(8, 8, False, 1.0)
        drafting.append(choice.propose)
    assert not all(drafting[:40]), "plain steps were tried"
    share = sum(drafting[60:]) / len(drafting[60:])
    assert share == 1 if pays else share < 0.4, share
    assert (planner.times_switched_off == 0) == pays
    if not pays:
        assert "would bring 0." in str(planner.note)


def test_counts() -> None:
    stats = SpeculationStats(3)
    stats.add([((3, 3, 3, 4), (0.9, 0.8, 0.7)), ((3, 2, 0, 1), (0.2, 0.9)), ((0, 0, 0, 1), ())])
    told = stats.summary()
    assert told["proposed"] == [2, 2, 2] and told["verified"] == [2, 2, 1]
    assert told["accepted"] == [1, 1, 1] and told["bonus"] == 1 and told["wasted_rows"] == 2
    assert told["rows"] == 8 and told["tokens"] == 6 and told["steps"] == 3
    assert told["mean_accepted_length"] == pytest.approx(2.0)
    assert told["acceptance"] == pytest.approx(3 / 5)
    # tried: 0.9 hit, 0.8 hit, 0.7 hit, 0.2 missed; what stands behind a miss says nothing
    assert sum(c["count"] for c in told["calibration"]) == 4  # type: ignore[attr-defined]
    assert told["calibration_error"] == pytest.approx((0.1 + 0.2 + 0.3 + 0.2) / 4)
    json.dumps(told)


def test_a_saturated_device_gains_by_choosing_rows() -> None:
    """At the original's operating point (three of four drafts right) and at full load."""
    for sequences in (128, 256):
        fixed = simulate("fixed", sequences, 0.75, steps=120)
        assert fixed.accepted_length == pytest.approx(3.29, abs=0.1)
        for spread in (2.0, 1e6):  # confidences that differ, and all alike
            chosen = simulate("variable", sequences, 0.75, steps=120, spread=spread)
            assert chosen.tokens_per_s >= 1.04 * fixed.tokens_per_s


@pytest.mark.parametrize("acceptance", [0.05, 0.3, 0.75, 0.95])
@pytest.mark.parametrize("sequences", [1, 8, 256])
def test_choosing_rows_never_costs_much(acceptance: float, sequences: int) -> None:
    steps = 3000 // sequences if sequences < 256 else 400
    policies: tuple[Policy, ...] = ("off", "fixed", "variable")
    rates = {
        policy: simulate(policy, sequences, acceptance, steps=steps).tokens_per_s
        for policy in policies
    }
    best = max(rates["off"], rates["fixed"])
    noise = 0.03 if sequences == 1 else 0.005  # of so many random tokens
    assert rates["variable"] >= (0.99 - noise) * best


def test_the_simulated_device_is_that_of_the_design() -> None:
    """128 sequences, six rows each: 26.0 ms and 4.6 ms of communication, 13 760 tokens/s."""
    fixed = simulate("fixed", 128, 0.75, steps=400)
    assert fixed.tokens_per_s == pytest.approx(13_760, rel=0.02)
    assert float(NODE_CURVE.step_s(768)) + NODE_CURVE.draft_s(128) == pytest.approx(30.6e-3)
