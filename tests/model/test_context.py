"""Prefill over several ranks: logits, caches and states of one rank, bit for bit."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import pytest
import torch
from tests.model.pair import Bench, Pair
from torch import Tensor

from deepinfer.model.fast.context import ContextShare, Scheme, share_inputs
from deepinfer.model.fast.inputs import ReplayMode, SequenceRows, build_inputs
from deepinfer.model.reference import Numerics
from deepinfer.parallel.comm import DONE, Waitable

PairOf = Callable[[str, Numerics], Pair]
SCHEMES: tuple[Scheme, ...] = ("all", "entries")
Part = tuple[int, int]
"""Which sequence, and how many of its next tokens."""


@dataclass
class Wires:
    """Where the threads of a group meet; `sent` counts bytes."""

    size: int
    barrier: threading.Barrier = field(init=False)
    slots: list[Tensor] = field(init=False)
    sent: int = 0

    def __post_init__(self) -> None:
        self.barrier = threading.Barrier(self.size, timeout=60)
        self.slots = [torch.empty(0)] * self.size


@dataclass
class ThreadGroup:
    """A rank's end of a group whose ranks are threads."""

    wires: Wires
    place: int
    calls: list[tuple[int, ...]] = field(default_factory=list)

    @property
    def size(self) -> int:
        return self.wires.size

    def start_gather(self, x: Tensor) -> tuple[Tensor, Waitable]:
        self.calls.append(tuple(x.shape))
        self.wires.slots[self.place] = x
        if self.wires.barrier.wait() == 0:
            self.wires.sent += x.numel() * x.element_size()
        found = torch.stack(self.wires.slots)
        self.wires.barrier.wait()
        return found, DONE


class Shared:
    """The same sequences on C ranks, each with caches of its own."""

    def __init__(self, pair: Pair, size: int, scheme: Scheme, lengths: Sequence[int]) -> None:
        most = max(lengths)
        self.pair, self.size, self.scheme = pair, size, scheme
        self.benches = [Bench(pair.fast, len(lengths), most, 32, fill=0xFF) for _ in range(size)]
        self.wires = Wires(size)
        self.groups = [ThreadGroup(self.wires, place) for place in range(size)]

    def step(
        self,
        parts: Sequence[Part],
        replay: ReplayMode = "off",
        floors: Mapping[int, int] | None = None,
        saves: Mapping[int, Sequence[tuple[int, int]]] | None = None,
    ) -> Tensor:
        """Run a prefill step on every rank; returns the logits of each part's last row."""

        def run(place: int) -> Tensor:
            bench = self.benches[place]
            rows = rows_of(bench, self.pair, parts, floors or {}, saves or {})
            ends = torch.tensor([len(s.token_ids) for s in rows]).cumsum(0) - 1
            if self.size == 1:
                inputs = build_inputs(rows, False, bench.layout, "cpu", replay)
            else:
                share = ContextShare(self.groups[place], self.scheme)
                inputs = share_inputs(rows, bench.layout, "cpu", replay, share, ends.tolist())
            with torch.inference_mode():
                found = bench.model.forward(inputs, bench.caches, ends)
            for i, count in parts:
                bench.rows[i].length += count
            return found

        with ThreadPoolExecutor(self.size) as pool:
            found = list(pool.map(run, range(self.size)))
        assert all(not other.shape[0] for other in found[1:])
        assert len({tuple(group.calls) for group in self.groups}) == 1
        return found[0]


