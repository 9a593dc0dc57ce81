"""A model's experts as `parallel/live.py` moves them."""

from __future__ import annotations

from collections.abc import Callable

from deepinfer.config.engine import ParallelConfig
from deepinfer.kernels.expert_linear import Fp4Weight
from deepinfer.kernels.expert_linear.reference import dequantize_rows
from deepinfer.kernels.packed.kept import repack_fp4
from deepinfer.model.fast.model import FastModel
from deepinfer.model.fast.weights import MoeWeights
from deepinfer.parallel.group import Ranks
from deepinfer.parallel.live import BalancedLayer, LiveBalancer

__all__ = ["balanced_layers", "make_balancer"]


def make_balancer(config: ParallelConfig, ranks: Ranks, model: FastModel) -> LiveBalancer:
    """Return what moves a model's experts between the ranks that share them; all of them call it.

    Its groups are its own: weights travel while a step's rows do.
    """
    members, timeout_s = ranks.expert.members, config.timeout_s
    control = ranks.add("experts planned", members, timeout_s)
    data = control
    if ranks.device.type != "cpu":
        data = ranks.add("experts moved", members, timeout_s, on_device=True)
    return LiveBalancer(
        balanced_layers(model),
        control,
        data,
        window=config.balance_window,
        interval=config.balance_interval,
        horizon=config.balance_horizon,
        spare=config.balance_spare,
        bytes_s=1e9 * config.balance_gb_s,
    )


def balanced_layers(model: FastModel) -> list[BalancedLayer]:
    """Return the layers whose experts ranks share: the backbone's, then the draft blocks'."""
    blocks = [*model.blocks, *(model.draft.blocks if model.draft is not None else ())]
    return [found for block in blocks if (found := _layer(block.moe)) is not None]


def _layer(weights: MoeWeights) -> BalancedLayer | None:
    if weights.ranks is None:
        return None
    held = (weights.w1_w3, weights.w2)
    parts = tuple(part for weight in held for part in (weight.codes, weight.scale))
    return BalancedLayer(weights.ranks, parts, _kept_again(held))


def _kept_again(held: tuple[Fp4Weight, ...]) -> Callable[[int], None]:
    """Return what brings everything that is kept beside a slot's stored form up to date."""

    def derived(slot: int) -> None:
        for weight in held:
            if weight.dense is not None:
                weight.dense[slot] = dequantize_rows(weight.codes[slot], weight.scale[slot])
            repack_fp4(weight.codes, weight.scale, slot)

    return derived
