"""What sharing the experts costs: a decode step of N ranks beside one GPU's, at real dimensions.

`python -m deepinfer.bench.scaling --ranks 2 --device cuda` makes the released model with some of
its layers and random weights on every GPU, and runs the same rows

    whole   on one GPU with all experts: whose logits those of N ranks must equal bit for bit
    slice   on one GPU with its share of the experts; a choice falls to the expert modulo their
            number, so that as many pairs meet as many experts as on a rank, and nothing travels
    NAME    on N ranks that share the experts over a back end

Each with rows and caches of its own on every rank. `efficiency` is slice / NAME: what is left of a
GPU's speed when rows travel. `speedup` is N x whole / NAME: tokens/s of N GPUs over those of one.
Times are the slowest rank's, medians of rounds in which a back end and the slice take turns. A line
is printed as soon as its form is done, and to stderr what took how long; when `--limit` seconds are
over no further form begins, so that what was measured is never lost.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from deepinfer.bench.gang import Gang, gang, rank_options
from deepinfer.bench.modelbench import ModelBench, choose_layers, fill_caches
from deepinfer.config import ModelConfig
from deepinfer.config.engine import NumericsConfig
from deepinfer.config.load import load_model_config, released_config, resolve_model
from deepinfer.errors import DeepInferError
from deepinfer.kernels.expert_linear import Fp4Weight
from deepinfer.model.fast.model import FastModel
from deepinfer.model.fast.random import random_model, shallow
from deepinfer.model.fast.weights import BlockWeights
from deepinfer.parallel.experts import ExpertRanks, RowShape, make_exchange

__all__ = ["main"]

_ROUNDS: Final = 3
_EXCHANGE: Final = (
    "_choose", "_push", "_raise", "_await", "_header", "_add_up", "_scatter", "_decode",
    "_give_back",
)  # fmt: skip


class _Forms:
    """One model on this rank, and the forms that its experts can take."""

    def __init__(self, team: Gang, args: argparse.Namespace) -> None:
        self.team, ranks = team, team.ranks
        config = _config(args.dims)
        self.layers = choose_layers(config, args.depth)
        self.config: ModelConfig = shallow(config, self.layers)
        numerics = NumericsConfig()  # what a row gives does not depend on the others
        self.model: FastModel = random_model(self.config, ranks.device, numerics=numerics)
        self.bench = ModelBench(
            config, ranks.device, depth=args.depth, sequences=args.sequences,
            context=args.context, rows=args.rows, drafts=False, seed=ranks.rank, model=self.model,
        )  # fmt: skip
        self.inputs = self.bench.decode_inputs()
        self.every = torch.arange(self.inputs.num_rows, device=ranks.device)
        self.whole: tuple[BlockWeights, ...] = self.model.blocks
        share = self.config.n_routed_experts // ranks.expert.size
        first = ranks.expert.place * share

        def part(weight: Fp4Weight) -> Fp4Weight:
            codes, scale = (t[first : first + share] for t in (weight.codes, weight.scale))
            return Fp4Weight(codes, scale, None)

        self.slice = tuple(
            dataclasses.replace(
                block,
                moe=dataclasses.replace(
                    block.moe, w1_w3=part(block.moe.w1_w3), w2=part(block.moe.w2)
                ),
            )
            for block in self.whole
        )

    def shared(self, name: str) -> tuple[tuple[BlockWeights, ...], ExpertRanks]:
        """Return the blocks with experts over a back end; all ranks call it."""
        ranks, rows, config = self.team.ranks, self.inputs.num_rows, self.config
        shape = RowShape(
            capacity=rows, columns=config.hidden_size, active=config.num_experts_per_tok,
            experts=config.n_routed_experts, dtype=self.model.numerics.dtype,
        )  # fmt: skip
        quantize = self.model.numerics.quantize
        exchange = make_exchange(
            name, ranks.expert, quantize, 0.0, shape, ranks.store, ranks.device
        )
        shares = ExpertRanks(ranks.expert, ranks.device, exchange)
        blocks = tuple(
            dataclasses.replace(
                block,
                moe=dataclasses.replace(
                    block.moe, ranks=shares.layer(config.n_routed_experts, False)
                ),
            )
            for block in self.slice
        )
        return blocks, shares

    def run(self, blocks: tuple[BlockWeights, ...], shares: ExpertRanks | None) -> Tensor:
        """Return the logits of a step; they stay where a recording puts them anew."""
        self.model.blocks, self.model.ranks = blocks, shares
        if shares is not None:
            self.model.begin(self.inputs.num_rows)
        self.logits = self.model.forward(self.inputs, self.bench.caches, self.every)
        return self.logits

    def fresh(self) -> None:
        """Make the caches again what they were."""
        fill_caches(self.bench.caches, self.config, self.bench.device, self.team.ranks.rank)


class _Clock:
    """Says on rank 0 what took how long, and on all ranks together whether time is up."""

    def __init__(self, team: Gang, limit: float) -> None:
        self._team, self._limit = team, limit
        self._start = self._last = time.perf_counter()

    def lap(self, what: str) -> None:
        now = time.perf_counter()
        if self._team.ranks.leads:
            print(f"scaling: {what} {now - self._last:.1f} s", file=sys.stderr, flush=True)
        self._last = now

    def over(self) -> bool:
        """Whether the limit has passed on some rank; all ranks ask."""
        return self._team.anywhere(time.perf_counter() - self._start > self._limit)


Work = Callable[[], object]


class _Timer:
    """Times of one form after another, in a graph where it can be."""

    def __init__(self, team: Gang, args: argparse.Namespace, told: dict[str, Any]) -> None:
        self._team, self._args, self._told = team, args, told
        self._whole = 0.0

    def prepared(self, name: str, step: Work, flows: bool) -> tuple[Work, str]:
        """Return the step, recorded if it flows and is wanted so, and its mode."""
        if self._team.on_card and flows and name in self._args.graphs:
            step()
            return self._team.recorded(step), "graph"
        return step, "eager"

    def alone(self, name: str, step: Work, mode: str) -> None:
        """Time a form by itself and tell it."""
        times = [1e6 * self._team.seconds(step, most=40) for _ in range(_ROUNDS)]
        self._whole = statistics.median(times) if name == "whole" else self._whole
        self._tell(name, mode, times)

    def beside(self, name: str, step: Work, mode: str, part: Work) -> None:
        """Time a back end in turn with the slice."""
        rounds: tuple[list[float], list[float]] = ([], [])
        for _ in range(_ROUNDS):
            for times, work in zip(rounds, (step, part), strict=True):
                times.append(1e6 * self._team.seconds(work, most=40))
        middle, beside = (statistics.median(times) for times in rounds)
        more: dict[str, Any] = {"efficiency": round(beside / middle, 3)}
        more["slice_us"] = round(beside, 1)
        if self._whole:
            more["speedup"] = round(self._args.ranks * self._whole / middle, 3)
        self._tell(name, mode, rounds[0], more)

    def _tell(
        self, name: str, mode: str, times: Sequence[float], more: dict[str, Any] | None = None
    ) -> None:
        entry = {
            "suite": "scaling",
            "what": name,
            "mode": mode,
            "step_us": round(statistics.median(times), 1),
            "spread": round(max(times) / min(times) - 1, 4),
            **(more or {}),
        }
        self._team.tell({**entry, **self._told})

    def kernels(self, name: str, step: Work) -> None:
        """Tell what a graph's kernels take, those that move rows apart."""
        found = self._team.kernels_us(step)
        moving = sum(found.get(kernel, 0.0) for kernel in _EXCHANGE)
        entry = {"what": f"{name} kernels", "kernels_us": round(sum(found.values()), 1)}
        self._team.tell({**entry, "exchange_us": round(moving, 1)})


