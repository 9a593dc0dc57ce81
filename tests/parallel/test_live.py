"""Moving experts between ranks that are threads: bytes follow the maps, all change at one step."""

from __future__ import annotations

import pickle
import subprocess
import sys
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from deepinfer.errors import DeepInferError
from deepinfer.parallel import balance, live
from deepinfer.parallel.balance import LoadWindow
from deepinfer.parallel.comm import Group
from deepinfer.parallel.experts import ExpertMaps, LayerExperts
from deepinfer.parallel.live import BalancedLayer, LiveBalancer
from deepinfer.parallel.moves import _PROGRAM, Moves, plan_all, plan_moves
from deepinfer.parallel.placement import Placement, balancedness, initial_placement, rank_loads

LAYERS, EXPERTS, EXTRA, RANKS = 3, 16, 8, 4
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def few_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plan quickly: these tests are about what follows a plan."""
    monkeypatch.setattr(balance, "_TRIED", 2)


class Wires:
    """Where the threads of a group meet."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size, timeout=60)
        self.given: list[Any] = [None] * size
        self.mail: dict[tuple[int, int], deque[Tensor]] = defaultdict(deque)
        self.calls: list[list[str]] = [[] for _ in range(size)]

    def swap(self, place: int, value: Any) -> list[Any]:
        self.given[place] = value
        self.barrier.wait()
        found = list(self.given)
        self.barrier.wait()
        return found


class Waits:
    def __init__(self, work: Callable[[], None] = lambda: None) -> None:
        self.wait = work


class ThreadGroup:
    """As much of a Group as moving experts needs."""

    def __init__(self, wires: Wires, place: int) -> None:
        self.wires, self.place, self.size = wires, place, wires.size

    def all_gather(self, x: Tensor) -> Tensor:
        self.wires.calls[self.place].append("all_gather")
        return torch.stack(self.wires.swap(self.place, x))

    def all_reduce(self, x: Tensor) -> Tensor:
        self.wires.calls[self.place].append("all_reduce")
        return x.copy_(torch.stack(self.wires.swap(self.place, x.clone())).sum(0))

    def send(self, x: Tensor, place: int) -> Waits:
        self.wires.mail[self.place, place].append(x)
        return Waits()

    def receive(self, x: Tensor, place: int) -> Waits:
        def work() -> None:
            mail = self.wires.mail[place, self.place]
            while not mail:
                time.sleep(0.0005)
            x.copy_(mail.popleft())

        return Waits(work)


def content(layer: int, expert: int) -> Tensor:
    """What the weights of an expert look like."""
    return (torch.arange(6) * 16 + layer * EXPERTS + expert).to(torch.uint8).view(2, 3)


class Rank:
    """One rank: slots with weights, and a balancer."""

    def __init__(self, wires: Wires, place: int, **settings: Any) -> None:
        start = initial_placement(LAYERS, EXPERTS, RANKS, EXTRA)
        group = cast(Group, ThreadGroup(wires, place))
        self.layers: list[BalancedLayer] = []
        self.sums: list[Tensor] = []
        for number in range(LAYERS):
            maps = ExpertMaps.of(start, number, place, CPU)
            counts = torch.zeros(EXPERTS, dtype=torch.int64)
            experts = LayerExperts(maps, cast(Any, None), counts)
            codes = torch.stack([content(number, e) for e in maps.local_experts])
            scale = codes.float()[:, :1] + 0.5
            sums = codes.sum((1, 2))

            def derived(slot: int, codes: Tensor = codes, sums: Tensor = sums) -> None:
                sums[slot] = codes[slot].sum()

            self.sums.append(sums)
            self.layers.append(BalancedLayer(experts, (codes, scale), derived))
        self.balancer = LiveBalancer(self.layers, group, group, **settings)

    def between(self, was_decode: bool) -> None:
        """Stand between two steps, which take longer than a plan."""
        self.balancer.between(was_decode)
        if self.balancer._thread is not None:
            self.balancer._thread.join()

    def check(self) -> None:
        """Every slot holds what the maps say, and the maps are those of the placement."""
        placement = self.balancer.placements[0]
        for number, layer in enumerate(self.layers):
            maps = layer.experts.maps
            assert maps.phy2log.tolist() == placement.slots[number].tolist()
            assert maps.copies.tolist() == placement.counts[number].tolist()
            for slot, expert in enumerate(maps.local_experts):
                assert torch.equal(layer.parts[0][slot], content(number, expert))
                assert torch.equal(layer.parts[1][slot], content(number, expert)[:1].float() + 0.5)
                assert self.sums[number][slot] == content(number, expert).sum()


