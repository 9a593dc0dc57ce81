"""A cluster step by step: every rank does a phase, and all wait for the slowest (pure).

A layer takes: the slowest rank's dense work, the exchange, the slowest rank's experts. Placing of
experts, the gate of a new plan, the choice of verified drafts and the vote on a step's kind are the
engine's own code. Groups of ranks that share no experts have clocks of their own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Final

import numpy as np
from numpy.typing import NDArray

from deepinfer.config.mesh import num_slots
from deepinfer.engine.costs import CostCurve
from deepinfer.parallel.balance import LoadWindow, adapt, judge, plan_by_steps, plan_by_totals
from deepinfer.parallel.migrate import relabel
from deepinfer.parallel.placement import Placement, balancedness, initial_placement, logical_counts
from deepinfer.parallel.votes import Flag, Word, agree
from deepinfer.sim.routing import Routing
from deepinfer.sim.settings import Settings
from deepinfer.sim.times import KEPT, Times, load_times
from deepinfer.sim.verify import choose_alone, choose_together, likeliest

__all__ = ["Cluster", "Outcome", "simulate"]

Floats = NDArray[np.floating]
Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]

_GRAPH: Final = 8
"""Rows of a decode step are padded to a multiple of this."""
_CURVE_STEPS: Final = 64
_STAGED_SHARE: Final = 0.15
"""The share of the links that moving experts may take while steps run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a run came to; steps of the warm-up are left out, except of a run with an end.

    tokens_per_s   of one rank
    user_tokens_per_s, slow_user_tokens_per_s  the middle and the slowest twentieth of requests
    step_ms        mean time of a decode step; and the shares of all time in dense work, experts,
                   exchange and the rest (head, sampler, drafts, host)
    balance        mean over busiest rank of expert rows
    wait           what ranks stand idle on average, waiting for the slowest, of their time
    padding        rows of graphs that no token needs
    wasted         verified drafts that brought nothing, of all rows
    prefill        share of the time in prefill steps
    moving         share of the time in which moving experts stopped the steps
    tail           time that the last tenth of the tokens takes over the tenth of all time that it
                   would take at even speed; 0 for an endless queue
    """

    tokens_per_s: float
    user_tokens_per_s: float
    slow_user_tokens_per_s: float
    step_ms: float
    dense_share: float
    expert_share: float
    exchange_share: float
    rest_share: float
    balance: float
    wait: float
    padding: float
    wasted: float
    verified_length: float
    prefill: float
    plans: float
    moving: float
    tail: float

    def values(self) -> dict[str, float]:
        """Return name -> value."""
        return {each.name: float(getattr(self, each.name)) for each in fields(self)}


class Cluster:
    """All ranks of a run. `step` advances every group that is due; `outcome` sums up.

    clock_us  [groups] time of each group
    produced  tokens of all ranks so far
    """

    def __init__(self, settings: Settings, seed: int, times: Times | None = None) -> None:
        s = self.settings = settings
        self.times = times if times is not None else load_times(s.device)
        self.fabric = self.times.fabrics[s.fabric]
        # Streams of their own: a policy must not change the load that it meets.
        self._load, route, self._draws, self._noise = (
            np.random.Generator(np.random.SFC64(child))
            for child in np.random.SeedSequence(seed).spawn(4)
        )
        self.routing = Routing(s, route)
        self._scale = s.layers / s.counted_layers
        slots = num_slots(s.experts, s.expert, s.copies)
        self.placement = initial_placement(s.counted_layers, s.experts, s.expert, slots - s.experts)
        self._window = LoadWindow(s.window, s.counted_layers, s.experts)
        self._next: tuple[Placement, float] | None = None
        shape = (s.gpus, s.seqs)
        self._left = np.zeros(shape, np.int64)
        self._total = np.zeros(shape, np.int64)
        self._context = np.zeros(shape, np.int64)
        self._todo = np.zeros(shape, np.int64)
        self._odds = np.zeros(shape, np.float32)
        self._since = np.zeros(shape)
        self._waiting = s.requests
        self._own_queue = np.zeros(s.gpus, np.int64)
        if s.place == "fixed" and s.requests:
            self._own_queue = np.bincount(np.arange(s.requests) % s.gpus, minlength=s.gpus)
        self.clock_us = np.zeros(s.groups)
        self.produced = 0
        self.num_steps = 0
        self._waited = np.zeros(s.gpus, np.int64)
        self._curve: CostCurve | None = None
        self._late: list[Floats] = []
        self._since_plan = self.plans_made = self.plans = 0
        self._speeds: list[Floats] = []
        self._marks: list[tuple[float, int]] = []
        self._reset()
        self._place()
        if not s.requests and not s.prefill:  # as if it had run for long already
            self._left = np.ceil(self._left * self._draws.random(shape)).astype(np.int64)
            self._context += self._total - self._left
            self._since -= 1  # their speed is not known

    def _reset(self) -> None:
        self._parts = np.zeros(4)
        self._spent = 0.0
        self._prefill_us = 0.0
        self._moving_us = 0.0
        self._rank_us = 0.0
        self._busy_us = 0.0
        self._decode_us = 0.0
        self._num_decodes = 0
        self._rows = self._padded = self._verified = self._accepted = self._passes = 0
        self._peak = self._mean = 0.0
        self._produced_before = self.produced
        self._clock_before = self.clock_us.copy()

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self._left.any()) or self._queued > 0

    @property
    def _queued(self) -> int:
        s = self.settings
        if not s.requests:
            return 1
        return int(self._own_queue.sum()) if s.place == "fixed" else self._waiting

    def _lengths(self, median: float, spread: float, count: int) -> Ints:
        if not spread:
            return np.full(count, round(median))
        found = median * np.exp(spread * self._load.standard_normal(count))
        return np.asarray(np.maximum(np.rint(found), 1), np.int64)

    def _place(self) -> None:
        """Give requests to free slots; the rank with the fewest sequences takes first."""
        s = self.settings
        free = self._left == 0
        if not free.any() or not self._queued:
            return
        order = np.argsort(np.cumsum(free, axis=1) + (~free).sum(axis=1, keepdims=True), axis=None)
        order = order[free.ravel()[order]]
        if s.requests and s.place == "pull":
            order = order[: self._waiting]
            self._waiting -= len(order)
        elif s.requests:
            rank = order // s.seqs
            nth = np.zeros(len(order), np.int64)
            for each in np.unique(rank):  # the k-th free slot of its rank
                mine = rank == each
                nth[mine] = np.arange(int(mine.sum()))
            order = order[nth < self._own_queue[rank]]
            self._own_queue -= np.bincount(order // s.seqs, minlength=s.gpus)
        count = len(order)
        length = self._lengths(s.output, s.output_spread, count)
        prompt = self._lengths(s.prompt, s.prompt_spread, count)
        middle = math.log(s.acceptance / (1 - s.acceptance))
        odds = middle + s.difficulty * self._load.standard_normal(count)
        for target, value in (
            (self._left, length), (self._total, length), (self._odds, odds),
            (self._context, np.zeros(count, np.int64) if s.prefill else prompt),
            (self._todo, prompt if s.prefill else np.zeros(count, np.int64)),
        ):  # fmt: skip
            target.ravel()[order] = value
        self._since.ravel()[order] = self.clock_us[order // s.seqs // s.expert]

    def step(self) -> None:
        """Advance the groups that are due: those least ahead in time."""
        s = self.settings
        due = np.ones(s.groups, bool)
        if s.requests and s.groups > 1:
            due = self.clock_us <= self.clock_us.min() + 0.5 * self._last_us
        ranks = np.repeat(due, s.expert)
        self.routing.advance()
        before = self.clock_us.copy()
        prefilling = self._vote(due)
        if prefilling.any():
            self._prefill(np.repeat(prefilling, s.expert), prefilling)
        decoding = due & ~prefilling
        if decoding.any():
            self._decode(np.repeat(decoding, s.expert), decoding)
        self._last_us = float((self.clock_us - before)[due].mean())
        self.num_steps += 1
        if s.requests:
            self._marks.append((float(self.clock_us.max()), self.produced))
            gone = ranks.reshape(-1, 1) & (self._left == 0)
            if gone.any():
                self._place()
        else:
            self._place()

    _last_us = 0.0

    def _vote(self, due: Flags) -> Flags:
        """Return which groups prefill now, by the engine's rule."""
        s = self.settings
        chosen = np.zeros(s.groups, bool)
        if not s.prefill:
            return chosen
        wants: Flags = np.asarray((self._todo > 0).any(axis=1))
        able: Flags = np.asarray(((self._left > 0) & (self._todo == 0)).any(axis=1))
        flags = [
            (Flag.PREFILL if want else Flag(0)) | (Flag.DECODE if can else Flag(0))
            for want, can in zip(wants.tolist(), able.tolist(), strict=True)
        ]
        for group in np.nonzero(due)[0].tolist():
            first = group * s.expert
            waited = self._waited[first : first + s.expert]
            words = [
                Word(flags=flag, waited=int(steps))
                for flag, steps in zip(flags[first : first + s.expert], waited, strict=True)
            ]
            chosen[group] = agree(words, s.patience) == "prefill"
            waiting = wants[first : first + s.expert] & ~chosen[group]
            waited[:] = np.where(waiting, waited + 1, 0)
        return chosen

    def _prefill(self, ranks: Flags, groups: Flags) -> None:
        s, times = self.settings, self.times
        todo = self._todo * ranks[:, None]
        before = np.cumsum(todo, axis=1) - todo
        take = np.clip(s.batched - before, 0, todo)
        done = (take > 0) & (take == todo)
        tokens = take.sum(axis=1)
        keys = (take * (self._context + take / 2)).sum(axis=1)
        kept = np.minimum(take, KEPT * done).sum(axis=1)
        spent = np.zeros(s.groups)
        for rows, pairs, second in (
            (tokens, keys, False),
            (kept, keys * kept / np.maximum(tokens, 1), True),
        ):
            dense = times.prefill_layer(rows, pairs, second).reshape(s.groups, s.expert)
            self._layers(dense, rows, groups, spent, s.layers / 2, None)
        spent += times.curves["head"](done.sum(axis=1)).reshape(s.groups, -1).max(axis=1)
        spent += self._host()
        spent *= groups
        self._context += take
        self._todo -= take
        self.clock_us += spent
        self._left[done] -= 1
        self.produced += int(done.sum())
        self._finish(done & (self._left == 0))
        self._prefill_us += float(spent.sum())
        self._spent += float(spent.sum())

    def _decode(self, ranks: Flags, groups: Flags) -> None:
        s, times = self.settings, self.times
        busy = (self._left > 0) & (self._todo == 0) & ranks[:, None]
        seqs = busy.sum(axis=1)
        verified, accepted = self._verify(busy, seqs)
        per_rank = verified.sum(axis=1)
        rows = seqs + per_rank
        padded = -(-np.maximum(rows, 1) // _GRAPH) * _GRAPH
        keys = ((1 + verified) * self._context * busy).sum(axis=1)
        dense = times.decode_layer(padded, keys).reshape(s.groups, s.expert)
        spent = np.zeros(s.groups)
        self._layers(dense, rows, groups, spent, s.layers, padded)
        rest = times.curves["head"](rows) + times.curves["sampler"](rows)
        if s.drafts and s.verify != "none":
            rest = rest + times.curves["draft"](seqs)
        rest = rest.reshape(s.groups, s.expert)
        rest_us = rest.max(axis=1) + self._host()
        spent += rest_us
        self._busy_us += float((rest * groups[:, None]).sum())
        spent *= groups
        stop_us = self._move(spent, groups)
        self.clock_us += spent + stop_us * groups
        gained = np.minimum(1 + accepted, self._left) * busy
        self._left -= gained
        self._context += gained
        self.produced += int(gained.sum())
        self._finish(busy & (self._left == 0))
        self._parts[3] += float((rest_us * groups).sum())
        self._rank_us += float(spent.sum()) * s.expert
        self._decode_us += float(spent.sum())
        self._num_decodes += int(groups.sum())
        self._spent += float(spent.sum()) + stop_us * int(groups.sum())
        self._rows += int(rows.sum())
        self._padded += int((padded * ranks).sum())
        self._verified += int(per_rank.sum())
        self._accepted += int(gained.sum()) - int(seqs.sum())
        self._passes += int(seqs.sum())

    def _layers(
        self,
        dense: Floats,
        tokens: Ints,
        groups: Flags,
        spent: Floats,
        layers: float,
        decode: Ints | None,
    ) -> None:
        """Add the time of all layers: dense [groups, N] a layer, tokens [R] that meet experts."""
        s, times = self.settings, self.times
        sent = tokens.reshape(s.groups, s.expert)
        drawn = self.routing.rows(self.placement, sent.sum(axis=1) * groups)
        got = drawn.sum(axis=-2)  # [groups, layers, N]
        cost = times.experts(drawn)
        worst = cost.max(axis=-1).sum(axis=-1) * (layers / s.counted_layers)
        net = times.exchange(
            self.fabric, s.expert, self.placement.num_slots, s.active, 1.0 * sent[:, None], got
        )
        hidden = s.overlap * 0.3 * dense.min(axis=1)  # the shared expert's part of dense work
        net = np.maximum(net - hidden[:, None], 0).sum(axis=-1) * (layers / s.counted_layers)
        slowest = dense.max(axis=1) * layers
        spent += (slowest + worst + net) * groups
        if decode is None:
            return
        self._parts[:3] += ((slowest * groups).sum(), (worst * groups).sum(), (net * groups).sum())
        mean = dense.mean(axis=1) * layers + cost.mean(axis=-1).sum(axis=-1) * self._scale + net
        self._busy_us += float((mean * groups).sum()) * s.expert
        self._peak += float((got.max(axis=-1) * groups[:, None]).sum())
        self._mean += float((got.mean(axis=-1) * groups[:, None]).sum())
        self._watch(drawn[0])

    def _host(self) -> Floats:
        """Return the host's time of a step of each group: the slowest rank's."""
        s = self.settings
        base = float(self.times.curves["host"](s.seqs))
        if not s.jitter:
            return np.full(s.groups, base)
        noise = np.exp(s.jitter * self._noise.standard_normal((s.groups, s.expert)))
        return np.asarray(base + 100.0 * (noise.max(axis=1) - 1))

    def _verify(self, busy: Flags, seqs: Ints) -> tuple[Ints, Ints]:
        """Return verified and accepted drafts of each sequence [R, S]."""
        s = self.settings
        if not s.drafts or s.verify == "none":
            zero = np.zeros(busy.shape, np.int64)
            return zero, zero
        limit = np.minimum(np.maximum(self._left - 1, 0), s.drafts) * busy
        if not s.doubt and s.verify == "fixed":  # one draw tells how far a sequence comes
            chance = 1 / (1 + np.exp(-self._odds))
            with np.errstate(divide="ignore"):
                runs = np.log(self._draws.random(busy.shape, np.float32)) / np.log(chance)
            return limit, np.minimum(runs, limit).astype(np.int64)
        odds = self._odds[..., None] + s.doubt * self._draws.standard_normal(
            (*busy.shape, s.drafts), np.float32
        )
        chance = 1 / (1 + np.exp(-odds))
        chance = np.where(np.arange(s.drafts) < limit[..., None], chance, 0)
        reach = np.cumprod(chance, axis=2)
        hits = self._draws.random(reach.shape, np.float32) < chance
        runs = np.cumprod(hits, axis=2).sum(axis=2)
        if s.verify == "fixed":
            return limit, np.minimum(runs, limit)
        if self._curve is None or self.num_steps % _CURVE_STEPS == 0:
            self._curve = self._cost_curve(busy, seqs)
        if s.verify == "rank":
            budgets = choose_alone(reach, busy, self._curve)
        else:
            self._late.append(reach)
            seen = self._late[0] if len(self._late) > s.lag else reach
            self._late = self._late[-s.lag :] if s.lag else []
            budgets = np.zeros(s.gpus, np.int64)
            for first in range(0, s.gpus, s.expert):
                part = slice(first, first + s.expert)
                budgets[part] = choose_together(seen[part], busy[part], self._curve)
        verified = np.minimum(likeliest(reach, busy, budgets), limit)
        return verified, np.minimum(runs, verified)

    def _cost_curve(self, busy: Flags, seqs: Ints) -> CostCurve:
        """Return what a step takes when all ranks run so many rows: what ranks know beforehand."""
        s, times = self.settings, self.times
        most = s.seqs * (1 + s.drafts)
        rows = np.unique(np.minimum(np.arange(_GRAPH, most + _GRAPH, _GRAPH), max(most, 1)))
        context = float((self._context * busy).sum()) / max(int(busy.sum()), 1)
        slots = self.placement.num_slots // s.expert
        dense = times.decode_layer(rows, rows * context)
        each = np.repeat(rows[:, None, None] * s.active / slots, slots, axis=1)
        got = (rows * s.active)[:, None]
        net = times.exchange(
            self.fabric, s.expert, self.placement.num_slots, s.active, rows[:, None], got
        )
        layer = dense + times.experts(each)[:, 0] + net
        whole = layer * s.layers + times.curves["head"](rows) + times.curves["sampler"](rows)
        draft = times.curves["draft"]
        sizes = tuple(int(size) for size in draft.rows)
        return CostCurve(
            tuple(rows.tolist()), tuple((whole * 1e-6).tolist()),
            sizes, tuple(us * 1e-6 for us in draft.us),
        )  # fmt: skip

    def _finish(self, ended: Flags) -> None:
        """Note the speed of the requests that end now."""
        if not ended.any():
            return
        group = np.nonzero(ended)[0] // self.settings.expert
        spent = self.clock_us[group] - self._since[ended]
        known = self._since[ended] >= 0
        self._speeds.append(self._total[ended][known] / spent[known] * 1e6)

    def _watch(self, drawn: Floats) -> None:
        """Count a step's rows of the first group, and plan when it is time."""
        s = self.settings
        if s.policy == "none":
            return
        self._since_plan += 1
        wanted = s.window if not self.plans_made else s.interval
        if self._since_plan > wanted - s.window:
            counted = drawn.transpose(0, 2, 1).reshape(len(drawn), -1)
            self._window.add(logical_counts(self.placement, counted.astype(np.int64)))
        if self._since_plan < wanted or self._next is not None:
            return
        self._since_plan = 0
        self.plans_made += 1
        seen, unseen = self._window.split()
        slots = self.placement.num_slots
        if s.policy == "totals":
            plans = [relabel(self.placement, plan_by_totals(seen, s.expert, slots))]
        else:
            plans = [adapt(self.placement, seen), plan_by_steps(seen, s.expert, slots)]
            plans[1] = relabel(self.placement, plans[1])
        for wished in sorted(plans, key=lambda plan: -balancedness(plan, unseen)):
            if self._adopt(wished, unseen):
                return

    def _adopt(self, wished: Placement, unseen: NDArray[np.integer]) -> bool:
        """Begin to move to a placement if that pays."""
        s = self.settings
        moved = int((wished.slots != self.placement.slots).sum()) / (s.expert * s.counted_layers)
        link = self.fabric
        if s.expert > link.reach and link.beyond is not None:
            link = link.beyond
        cost_us = moved * s.layers * self.times.expert_bytes / link.bytes_us
        if s.staged:
            cost_us *= _STAGED_SHARE
        paid = round(cost_us / self.times.row_us)
        gain = judge(self.placement, wished, unseen, remaining_steps=s.interval,
                     migration_rows=round(paid / self._scale))  # fmt: skip
        if gain.worth_it:
            self._next = (wished, cost_us / _STAGED_SHARE if s.staged else cost_us)
        return gain.worth_it

    def _move(self, spent: Floats, groups: Flags) -> float:
        """Go on moving experts; returns how long the steps stand still for it."""
        if self._next is None:
            return 0.0
        placement, left_us = self._next
        if not self.settings.staged:
            self.placement, self._next = placement, None
            self.plans += 1
            self._moving_us += left_us * int(groups.sum())
            return left_us
        left_us -= _STAGED_SHARE * float(spent.max())
        self._next = (placement, left_us)
        if left_us <= 0:
            self.placement, self._next = placement, None
            self.plans += 1
        return 0.0

    def run(self) -> Outcome:
        """Run to the end: so many steps, or until every request is done."""
        s = self.settings
        if s.requests:
            while self.has_work:
                self.step()
        else:
            for number in range(s.steps):
                if number == s.warmup:
                    self._reset()
                    self._speeds.clear()
                self.step()
        return self.outcome()

    def outcome(self) -> Outcome:
        """Sum up what has run since the warm-up."""
        s = self.settings
        time_us = float((self.clock_us - self._clock_before).mean())
        if s.requests:
            time_us = float(self.clock_us.max())
        tokens = self.produced - self._produced_before
        speeds = np.concatenate([*self._speeds, np.zeros(0)])
        decode_us = max(self._decode_us, 1e-9)
        return Outcome(
            tokens_per_s=tokens / max(time_us, 1e-9) * 1e6 / s.gpus,
            user_tokens_per_s=float(np.median(speeds)) if speeds.size else 0.0,
            slow_user_tokens_per_s=float(np.quantile(speeds, 0.05)) if speeds.size else 0.0,
            step_ms=self._decode_us / max(self._num_decodes, 1) * 1e-3,
            dense_share=self._parts[0] / decode_us,
            expert_share=self._parts[1] / decode_us,
            exchange_share=self._parts[2] / decode_us,
            rest_share=self._parts[3] / decode_us,
            balance=self._mean / self._peak if self._peak else 1.0,
            wait=1 - self._busy_us / self._rank_us if self._rank_us else 0.0,
            padding=1 - self._rows / self._padded if self._padded else 0.0,
            wasted=(self._verified - self._accepted) / self._rows if self._rows else 0.0,
            verified_length=1 + self._verified / max(self._passes, 1),
            prefill=self._prefill_us / max(self._spent, 1e-9),
            plans=float(self.plans),
            moving=self._moving_us / max(self._spent, 1e-9),
            tail=self._tail(),
        )

    def _tail(self) -> float:
        if not self._marks or not self.produced:
            return 0.0
        end_us = self._marks[-1][0]
        begin_us = next(at for at, made in self._marks if made >= 0.9 * self.produced)
        return (end_us - begin_us) / (0.1 * end_us)


def simulate(settings: Settings, seed: int = 0, times: Times | None = None) -> Outcome:
    """Run a cluster from a seed; the same settings and seed give the same outcome."""
    return Cluster(settings, seed, times).run()
