"""One rank of N: what the others would send, what the fabric would take, what may be claimed.

A slice runs one rank at the model's full dimensions. Rows of other ranks are made up in one of
these ways:

    fold    each choice falls to the local expert `choice % n`: as many (token, expert) pairs as
            balanced routing brings, with the true dependence between layers
    replay  every layer gets a drawn number of pairs for each local expert, as N ranks of the same
            load would send; rows are copies of the rank's own. What goes out is packed and written,
            every choice's row is read back

The fabric is a model of two numbers: time = latency + bytes / rate.
Source: parallelism specification, 3.2, 3.3 and 8.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from deepinfer.config import ModelConfig
from deepinfer.model.fast.model import FastModel
from deepinfer.model.fast.weights import BlockWeights
from deepinfer.parallel.experts import ExpertMaps, LayerExperts, Received
from deepinfer.parallel.placement import initial_placement

__all__ = [
    "Fabric", "Network", "Part", "Replayed", "Slice", "exchange_part", "install", "statement",
    "sync_factor",
]  # fmt: skip

Mode = Literal["fold", "replay"]

_META_BYTES: Final = 96
"""Slots and weights of a row on the wire, aligned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """Rank 0 of N, with `n` of E routed experts in every layer.

    hot  the rank gets this many times the mean number of rows (replay only)
    """

    ranks: int
    mode: Mode
    hot: float = 1.0
    seed: int = 0

    def experts(self, config: ModelConfig) -> tuple[int, int]:
        """Return the first expert and how many the rank holds; N must divide E."""
        return 0, config.n_routed_experts // self.ranks

    def distinct(self, config: ModelConfig) -> float:
        """Return how many ranks a token's choices fall to on average, under even routing."""
        total, local = config.n_routed_experts, config.n_routed_experts // self.ranks
        chosen = config.num_experts_per_tok
        missed = math.comb(total - local, chosen) / math.comb(total, chosen)
        return self.ranks * (1.0 - missed)

    def distinct_of(self, slots: Tensor) -> float:
        """Return the same for choices [T, k] with repetition: what a layer packs."""
        return self.ranks * (1.0 - (1.0 - 1.0 / self.ranks) ** slots.shape[1])


class _Rows(NamedTuple):
    """What one layer gets: rows of x, weights, offsets; and where choices are read back from."""

    pick: Tensor
    weight: Tensor
    offsets: Tensor
    back: Tensor


class _Made:
    """A dispatch whose rows did not travel."""

    def __init__(self, rows: _Rows, values: Tensor) -> None:
        self.rows = rows
        self._values = values

    def wait(self) -> Received:
        rows = self.rows
        return Received(self._values, rows.pick, rows.weight, rows.offsets)


