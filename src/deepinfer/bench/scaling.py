"""What sharing the experts costs: a decode step of N ranks beside one GPU's, at real dimensions.

`python -m deepinfer.bench.scaling --ranks 2 --device cuda` makes the released model with some of
its layers and random weights on every GPU, and runs the same rows

    whole   on one GPU with all experts: whose logits those of N ranks must equal bit for bit
    slice   on one GPU with its share of the experts; a choice falls to the expert modulo their
            number, so that as many pairs meet as many experts as on a rank, and nothing travels
    NAME    on N ranks that share the experts over a back end

Each with rows and caches of its own on every rank. `efficiency` is slice / NAME: what is left of a
GPU's speed when rows travel. `speedup` is N x whole / NAME: tokens/s of N GPUs over those of one.
Times are the slowest rank's, medians of rounds that take turns.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import statistics
import sys
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
from deepinfer.config.load import load_model_config, released_config
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
        config = released_config() if args.config is None else load_model_config(args.config)
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
        """Return the logits of a step."""
        self.model.blocks, self.model.ranks = blocks, shares
        if shares is not None:
            self.model.begin(self.inputs.num_rows)
        return self.model.forward(self.inputs, self.bench.caches, self.every)

    def fresh(self) -> None:
        """Make the caches again what they were."""
        fill_caches(self.bench.caches, self.config, self.bench.device, self.team.ranks.rank)


def _measure(team: Gang, args: argparse.Namespace) -> None:
    forms = _Forms(team, args)
    told = {
        "depth": len(forms.layers),
        "layers": list(forms.layers),
        "sequences": args.sequences,
        "rows": args.rows,
        "context": args.context,
    }
    forms.fresh()
    want = forms.run(forms.whole, None).clone()
    team.tell({"what": "whole", **told, "finite": bool(want.isfinite().all())})
    steps: dict[str, Callable[[], object]] = {}
    flows = {"whole", "slice"}
    for name in args.back_ends:
        try:
            blocks, shares = forms.shared(name)
        except (DeepInferError, RuntimeError) as error:
            team.tell({"what": name, "error": str(error).splitlines()[0][:200]})
            continue
        forms.fresh()
        found = forms.run(blocks, shares)
        wrong = team.anywhere(not torch.equal(found, want))
        rows = team.largest(int((found != want).any(1).sum()))
        team.tell({"what": name, "bits_equal": not wrong, "rows_that_differ": rows})
        steps[name] = partial(forms.run, blocks, shares)
        if shares.exchange.flows or name in ("fixed", "gathered"):
            flows.add(name)
    steps["slice"] = partial(forms.run, forms.slice, None)
    steps["whole"] = partial(forms.run, forms.whole, None)
    recorded = [name for name in steps if team.on_card and name in flows and name in args.graphs]
    for name in recorded:
        steps[name]()
        steps[name] = team.recorded(steps[name])
    rounds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(_ROUNDS):
        for name, step in steps.items():
            rounds[name].append(1e6 * team.seconds(step, most=40))
    middle = {name: statistics.median(times) for name, times in rounds.items()}
    for name, times in rounds.items():
        entry: dict[str, Any] = {
            "suite": "scaling",
            "what": name,
            "mode": "graph" if name in recorded else "eager",
            "step_us": round(middle[name], 1),
            "spread": round(max(times) / min(times) - 1, 4),
        }
        if name not in ("whole", "slice"):
            entry["efficiency"] = round(middle["slice"] / middle[name], 3)
            entry["speedup"] = round(args.ranks * middle["whole"] / middle[name], 3)
        if name in recorded:
            found_us = team.kernels_us(steps[name])
            entry["kernels_us"] = round(sum(found_us.values()), 1)
            entry["exchange_us"] = round(sum(found_us.get(k, 0.0) for k in _EXCHANGE), 1)
            entry["peak_bytes"] = torch.cuda.max_memory_allocated()
        team.tell({**entry, **told})
    forms.model.blocks, forms.model.ranks = forms.whole, None


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print a JSON line for each result."""
    parser = argparse.ArgumentParser(
        prog="python -m deepinfer.bench.scaling",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    rank_options(parser)
    parser.add_argument("--config", type=Path, help="of another model than the released one")
    parser.add_argument("--depth", type=int, default=6, help="layers that the model keeps")
    parser.add_argument("--sequences", type=int, default=32, help="of a rank")
    parser.add_argument("--rows", type=int, default=1, help="of a sequence")
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--back-ends", type=lambda t: t.split(","), default=["exact"])
    parser.add_argument(
        "--graphs", type=lambda t: t.split(","), default=["whole", "slice", "symm"],
        help="forms that are recorded as a CUDA graph before they are timed",
    )  # fmt: skip
    given = list(sys.argv[1:] if argv is None else argv)
    args = parser.parse_args(given)
    with gang("deepinfer.bench.scaling", given, args) as team:
        with torch.inference_mode():
            _measure(team, args)
        gc.collect()  # graphs go before the groups whose calls they hold
    return 0


if __name__ == "__main__":
    sys.exit(main())