def run(
    shares: Callable[[int], np.ndarray[Any, Any]], steps: int, **settings: Any
) -> tuple[list[Rank], Wires, list[list[str]]]:
    """Take steps on all ranks; every fifth fills from prompts."""
    wires = Wires(RANKS)
    ranks = [Rank(wires, place, **settings) for place in range(RANKS)]
    digests: list[list[str]] = [[] for _ in ranks]

    def drive(place: int) -> None:
        rank, rng = ranks[place], np.random.default_rng(place)
        was_decode = False
        for step in range(steps):
            rank.between(was_decode)
            rank.check()
            digests[place].append(rank.balancer.placements[0].digest)
            was_decode = step % 5 != 4
            for layer in rank.layers:
                drawn = rng.multinomial(200, shares(step)) if was_decode else np.full(EXPERTS, 99)
                layer.experts.counts += torch.from_numpy(drawn)

    with ThreadPoolExecutor(RANKS) as pool:
        list(pool.map(drive, range(RANKS)))
    return ranks, wires, digests


def skewed(step: int) -> np.ndarray[Any, Any]:
    share = np.linspace(1, 8, EXPERTS) ** 1.5
    share = np.roll(share, 5) if step > 70 else share
    return share / share.sum()


@pytest.mark.parametrize("spare", [1, 3])
def test_bytes_follow_maps_and_all_ranks_change_at_one_step(spare: int) -> None:
    ranks, wires, digests = run(skewed, 170, window=16, interval=50, horizon=100_000, spare=spare)
    assert all(told == digests[0] for told in digests)
    assert all(calls == wires.calls[0] for calls in wires.calls)
    summary = ranks[0].balancer.summary()
    assert isinstance(summary["adopted"], int) and summary["adopted"] >= 2
    assert ranks[0].balancer.num_moves > 10
    loads = np.random.default_rng(9).multinomial(800, skewed(169), (8, LAYERS))
    before = balancedness(initial_placement(LAYERS, EXPERTS, RANKS, EXTRA), loads)
    assert balancedness(ranks[0].balancer.placements[0], loads) > before + 0.1