def rows_of(
    bench: Bench,
    pair: Pair,
    parts: Sequence[Part],
    floors: Mapping[int, int],
    saves: Mapping[int, Sequence[tuple[int, int]]],
) -> list[SequenceRows]:
    found = []
    for i, count in parts:
        row = bench.rows[i]
        end = row.length + count
        ids = pair.ids[7 * i + row.length : 7 * i + end]
        held = -(-end // bench.layout.tokens_per_block)
        found.append(
            SequenceRows(
                row.slot, row.length, ids, row.blocks[:held], floors.get(i, 0), saves.get(i, ())
            )
        )
    return found


def assert_equal_everywhere(shared: Shared, alone: Shared) -> None:
    """Every byte of every rank's caches is that of the single one."""
    want = alone.benches[0].caches
    for place, bench in enumerate(shared.benches):
        assert torch.equal(bench.caches.blocks, want.blocks), place
        assert torch.equal(bench.caches.slots, want.slots), place


STEPS: dict[str, list[list[Part]]] = {
    "odd and even lengths that are there already": [[(0, 45), (1, 32)], [(0, 61), (1, 90)]],
    "borders of a window": [[(0, 70)], [(0, 131)]],
    "many short ones": [[(i, 2) for i in range(9)], [(i, 2 + i % 3) for i in range(9)]],
    "one token": [[(0, 33)], [(0, 1)]],
    "long beside short": [[(0, 150), (1, 3), (2, 17)], [(2, 60), (1, 1), (0, 9)]],
}


@pytest.mark.parametrize(
    ("checkpoint", "mode", "scheme", "size", "names"),
    [
        ("alpha", "official", "all", 4, list(STEPS)[:1]),
        ("alpha", "official", "entries", 4, list(STEPS)[:3]),
        ("alpha", "official", "entries", 2, list(STEPS)[3:]),
        ("alpha", "noq", "all", 2, list(STEPS)[:1]),
        ("beta", "official", "all", 2, list(STEPS)[3:]),
        ("beta", "noq", "entries", 4, list(STEPS)[:1]),
    ],
)
def test_logits_and_caches_are_those_of_one_rank(
    pair_of: PairOf, checkpoint: str, mode: Numerics, scheme: Scheme, size: int, names: list[str]
) -> None:
    pair = pair_of(checkpoint, mode)
    for name in names:
        steps = STEPS[name]
        lengths = [300] * (1 + max(i for step in steps for i, _ in step))
        alone, shared = Shared(pair, 1, scheme, lengths), Shared(pair, size, scheme, lengths)
        for step in steps:
            assert torch.equal(shared.step(step), alone.step(step)), (name, step)
            assert_equal_everywhere(shared, alone)


@pytest.mark.parametrize(
    ("mode", "size", "scheme"),
    [("compact", 4, "entries"), ("compact", 2, "all"), ("mask", 2, "entries")],
)
def test_the_decoder_half_drops_the_same_rows(
    pair_of: PairOf, mode: ReplayMode, size: int, scheme: Scheme
) -> None:
    """140 rows kept of prompts of several lengths, across the borders of pieces and of chunks."""
    pair = pair_of("alpha", "official")
    ends = [213, 151, 40]
    alone, shared = Shared(pair, 1, scheme, ends), Shared(pair, size, scheme, ends)
    floors = {i: max(0, end - 140) for i, end in enumerate(ends)}
    steps: list[list[Part]] = [[(0, 61)], [(0, 71), (1, 151)], [(0, 81), (2, 40)]]
    for step in steps:
        want = alone.step([*step], mode, floors)
        got = shared.step([*step], mode, floors)
        assert torch.equal(got, want) if want.shape[0] else not got.shape[0], step
        assert_equal_everywhere(shared, alone)


def tensors(value: object) -> Iterator[tuple[str, Tensor]]:
    """Every tensor inside dataclasses, mappings and tuples, with the name of its field."""
    if isinstance(value, Tensor):
        yield "", value
    elif dataclasses.is_dataclass(value):
        for each in dataclasses.fields(value):
            for name, tensor in tensors(getattr(value, each.name)):
                yield f"{each.name}.{name}", tensor
    elif isinstance(value, Mapping):
        for key, part in value.items():
            yield from ((f"{key}.{name}", tensor) for name, tensor in tensors(part))
    elif isinstance(value, tuple):
        for part in value:
            yield from tensors(part)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("replay", ["off", "mask", "compact"])
def test_everything_is_on_the_device(pair_of: PairOf, scheme: Scheme, replay: ReplayMode) -> None:
    pair = pair_of("alpha", "official")
    bench = Bench(pair.fast, 2, 300, 32)
    rows = rows_of(bench, pair, [(0, 201), (1, 7)], {0: 61}, {0: [(64, 1)]})
    share = ContextShare(ThreadGroup(Wires(2), 1), scheme)
    inputs = share_inputs(rows, bench.layout, "meta", replay, share, [200, 207])
    found = list(tensors(inputs))
    assert len(found) > 30
    assert [name for name, tensor in found if tensor.device.type != "meta"] == []


def test_checkpoints_are_filled_on_every_rank(pair_of: PairOf) -> None:
    pair = pair_of("alpha", "official")
    alone, shared = Shared(pair, 1, "entries", [256] * 3), Shared(pair, 4, "entries", [256] * 3)
    for one in (alone, shared):
        one.step([(0, 200)], saves={0: [(64, 1), (192, 2)]})
    assert_equal_everywhere(shared, alone)


def test_entries_alone_are_far_less_than_everything(pair_of: PairOf) -> None:
    pair = pair_of("alpha", "official")
    sent = {}
    for scheme in SCHEMES:
        shared = Shared(pair, 2, scheme, [400])
        shared.step([(0, 400)])
        sent[scheme] = shared.wires.sent
    assert sent["entries"] < 0.85 * sent["all"]