class Replayed:
    """An exchange of one layer that makes up the other ranks.

    What a layer gets is drawn at its first call with a number of rows, and kept.
    """

    flows = True

    def __init__(self, plan: Slice, seed: int, sink: Tensor) -> None:
        """sink: [copies, words] int64, where packed rows go."""
        self._plan, self._seed, self._sink = plan, seed, sink
        self._copied: dict[int, Tensor] = {}
        self.drawn: dict[tuple[int, int, int], _Rows] = {}

    def _draw(self, num_rows: int, chosen: int, local: int, device: torch.device) -> _Rows:
        plan, rng = self._plan, np.random.default_rng((self._plan.seed, self._seed))
        pairs = round(plan.ranks * num_rows * chosen * plan.hot)
        total = plan.ranks * local
        counts = rng.multinomial(pairs, np.full(total, 1.0 / total))[:local]
        count = max(1, int(counts.sum()))
        offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        return _Rows(
            pick=torch.from_numpy(rng.integers(0, num_rows, count)).to(device),
            weight=torch.from_numpy(rng.random(count, dtype=np.float32)).to(device),
            offsets=torch.from_numpy(offsets).to(device),
            back=torch.from_numpy(rng.integers(0, count, (num_rows, chosen))).to(device),
        )

    def begin(self, most_rows: int) -> None:
        """Do nothing: nobody else has rows."""

    def check(self) -> None:
        """Do nothing: nobody can be missing."""

    def dispatch(self, x: Tensor, slots: Tensor, weight: Tensor, num_local: int) -> _Made:
        """Write what would go out, and take what would have come; rows x are rounded already."""
        key = (x.shape[0], slots.shape[1], num_local)
        if key not in self.drawn:
            self.drawn[key] = self._draw(*key, x.device)
            rows = torch.arange(self._sink.shape[0], device=x.device) % max(1, x.shape[0])
            self._copied[x.shape[0]] = rows  # one copy of a row for each rank that needs it
        words = x.contiguous().view(torch.int64)
        copies = min(self._sink.shape[0], round(self._plan.distinct_of(slots) * x.shape[0]))
        if copies:
            source, sink = words[:, : self._sink.shape[1]], self._sink[:copies, : words.shape[1]]
            torch.index_select(source, 0, self._copied[x.shape[0]][:copies], out=sink)
        return _Made(self.drawn[key], x)

    def combine(self, pending: _Made, outputs: Tensor) -> Tensor:
        """Read every choice's row."""
        return outputs[pending.rows.back]


