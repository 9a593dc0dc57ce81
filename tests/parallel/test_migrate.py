"""Moves of experts: fewest, and no stage leaves an expert without a copy."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer.errors import ConfigError
from deepinfer.parallel.balance import plan_by_steps
from deepinfer.parallel.migrate import (
    Move,
    apply_stage,
    assign,
    plan_migration,
    relabel,
)
from deepinfer.parallel.placement import Placement, initial_placement, rank_loads


def drawn(rng: np.random.Generator, layers: int, experts: int, ranks: int, room: int) -> Placement:
    """Return a random placement: every expert once in random order, then copies."""
    rows = []
    for _ in range(layers):
        hands = [rng.permutation(experts)[:room] for _ in range(ranks)]
        if len(set(np.concatenate(hands).tolist())) < experts:
            order = rng.permutation(experts)
            hands = [order[np.arange(r * room, (r + 1) * room) % experts] for r in range(ranks)]
        rows.append(np.concatenate(hands))
    return Placement(rows, experts, ranks)


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Placement, Placement]:
    ranks, room = draw(st.integers(1, 6)), draw(st.integers(1, 5))
    experts = draw(st.integers(room, ranks * room))
    rng = np.random.default_rng(draw(st.integers(0, 2**16)))
    layers = draw(st.integers(1, 3))
    before = drawn(rng, layers, experts, ranks, room)
    return before, drawn(rng, layers, experts, ranks, room)


def held(plan: Placement) -> set[tuple[int, int, int]]:
    """Return every (layer, rank, expert)."""
    return {
        (layer, rank, int(expert))
        for layer in range(plan.num_layers)
        for rank in range(plan.num_ranks)
        for expert in plan.by_rank[layer, rank]
    }


@settings(max_examples=150, deadline=None)
@given(pair=pairs(), spare=st.integers(1, 3))
def test_every_stage_is_whole_and_no_move_is_wasted(
    pair: tuple[Placement, Placement], spare: int
) -> None:
    before, wanted = pair
    found = plan_migration(before, wanted, spare)
    at = before
    for stage in found.stages:
        serving = at.slots
        received = Counter(move.target // at.slots_per_rank for move in stage)
        assert received
        assert max(received.values()) <= spare
        assert len({(move.layer, move.target) for move in stage}) == len(stage)
        for move in stage:  # read from what serves: spare memory is all that is written
            assert serving[move.layer, move.source] == move.expert
            assert move.source // at.slots_per_rank != move.target // at.slots_per_rank
        at = apply_stage(at, stage)  # a Placement refuses an expert without a copy
        assert all(set(row.tolist()) == set(range(at.num_experts)) for row in at.slots)
    assert at == found.after
    assert held(at) == held(wanted)
    assert found.num_moves == len(held(wanted) - held(before))
    assert found.received().sum() == found.num_moves
    stayed = before.slots == at.slots
    for layer, slot in zip(*np.nonzero(~stayed), strict=True):
        rank = int(slot) // at.slots_per_rank
        assert (layer, rank, int(before.slots[layer, slot])) not in held(at)
    assert found == plan_migration(before, wanted, spare)
    assert plan_migration(at, wanted).stages == ()


@settings(max_examples=60, deadline=None)
@given(pair=pairs())
def test_relabel_saves_moves_and_changes_no_load(pair: tuple[Placement, Placement]) -> None:
    before, wanted = pair
    named = relabel(before, wanted)
    loads = np.arange(before.num_layers * before.num_experts).reshape(1, before.num_layers, -1)
    for layer in range(before.num_layers):
        assert sorted(map(sorted, named.by_rank[layer].tolist())) == sorted(
            map(sorted, wanted.by_rank[layer].tolist())
        )
    old, new = rank_loads(wanted, loads), rank_loads(named, loads)
    assert np.array_equal(np.sort(old), np.sort(new))
    moves = plan_migration(before, named).num_moves
    assert moves <= plan_migration(before, wanted).num_moves
    if before.num_ranks <= 4:
        least = sum(
            min(
                sum(
                    len(set(wanted.by_rank[layer, new]) - set(before.by_rank[layer, old]))
                    for old, new in enumerate(order)
                )
                for order in itertools.permutations(range(before.num_ranks))
            )
            for layer in range(before.num_layers)
        )
        assert moves == least


@settings(max_examples=60, deadline=None)
@given(size=st.integers(1, 6), seed=st.integers(0, 2**16), top=st.sampled_from([1, 3, 100]))
def test_assign_against_every_permutation(size: int, seed: int, top: int) -> None:
    value = np.random.default_rng(seed).integers(-top, top + 1, (size, size))
    found = assign(value)
    assert sorted(found.tolist()) == list(range(size))
    best = max(
        sum(int(value[row, column]) for row, column in enumerate(order))
        for order in itertools.permutations(range(size))
    )
    assert value[np.arange(size), found].sum() == best


def test_a_ring_goes_round_in_one_stage() -> None:
    before = Placement([[0, 1, 2, 3]], 4, 4)
    after = Placement([[3, 0, 1, 2]], 4, 4)
    found = plan_migration(before, after)
    assert len(found.stages) == 1
    assert found.num_moves == 4
    assert relabel(before, after) == before  # the same sets: nothing to move
    kept = relabel(before, after, nodes=4)  # a rank alone on its node keeps its name
    assert kept == after


def test_real_plans_move_less_after_relabelling() -> None:
    rng = np.random.default_rng(2)
    share = np.exp(rng.normal(0, 0.6, (3, 48)))
    share /= share.sum(axis=1, keepdims=True)
    loads = np.stack([rng.multinomial(4096, share) for _ in range(32)])
    first = plan_by_steps(loads[:16], 8, 64)
    second = plan_by_steps(loads[16:], 8, 64)
    plain = plan_migration(first, second)
    named = plan_migration(first, relabel(first, second), spare=2)
    assert named.num_moves < 0.85 * plain.num_moves
    assert named.after != first


def test_refused() -> None:
    start = initial_placement(1, 4, 2)
    with pytest.raises(ConfigError, match="other sizes"):
        plan_migration(start, initial_placement(2, 4, 2))
    with pytest.raises(ConfigError, match="spare memory"):
        plan_migration(start, start, 0)
    with pytest.raises(ConfigError, match="do not divide into 3 nodes"):
        relabel(start, start, 3)
    with pytest.raises(ConfigError, match="holds another expert"):
        apply_stage(start, [Move(0, 1, 0, 3)])
    with pytest.raises(ConfigError, match="no copy of experts"):
        apply_stage(start, [Move(0, 0, 0, 2)])
