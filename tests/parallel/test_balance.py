"""Placements: what always holds, small cases against every possibility, unseen steps."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from deepinfer.config.mesh import num_slots
from deepinfer.errors import ConfigError
from deepinfer.parallel.balance import (
    LoadWindow,
    _copies_by_steps,
    _weights,
    adapt,
    judge,
    plan_by_steps,
    plan_by_totals,
    refine,
)
from deepinfer.parallel.migrate import plan_migration, relabel
from deepinfer.parallel.placement import (
    UNIT,
    Placement,
    balancedness,
    choose_slots,
    initial_placement,
    logical_counts,
    rank_loads,
    token_keys,
)

Ints = NDArray[np.int64]


def skewed(seed: int, steps: int, layers: int, experts: int, rows: int = 512) -> Ints:
    rng = np.random.default_rng(seed)
    share = np.exp(rng.normal(0, 1, (layers, experts)))
    share /= share.sum(axis=1, keepdims=True)
    return np.stack([rng.multinomial(rows, share) for _ in range(steps)]).astype(np.int64)


def sound(plan: Placement) -> None:
    """Say in other words what a placement promises."""
    for layer in range(plan.num_layers):
        ranks = [set(row.tolist()) for row in plan.by_rank[layer]]
        assert all(len(held) == plan.slots_per_rank for held in ranks)
        assert set().union(*ranks) == set(range(plan.num_experts))
        assert plan.counts[layer].sum() == plan.num_slots
        for expert in range(plan.num_experts):
            slots = plan.physical[layer, expert]
            real = slots[slots >= 0]
            assert len(real) == plan.counts[layer, expert] == sum(expert in r for r in ranks)
            assert (slots[len(real) :] == -1).all()
            assert (np.diff(real) > 0).all()
            assert (plan.slots[layer, real] == expert).all()


@st.composite
def problems(draw: st.DrawFn) -> tuple[Ints, int, int, int]:
    nodes = draw(st.sampled_from([1, 1, 2, 3]))
    ranks = nodes * draw(st.integers(1, 4))
    experts = draw(st.integers(nodes, 14))
    smallest = nodes * -(-experts // nodes)
    least = -(-smallest // ranks)
    slots = ranks * draw(st.integers(least, max(least, experts // nodes)))
    if slots // ranks > experts // nodes:
        experts = experts // nodes * nodes
        slots = -(-experts // ranks) * ranks
    shape = (draw(st.integers(1, 5)), draw(st.integers(1, 2)), experts)
    top = draw(st.sampled_from([0, 1, 3, 1000]))
    rng = np.random.default_rng(draw(st.integers(0, 2**16)))
    return rng.integers(0, top + 1, shape), ranks, slots, nodes


@settings(max_examples=80, deadline=None)
@given(problem=problems(), trust=st.integers(0, 8))
def test_plans_are_sound_and_depend_on_nothing_else(
    problem: tuple[Ints, int, int, int], trust: int
) -> None:
    loads, ranks, slots, nodes = problem
    by_totals = plan_by_totals(loads, ranks, slots, nodes)
    by_steps = plan_by_steps(loads, ranks, slots, trust=trust)
    sound(by_totals)
    sound(by_steps)
    if nodes > 1:  # all copies of an expert on one node
        per_node = by_totals.slots.reshape(loads.shape[1], nodes, -1)
        for layer in per_node:
            assert sum(len(set(node.tolist())) for node in layer) == loads.shape[2]
    turned = np.ascontiguousarray(loads[::-1])
    for old, new in (
        (by_totals, plan_by_totals(turned.astype(np.int32), ranks, slots, nodes)),
        (by_steps, plan_by_steps(np.asfortranarray(turned), ranks, slots, trust=trust)),
    ):
        assert old == new
        assert old.digest == new.digest
    assert rank_loads(by_steps, loads).shape == (*loads.shape[:2], ranks)


@settings(max_examples=40, deadline=None)
@given(problem=problems(), seed=st.integers(0, 99), exchanges=st.integers(0, 5))
def test_refine_moves_little_and_never_makes_it_worse(
    problem: tuple[Ints, int, int, int], seed: int, exchanges: int
) -> None:
    loads, ranks, slots, _ = problem
    now = plan_by_totals(skewed(seed, 1, *loads.shape[1:]), ranks, slots)
    found = refine(now, loads, trust=8, exchanges=exchanges)
    sound(found)
    assert np.array_equal(found.counts, now.counts)
    assert ((found.slots != now.slots).sum(axis=1) <= 2 * exchanges).all()
    old, new = rank_loads(now, loads), rank_loads(found, loads)

    def cost(at: Ints) -> Ints:
        return np.asarray(at.max(axis=2).sum(axis=0) + at.sum(axis=0).max(axis=1))

    assert (cost(new) <= cost(old)).all()
    assert np.array_equal(old.sum(axis=2), new.sum(axis=2))


@settings(max_examples=60, deadline=None)
@given(problem=problems(), seed=st.integers(0, 99))
def test_adapt_gives_the_copies_that_loads_ask_for(
    problem: tuple[Ints, int, int, int], seed: int
) -> None:
    loads, ranks, slots, _ = problem
    now = plan_by_totals(skewed(seed, 1, *loads.shape[1:]), ranks, slots)
    found = adapt(now, loads, trust=8)
    sound(found)
    copies = _copies_by_steps(_weights(loads[:, 0], 8), slots, ranks)
    assert np.array_equal(found.counts[0], copies)
    assert found == adapt(now, np.ascontiguousarray(loads[::-1]).astype(np.int32), trust=8)
    stay = [set(o) & set(n) for o, n in zip(now.by_rank[0].tolist(), found.by_rank[0].tolist(),
                                             strict=True)]  # fmt: skip
    for rank, kept in enumerate(stay):  # what stays on a rank stays in its slot
        same = now.by_rank[0, rank] == found.by_rank[0, rank]
        assert set(now.by_rank[0, rank][same].tolist()) == kept


def test_adapt_is_as_good_as_a_new_plan_and_moves_a_fraction() -> None:
    rng = np.random.default_rng(0)
    share = np.exp(rng.normal(0, 0.8, 192))
    before = rng.multinomial(20_000, share / share.sum(), 32)[:, None]
    some = rng.choice(192, 20, replace=False)
    share[some] = share[np.roll(some, 1)]
    after = rng.multinomial(20_000, share / share.sum(), 48)[:, None]
    now = plan_by_steps(before, 16, 224)
    found, fresh = adapt(now, after[:32]), plan_by_steps(after[:32], 16, 224)
    old, new, best = (balancedness(plan, after[32:]) for plan in (now, found, fresh))
    assert new > best - 0.01 and new > old + 0.05
    assert plan_migration(now, found).num_moves < 0.25 * 224
    assert plan_migration(now, relabel(now, fresh)).num_moves > 0.5 * 224


@given(experts=st.integers(1, 40), ranks=st.integers(1, 12), wished=st.integers(0, 50))
def test_initial_placement(experts: int, ranks: int, wished: int) -> None:
    size = num_slots(experts, ranks, wished)
    assert size >= experts + wished > size - ranks
    if size // ranks > experts:
        with pytest.raises(ConfigError, match="too many"):
            initial_placement(1, experts, ranks, wished)
        return
    plan = initial_placement(2, experts, ranks, wished)
    sound(plan)
    assert plan.slots[1].tolist() == [slot % experts for slot in range(size)]


def every_placement(experts: int, ranks: int, room: int) -> list[tuple[tuple[int, ...], ...]]:
    """Return every way to fill the ranks, ranks being alike."""
    hands = list(itertools.combinations(range(experts), room))
    ways = itertools.combinations_with_replacement(hands, ranks)
    return [way for way in ways if {e for hand in way for e in hand} == set(range(experts))]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(
    ("experts", "ranks", "slots"), [(6, 2, 6), (6, 2, 8), (5, 3, 6), (6, 3, 9), (4, 4, 8)]
)
def test_against_every_possibility(seed: int, experts: int, ranks: int, slots: int) -> None:
    loads = skewed(seed, 6, 1, experts)
    least = min(
        int(rank_loads(Placement([sum(way, ())], experts, ranks), loads).max(axis=-1).sum())
        for way in every_placement(experts, ranks, slots // ranks)
    )
    found = plan_by_steps(loads, ranks, slots, trust=8)
    peak = int(rank_loads(found, loads).max(axis=-1).sum())
    assert least <= peak
    assert peak <= 1.12 * least, peak / least
    start = initial_placement(1, experts, ranks, slots - experts)
    assert peak <= int(rank_loads(start, loads).max(axis=-1).sum())


def test_hot_expert_gets_the_copies() -> None:
    loads = np.array([[[90, 10, 10, 10]]])
    plan = plan_by_totals(loads, 4, 8)
    assert plan.counts.tolist() == [[4, 2, 1, 1]]
    assert (plan_by_steps(loads, 4, 8).counts[0, 0]) == 4


def test_experts_that_are_busy_together_go_apart() -> None:
    loads = np.array([[[8, 8, 0, 0]], [[0, 0, 8, 8]]] * 4)
    plan = plan_by_steps(loads, 2, 4, trust=8)
    assert balancedness(plan, loads) == 1.0
    together = Placement(np.array([[0, 1, 2, 3]]), 4, 2)
    assert balancedness(together, loads) == 0.5


def test_small_case_of_totals_by_hand() -> None:
    """Twelve experts, sixteen slots, eight ranks, worked out on paper.

    Copies go to 8 (190), 10 (180), 3 (140), 1 (132); pairs then fill from the heaviest slot down.
    """
    loads = np.array([[[90, 132, 40, 140, 104, 39, 4, 73, 190, 84, 180, 95]]])
    plan = plan_by_totals(loads, 8, 16)
    assert plan.counts[0].tolist() == [1, 2, 1, 2, 1, 1, 1, 1, 2, 1, 2, 1]
    load = rank_loads(plan, loads)[0, 0] / UNIT
    assert load.sum() == loads.sum()
    assert load.max() <= 168


def test_a_stuck_copy_finds_room() -> None:
    """Two copies of the lightest expert are left when one rank alone has room."""
    loads = np.array([[[9, 9, 9, 9, 9, 9, 0]]])
    for ranks, slots in ((2, 8), (4, 12), (3, 21), (7, 42)):
        sound(plan_by_totals(loads, ranks, slots))
        sound(plan_by_steps(loads, ranks, slots))


def test_even_loads_and_no_loads() -> None:
    for loads in (np.zeros((3, 2, 8), np.int64), np.ones((1, 2, 8), np.int64)):
        sound(plan_by_steps(loads, 4, 12))
    assert balancedness(initial_placement(2, 8, 4), np.zeros((3, 2, 8), np.int64)) == 1.0
    sound(plan_by_steps(np.zeros((0, 1, 8), np.int64), 4, 12))


def test_copies_help_on_unseen_steps() -> None:
    loads = skewed(3, 48, 3, 32, 4096)
    seen, unseen = loads[:36], loads[36:]
    start = initial_placement(3, 32, 8, 8)
    for plan in (plan_by_steps(seen, 8, 40), plan_by_totals(seen, 8, 40)):
        assert balancedness(plan, unseen) > max(0.9, balancedness(start, unseen) + 0.1)
        gain = judge(start, plan, unseen, remaining_steps=1000, migration_rows=10_000)
        assert gain.worth_it
        assert gain.rows_planned < gain.rows_now
        few = judge(start, plan, unseen, remaining_steps=1, migration_rows=10_000)
        assert not few.worth_it
        assert not judge(plan, start, unseen, remaining_steps=10**6, migration_rows=0).worth_it


def test_evening_out_lowers_squares_and_pays_on_unseen_steps() -> None:
    """By how much plans lose to chance, no plan changes; by what they leave uneven, this does."""
    before, after = [], []
    rng = np.random.default_rng(0)
    share = np.exp(rng.normal(0, 0.5, 384))
    for _ in range(3):
        loads = rng.multinomial(24576, share / share.sum(), 24)[:, None]
        seen, unseen = loads[:16], loads[16:]
        raw, even = (plan_by_steps(seen, 64, 448, evenings=n) for n in (0, 400))
        mean = seen.sum(axis=0, keepdims=True)
        rough, smooth = (rank_loads(plan, mean).astype(float).std() for plan in (raw, even))
        assert smooth < 0.5 * rough
        before.append(balancedness(raw, unseen))
        after.append(balancedness(even, unseen))
    assert sum(after) > sum(before)


def test_trust_grows_with_what_chance_does_not_explain() -> None:
    rng = np.random.default_rng(0)
    chance = rng.multinomial(4096, np.full(32, 1 / 32), 64)[:, None]
    regular = np.zeros((64, 1, 32), np.int64)
    regular[::2, 0, :16] = regular[1::2, 0, 16:] = 256
    for loads, trust in ((chance, 1), (regular, 4)):
        told, free = (plan_by_steps(loads, 4, 32, trust=t) for t in (trust, None))
        assert told == free


def test_gate_at_its_margin() -> None:
    loads = np.array([[[6, 6, 0, 0]]])
    bad, good = Placement([[0, 1, 2, 3]], 4, 2), Placement([[0, 2, 1, 3]], 4, 2)
    at = judge(bad, good, loads, remaining_steps=10, migration_rows=40)
    assert (at.rows_now, at.rows_planned, at.worth_it) == (12.0, 6.0, False)
    assert judge(bad, good, loads, remaining_steps=10, migration_rows=39).worth_it
    assert not judge(bad, good, loads[:0], remaining_steps=10, migration_rows=0).worth_it


@given(size=st.integers(1, 6), added=st.integers(0, 15))
def test_window(size: int, added: int) -> None:
    window = LoadWindow(size, 1, 2)
    for step in range(added):
        window.add(np.array([[step, 1]]))
    kept = window.loads()
    assert kept[:, 0, 0].tolist() == list(range(max(0, added - size), added))
    assert window.full == (added >= size)
    seen, unseen = window.split()
    assert np.array_equal(np.concatenate([seen, unseen]), kept)
    assert len(unseen) == len(kept) // 4


def test_window_refuses() -> None:
    window = LoadWindow(2, 1, 2)
    with pytest.raises(ConfigError, match="not negative"):
        window.add(np.array([[1, -1]]))
    with pytest.raises(ConfigError, match=r"found shape \(2,\)"):
        window.add(np.array([1, 1]))
    with pytest.raises(ConfigError, match="at least one"):
        LoadWindow(0, 1, 2)


def test_choice_of_a_copy() -> None:
    loads = skewed(1, 8, 2, 12)
    plan = plan_by_steps(loads, 4, 20)
    rng = np.random.default_rng(0)
    chosen = np.stack([rng.permutation(12)[:3] for _ in range(4000)])
    keys = token_keys(77, np.arange(4000))
    slots = choose_slots(plan, 1, chosen, keys)
    assert np.array_equal(plan.slots[1][slots], chosen)
    order = rng.permutation(4000)[:100]  # another batch, another order: the same slots
    assert np.array_equal(choose_slots(plan, 1, chosen[order], keys[order]), slots[order])
    for expert in range(12):
        copies = plan.physical[1, expert]
        copies = copies[copies >= 0]
        rows = (chosen == expert).sum()
        found = np.array([(slots == slot).sum() for slot in copies])
        assert found.sum() == rows
        share = 1 / len(copies)
        assert (abs(found - rows * share) <= 4 * np.sqrt(rows * share)).all()
    padded = chosen.copy()
    padded[5] = -1
    assert (choose_slots(plan, 1, padded, keys)[5] == -1).all()
    counted = np.stack([np.bincount(slots.ravel(), minlength=20)] * 2)
    per_expert = logical_counts(plan, counted)[1]
    assert per_expert.tolist() == np.bincount(chosen.ravel(), minlength=12).tolist()
    assert not np.array_equal(token_keys(78, np.arange(9)), token_keys(77, np.arange(9)))


def test_digest_is_pinned() -> None:
    """Another machine, another day: the same plan has the same digest."""
    plan = plan_by_steps(skewed(5, 8, 2, 16) // 3 * 3, 4, 24)
    assert plan.digest == Placement(plan.slots.astype(np.int64), 16, 4).digest
    assert initial_placement(2, 16, 4, 8).digest == "4a0285d934dde3bb"
    assert plan.digest != initial_placement(2, 16, 4, 8).digest
    assert hash(plan) == hash(Placement(plan.slots, 16, 4))


def test_refused() -> None:
    with pytest.raises(ConfigError, match=r"no copy of experts \[3\]"):
        Placement([[0, 1, 2, 2]], 4, 4)
    with pytest.raises(ConfigError, match=r"twice on ranks \[1\]"):
        Placement([[0, 1, 2, 2]], 3, 2)
    with pytest.raises(ConfigError, match="not below 2"):
        Placement([[0, 2]], 2, 1)
    with pytest.raises(ConfigError, match="multiple of the 3 ranks"):
        Placement([[0, 1]], 2, 3)
    loads = np.ones((1, 1, 8), np.int64)
    for ranks, slots, nodes, said in (
        (3, 8, 1, "do not divide over 3 ranks"),
        (4, 8, 3, "into 3 nodes"),
        (4, 4, 1, "too few"),
        (4, 36, 1, "too many"),
    ):
        with pytest.raises(ConfigError, match=said):
            plan_by_totals(loads, ranks, slots, nodes)
    with pytest.raises(ConfigError, match="between 0 and 8"):
        plan_by_steps(loads, 4, 8, trust=9)