def install(
    plan: Slice, model: FastModel, most_rows: int, device: torch.device
) -> tuple[Replayed, ...]:
    """Put replayed exchanges into every layer of experts of a model; returns the backbone's."""
    config = model.config
    width = config.hidden_size + config.hidden_size // 32 + _META_BYTES
    copies = math.ceil(plan.distinct(config) * most_rows)
    sink = torch.empty(copies, -(-width // 8), dtype=torch.int64, device=device)
    made: list[Replayed] = []

    def ranked(block: BlockWeights, drafts: bool) -> BlockWeights:
        local = block.moe.w2.codes.shape[0]
        placement = initial_placement(1, plan.ranks * local, plan.ranks, 0)
        exchange = Replayed(plan, len(made), sink)
        made.append(exchange)
        layer = LayerExperts(
            maps=ExpertMaps.of(placement, 0, 0, device),
            exchange=exchange,  # type: ignore[arg-type]  # with a Pending of its own
            counts=torch.zeros(plan.ranks * local, dtype=torch.int64, device=device),
            drafts=drafts,
        )
        return dataclasses.replace(block, moe=dataclasses.replace(block.moe, ranks=layer))

    model.blocks = tuple(ranked(block, False) for block in model.blocks)
    backbone = tuple(made)
    if model.draft is not None:
        model.draft.blocks = tuple(ranked(block, True) for block in model.draft.blocks)
    return backbone


@dataclass(frozen=True, slots=True, kw_only=True)
class Fabric:
    """A link: time = latency + bytes / rate, for each direction of one rank.

    dispatch_us, combine_us  latencies
    gb_s                     rate, 1e9 bytes a second
    """

    dispatch_us: float
    combine_us: float
    gb_s: float

    def scaled(self, latency: float, rate: float) -> Fabric:
        """Return the fabric with other numbers, as factors."""
        return Fabric(
            dispatch_us=self.dispatch_us * latency,
            combine_us=self.combine_us * latency,
            gb_s=self.gb_s * rate,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Layers of experts of a step that exchange the same.

    tokens   rows at each rank
    layers   how many layers
    remote   ranks that a row goes to, itself left out
    choices  rows that come back for each
    """

    tokens: int
    layers: int
    remote: float
    choices: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """What a fabric adds to a step.

    overlap_us  work of a layer behind which its exchange can hide
    """

    fabric: Fabric
    parts: tuple[Part, ...]
    hidden: int
    overlap_us: float

    def layer_us(self, part: Part) -> float:
        """Return the exposed time of one layer's two exchanges.

        A row goes once to each rank that needs it, quantized; every choice's row comes back in
        bf16, unsummed, so that no placement changes a bit.
        """
        row = self.hidden + self.hidden // 32 + _META_BYTES
        out = part.tokens * part.remote * row / (self.fabric.gb_s * 1e3)
        back = part.tokens * part.choices * 2 * self.hidden / (self.fabric.gb_s * 1e3)
        return self.fabric.dispatch_us + out + self.fabric.combine_us + back

    @property
    def serial_us(self) -> float:
        """N1: nothing hidden."""
        return sum(part.layers * self.layer_us(part) for part in self.parts)

    @property
    def overlapped_us(self) -> float:
        """N2: hidden behind `overlap_us` of each layer."""
        return sum(
            part.layers * max(0.0, self.layer_us(part) - self.overlap_us) for part in self.parts
        )

    def with_fabric(self, latency: float, rate: float) -> Network:
        """Return the same with latencies and rate times some factors."""
        return dataclasses.replace(self, fabric=self.fabric.scaled(latency, rate))


def exchange_part(plan: Slice, config: ModelConfig, tokens: int, layers: int) -> Part:
    """Describe what layers of experts exchange for so many rows at each rank."""
    away = 1.0 - 1.0 / plan.ranks
    return Part(
        tokens=tokens,
        layers=layers,
        remote=plan.distinct(config) * away,
        choices=config.num_experts_per_tok * away,
    )


_BESIDE: Final = (
    "The shared expert ran beside the routed ones; an exchange that hides behind it would take "
    "that from them, so overlapped figures are high by at most what it saved. "
)


def sync_factor(plan: Slice, config: ModelConfig, tokens: int, expert_share: float) -> float:
    """Estimate by how much the fullest rank of each layer delays all: >= 1.

    Draws even routing of N ranks' rows, takes the fullest rank over the mean, and applies it to the
    experts' share of the step, as if their time were in proportion to rows.
    """
    rng = np.random.default_rng(plan.seed)
    total = config.n_routed_experts
    pairs = plan.ranks * tokens * config.num_experts_per_tok
    counts = rng.multinomial(pairs, np.full(total, 1.0 / total), size=64)
    ranks = counts[:, : plan.ranks * (total // plan.ranks)].reshape(64, plan.ranks, -1).sum(2)
    return 1.0 + expert_share * (float((ranks.max(1) / ranks.mean(1)).mean()) - 1.0)


def statement(
    plan: Slice,
    where: str,
    layers: int,
    of: int,
    law: str,
    fabric: Fabric,
    sync: float,
    beside: bool = False,
) -> str:
    """Say what a slice's number rests on; goes with every one of them.

    beside  the shared expert ran beside the routed ones in the measured step
    """
    made = {
        "fold": "choices of remote experts were folded onto local ones (fold)",
        "replay": "rows of the other ranks were drawn for even routing and copied from its own "
        f"(replay, {plan.hot:g} times the mean)",
    }[plan.mode]
    depth = "at full depth" if layers == of else f"with {layers} of {of} layers"
    link = f"{fabric.dispatch_us:g} and {fabric.combine_us:g} us latency and {fabric.gb_s:g} GB/s"
    return (
        f"One {where} ran rank 0 of {plan.ranks} {depth} and with the model's dimensions, on "
        f"random weights and random cached bytes; {made}. Acceptance was set, not earned: {law}. "
        f"No other rank existed: exchanges are a model of {link}, added to what was measured, and "
        "waiting for the fullest rank is estimated by simulation at a factor of "
        f"{sync:.3f} that the figures do not contain. Two micro-batches would read the weights "
        f"twice, which their row leaves out. {_BESIDE if beside else ''}Not covered: contention in "
        "the fabric, processors that copies occupy, stragglers, the hosts of other ranks, "
        "failures, skewed routing of real text, and the quality of the output."
    )
