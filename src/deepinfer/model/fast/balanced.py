"""A model's experts as `parallel/live.py` moves them."""

from __future__ import annotations

import zlib
from collections.abc import Callable

import torch

from deepinfer.config.engine import ParallelConfig
from deepinfer.errors import UnsupportedError
from deepinfer.kernels.expert_linear import Fp4Weight
from deepinfer.kernels.expert_linear.reference import dequantize_rows
from deepinfer.kernels.packed.kept import released_form, repack_fp4
from deepinfer.model.fast.model import FastModel
from deepinfer.model.fast.weights import BlockWeights, MoeWeights
from deepinfer.parallel.comm import Group
from deepinfer.parallel.group import Ranks
from deepinfer.parallel.live import BalancedLayer, LiveBalancer

__all__ = ["balanced_layers", "make_balancer"]


def make_balancer(config: ParallelConfig, ranks: Ranks, model: FastModel) -> LiveBalancer:
    """Return what moves a model's experts between the ranks that share them; all of them call it.

    Its groups are its own: weights travel while a step's rows do. Where packed forms took the place
    of stored weights these travel; raises UnsupportedError if ranks hold different ones.
    """
    members, timeout_s = ranks.expert.members, config.timeout_s
    control = ranks.add("experts planned", members, timeout_s)
    _check_alike(control, model)
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
    return [found for block in _blocks(model) if (found := _layer(block.moe)) is not None]


def _blocks(model: FastModel) -> list[BlockWeights]:
    return [*model.blocks, *(model.draft.blocks if model.draft is not None else ())]


def _layer(weights: MoeWeights) -> BalancedLayer | None:
    if weights.ranks is None:
        return None
    held = (weights.w1_w3, weights.w2)
    forms = [released_form(weight.codes) for weight in held]
    packed = [form for form in forms if form is not None]
    if len(packed) == len(held):  # an expert's packed bytes are whole by themselves
        parts = tuple(part for form in packed for part in (form.data, form.row_scale))
        return BalancedLayer(weights.ranks, parts, lambda slot: None)
    parts = tuple(part for weight in held for part in (weight.codes, weight.scale))
    return BalancedLayer(weights.ranks, parts, _kept_again(held))


def _check_alike(control: Group, model: FastModel) -> None:
    """Raise UnsupportedError on every rank unless all hold the same forms of every layer."""
    text = "".join(_form(block.moe) for block in _blocks(model))
    number = zlib.crc32(text.encode())
    both = torch.tensor([number, -number], dtype=torch.int64)
    most = [int(control.all_reduce(part.view(1), largest=True)) for part in both]
    if most != [number, -number]:
        raise UnsupportedError(
            "ranks hold experts in different packed forms, so none can move: set "
            "weights.keep_stored, or parallel.balance_interval to 0"
        )


def _form(weights: MoeWeights) -> str:
    forms = (released_form(weight.codes) for weight in (weights.w1_w3, weights.w2))
    return "".join("stored," if form is None else f"{form.decoded.name}," for form in forms)


def _kept_again(held: tuple[Fp4Weight, ...]) -> Callable[[int], None]:
    """Return what brings everything that is kept beside a slot's stored form up to date."""

    def derived(slot: int) -> None:
        for weight in held:
            if weight.dense is not None:
                weight.dense[slot] = dequantize_rows(weight.codes[slot], weight.scale[slot])
            repack_fp4(weight.codes, weight.scale, slot)

    return derived