def _measure(team: Gang, args: argparse.Namespace) -> None:
    clock = _Clock(team, args.limit)
    forms = _Forms(team, args)
    told = {
        "depth": len(forms.layers),
        "layers": list(forms.layers),
        "sequences": args.sequences,
        "rows": args.rows,
        "context": args.context,
    }
    timer = _Timer(team, args, told)
    clock.lap("weights")
    forms.fresh()
    want = forms.run(forms.whole, None).clone()
    team.tell({"what": "whole", **told, "finite": bool(want.isfinite().all())})
    clock.lap("one step of one rank")
    part, mode = timer.prepared("slice", partial(forms.run, forms.slice, None), True)
    timer.alone("slice", part, mode)
    clock.lap("slice")
    whole, mode = timer.prepared("whole", partial(forms.run, forms.whole, None), True)
    timer.alone("whole", whole, mode)
    clock.lap("whole")
    kept = [("slice", part), ("whole", whole)]
    for name in args.back_ends:
        if clock.over():
            team.tell({"what": name, "error": f"not begun: {args.limit:g} seconds are over"})
            continue
        try:
            blocks, shares = forms.shared(name)
        except (DeepInferError, RuntimeError) as error:
            team.tell({"what": name, "error": str(error).splitlines()[0][:200]})
            continue
        step: Work = partial(forms.run, blocks, shares)
        _compare(team, forms, name, "eager", step, want)
        clock.lap(f"{name}, compared")
        flows = shares.exchange.flows or name in ("fixed", "gathered")
        step, mode = timer.prepared(name, step, flows)
        if mode == "graph":
            _compare(team, forms, name, mode, step, want)
        timer.beside(name, step, mode, part)
        kept.append((name, step))
        clock.lap(name)
    for name, step in kept if args.kernels and team.on_card else ():
        if not clock.over():
            timer.kernels(name, step)
            clock.lap(f"{name}'s kernels")
    forms.model.blocks, forms.model.ranks = forms.whole, None