def test_a_limit_on_bytes_keeps_stages_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Moves are the same, each of them so many steps behind the one before."""
    settings = {"window": 16, "interval": 1000, "horizon": 100_000, "spare": 1}
    at_once, _, digests = run(skewed, 120, **settings)
    changes = [i for i, pair in enumerate(pairwise(digests[0])) if pair[0] != pair[1]]
    assert np.diff(changes).tolist() == [1] * (len(changes) - 1) and len(changes) > 3
    always = property(lambda self: 0.01, lambda self, seconds: None)
    monkeypatch.setattr(LiveBalancer, "_step_s", always, raising=False)
    slow, wires, later = run(skewed, 120, **settings, bytes_s=20 / 0.03)  # 18 bytes an expert
    assert all(told == later[0] for told in later) and len(set(map(tuple, wires.calls))) == 1
    changes = [i for i, pair in enumerate(pairwise(later[0])) if pair[0] != pair[1]]
    assert set(np.diff(changes).tolist()) == {3}
    assert slow[0].balancer.num_moves == at_once[0].balancer.num_moves


def test_plans_that_bring_nothing_come_more_rarely() -> None:
    even = np.full(EXPERTS, 1 / EXPERTS)
    ranks, _, _ = run(lambda step: even, 150, window=8, interval=12, horizon=1)
    assert ranks[0].balancer.num_adopted == 0 and 3 <= ranks[0].balancer.num_plans <= 4
    assert ranks[0].balancer._rarer == 8


def test_prefill_alone_is_planned_for_as_well() -> None:
    """Its counts stay apart from those of decode steps."""
    wires = Wires(RANKS)
    ranks = [Rank(wires, place, window=8, interval=30, horizon=100_000) for place in range(RANKS)]

    def drive(rank: Rank) -> None:
        rng = np.random.default_rng(rank.balancer._control.place)
        rank.layers[0].experts.counts += 10**6  # what a rehearsal has left
        for step in range(40):
            rank.between(step % 8 == 7)
            rank.check()
            shares = np.full(EXPERTS, 1 / EXPERTS) if step % 8 == 6 else skewed(0)
            for layer in rank.layers:
                layer.experts.counts += torch.from_numpy(rng.multinomial(900, shares))

    with ThreadPoolExecutor(RANKS) as pool:
        list(pool.map(drive, ranks))
    balancer = ranks[0].balancer
    assert all(int(ring.max()) < 1000 for ring in balancer._groups[0].rings.values())
    assert balancer.num_moves > 10 and balancer._recorded[False] > 4 * balancer._recorded[True] > 0
    loads = np.random.default_rng(9).multinomial(800, skewed(0), (8, LAYERS))
    before = balancedness(initial_placement(LAYERS, EXPERTS, RANKS, EXTRA), loads)
    assert balancedness(balancer.placements[0], loads) > before + 0.1


def test_nothing_moves_where_it_does_not_pay() -> None:
    even = np.full(EXPERTS, 1 / EXPERTS)
    placed = initial_placement(LAYERS, EXPERTS, RANKS, EXTRA).digest
    ranks, _, _ = run(skewed, 60, window=16, interval=30, horizon=2, spare=1)
    assert ranks[0].balancer.num_plans >= 1 and ranks[0].balancer.num_moves == 0
    assert ranks[0].balancer.placements[0].digest == placed
    window = LoadWindow(16, LAYERS, EXPERTS)
    for _ in range(16):
        window.add(np.round(np.tile(even, (LAYERS, 1)) * 1600).astype(np.int64))
    flat = initial_placement(LAYERS, EXPERTS, RANKS, 0)
    assert plan_moves(flat, window, 100_000, 1).stages == ()


def test_plans_that_differ_end_everything_before_a_byte_moves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = iter(range(100))

    def differs(work: list[tuple[Placement, LoadWindow]], horizon: int, spare: int) -> list[Moves]:
        found = plan_all(work, horizon, spare)
        return found if next(calls) else [Moves(now, (), 0.0, 0.0) for now, _ in work]

    monkeypatch.setattr(live, "plan_all", differs)
    with pytest.raises(DeepInferError, match="planned the placement of experts differently"):
        run(skewed, 80, window=16, interval=60, horizon=100_000)


def test_the_better_of_two_ways_is_taken() -> None:
    """Few moves where little has changed, many where they pay."""
    window = LoadWindow(32, 1, EXPERTS)
    rng = np.random.default_rng(0)
    for _ in range(32):
        window.add(rng.multinomial(4000, skewed(0))[None])
    start = initial_placement(1, EXPERTS, RANKS, EXTRA)
    short, long = (plan_moves(start, window, horizon, 1) for horizon in (40, 100_000))
    assert sum(map(len, short.stages)) < sum(map(len, long.stages))
    peaks = [rank_loads(p, window.loads()).max(-1).sum() for p in (start, short.after, long.after)]
    assert peaks[0] > peaks[1] > peaks[2]


def test_a_process_that_plans_ends_with_the_one_that_asked() -> None:
    """Before it is done: forty layers take it ten seconds."""
    window = LoadWindow(32, 40, 384)
    for step in range(32):
        window.add(np.random.default_rng(step).poisson(20, (40, 384)))
    work = [(initial_placement(40, 384, 64, 64), window)]
    data = pickle.dumps([path for path in sys.path if path]) + pickle.dumps((work, 1000, 1))
    done = subprocess.run(
        [sys.executable, "-P", "-c", _PROGRAM], input=data, capture_output=True, timeout=60
    )
    assert done.returncode == 1 and not done.stdout and not done.stderr


def test_a_process_of_its_own_plans_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    window = LoadWindow(8, 1, EXPERTS)
    rng = np.random.default_rng(0)
    for _ in range(8):
        window.add(rng.multinomial(4000, skewed(0))[None])
    work = [(initial_placement(1, EXPERTS, RANKS, EXTRA), window)]
    here, there = (plan_all(work, 1000, 1, small) for small in (10_000, 0))
    assert here[0].stages and here == there
    with pytest.raises(DeepInferError, match=r"planning where experts go failed: .*spare memory"):
        plan_all(work, 1000, 0, 0)