def _compare(team: Gang, forms: _Forms, name: str, mode: str, step: Work, want: Tensor) -> None:
    """Tell whether a step on fresh caches gives the logits of one rank."""
    forms.fresh()
    step()
    differs = (forms.logits != want).any(1)
    entry = {"what": name, "mode": mode, "bits_equal": not team.anywhere(bool(differs.any()))}
    team.tell({**entry, "rows_that_differ": team.largest(int(differs.sum()))})


def _config(dims: str) -> ModelConfig:
    """Return the dimensions of a name, a checkpoint folder or a config.json."""
    if dims == "released":
        return released_config()
    file = Path(dims).expanduser()
    return load_model_config(file if file.is_file() else resolve_model(dims))


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print a JSON line for each result."""
    parser = argparse.ArgumentParser(
        prog="python -m deepinfer.bench.scaling",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    rank_options(parser)
    parser.add_argument(
        "--dims", default="released", help="released, golden, demo, a checkpoint or a config.json"
    )
    parser.add_argument("--depth", type=int, default=6, help="layers that the model keeps")
    parser.add_argument("--sequences", type=int, default=32, help="of a rank")
    parser.add_argument("--rows", type=int, default=1, help="of a sequence")
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--back-ends", type=lambda t: t.split(","), default=["exact"])
    parser.add_argument(
        "--graphs", type=lambda t: t.split(","), default=["whole", "slice", "symm"],
        help="forms that are recorded as a CUDA graph before they are timed",
    )  # fmt: skip
    parser.add_argument("--kernels", action="store_true", help="times of kernels in graphs, too")
    parser.add_argument(
        "--limit", type=float, default=600.0, help="seconds after which no form begins (600)"
    )
    given = list(sys.argv[1:] if argv is None else argv)
    args = parser.parse_args(given)
    with gang("deepinfer.bench.scaling", given, args) as team:
        with torch.inference_mode():
            _measure(team, args)
        gc.collect()  # graphs go before the groups whose calls they hold
    return 0


if __name__ == "__main__":
    sys.exit(main())
