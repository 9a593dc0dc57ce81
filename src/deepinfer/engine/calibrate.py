"""What steps cost on this machine: measured once at start, kept on disk for the next start."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor

from deepinfer.config.engine import EngineConfig
from deepinfer.config.load import cache_dir
from deepinfer.engine.costs import CostCurve, load_curve, measure_curve, save_curve
from deepinfer.engine.drafting import Drafter, confidence_temperatures
from deepinfer.engine.graphs import Played
from deepinfer.engine.runner import Runner
from deepinfer.engine.speculation import DraftPlanner
from deepinfer.engine.state import SlotState
from deepinfer.model.fast.inputs import ModelInputs, SequenceRows, build_inputs
from deepinfer.model.fast.model import FastModel
from deepinfer.sampling.sampler import Sampler

__all__ = ["make_drafter", "make_planner"]

_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 384, 512, 768, 1024, 1536, 2048, 3072)
_SECONDS = 1.5  # measuring ends with the size that used these up; the last slope goes on from there
_REPEATS = 3


def make_drafter(
    config: EngineConfig, model: FastModel, sampler: Sampler, state: SlotState
) -> Drafter | None:
    """Return the device side of speculation, None when it is off."""
    if config.speculation.num_drafts == 0:
        return None
    assert model.draft is not None, "the model was loaded without its draft blocks"
    temperatures = confidence_temperatures(config.speculation, model.config)
    ahead = model.look_ahead if model.ahead else None
    return Drafter(model.draft, sampler, state, temperatures, config.speculation.method, ahead)


def make_planner(
    config: EngineConfig,
    runner: Runner,
    num_blocks: int,
    model_path: Path,
    device_name: str,
    largest: Callable[[float], float] = lambda value: value,
) -> DraftPlanner | None:
    """Return the policy of speculation, None when it is off; may measure the cost curve.

    num_blocks  in the caches, with the padding block
    largest     of a number over the ranks that compute together, which all measure the same sizes
    Call it before the first request: measuring writes into the caches.
    """
    chosen = config.speculation
    if runner.drafter is None:
        return None
    curve = None
    if chosen.variable:
        drafter = runner.drafter
        curve = _curve(config, runner, drafter, num_blocks, model_path, device_name, largest)
    return DraftPlanner(
        chosen.num_drafts,
        variable=chosen.variable,
        curve=curve,
        lag=chosen.method == "rejection",
    )


def _curve(
    config: EngineConfig,
    runner: Runner,
    drafter: Drafter,
    num_blocks: int,
    model_path: Path,
    device_name: str,
    largest: Callable[[float], float],
) -> CostCurve:
    """Load the curve of this model, machine and these settings, or measure and keep it."""
    most_sequences = config.scheduling.max_num_seqs
    most_rows = most_sequences * (1 + drafter.num_drafts)
    sizes = [size for size in _SIZES if size < most_rows] + [most_rows]
    text = (model_path / "config.json").read_bytes()
    fingerprint = {
        "model": hashlib.blake2b(text, digest_size=8).hexdigest(),
        "device": device_name,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "numerics": asdict(config.numerics),
        "sizes": sizes,
        "num_drafts": drafter.num_drafts,
        "recorded": runner.records,
    }
    max_age_s = config.speculation.cost_cache_seconds
    name = hashlib.blake2b(json.dumps(fingerprint).encode(), digest_size=8).hexdigest()
    path = cache_dir() / "costs" / f"{name}.json"
    found = load_curve(path, fingerprint, max_age_s) if max_age_s else None
    if not largest(float(found is None)) and found is not None:
        return found
    with torch.inference_mode():
        curve = _measure(runner, drafter, sizes, most_sequences, num_blocks, largest)
    if max_age_s:
        with suppress(OSError):  # a read-only home only costs the measurement
            save_curve(path, curve, fingerprint)
    return curve


def _measure(
    runner: Runner,
    drafter: Drafter,
    sizes: list[int],
    most_sequences: int,
    num_blocks: int,
    largest: Callable[[float], float],
) -> CostCurve:
    """Run steps of made-up rows and draft passes, as far as the time allows."""
    layout, caches = runner.layout, runner.caches
    start = layout.tokens_per_block // 2
    model = runner.model
    assert isinstance(model, FastModel)

    laid_out: dict[int, ModelInputs] = {}

    def lay_out(size: int) -> tuple[ModelInputs, list[int]]:
        num = min(size, most_sequences)
        rows = []
        for idx in range(num):
            count = size // num + (idx < size % num)
            table = [1 + idx % max(1, num_blocks - 1)] * (1 + count // layout.tokens_per_block)
            rows.append(SequenceRows(1 + idx, start, [7] * count, [*table, *table]))
        inputs = build_inputs(rows, True, layout, runner.device)
        return inputs, [1 + idx for idx in range(num) for _ in rows[idx].token_ids]

    def run_rows(size: int) -> None:
        model.begin(size)
        inputs, slots = lay_out(size)
        every = torch.arange(size, device=runner.device)
        logits = model.forward(inputs, caches, every)
        runner.sampler.sample(logits, slots, [start] * size).token_ids.tolist()

    def step(size: int) -> None:
        if size not in laid_out:
            laid_out[size] = lay_out(size)[0]
        every = torch.arange(size, device=runner.device)
        model.forward(laid_out[size], caches, every).argmax(dim=-1)

    def draft(size: int) -> Tensor:
        slots = torch.arange(1, 1 + size, device=runner.device)
        return drafter.model.propose(
            caches, slots, slots * 0 + start, slots * 0 + 7, None, drafter.num_drafts
        )[0]

    def run_drafts(size: int) -> None:
        model.begin(size * model.config.dspark_block_size)
        draft(size).tolist()

    run_step: Callable[[int], None] = run_rows
    run_draft: Callable[[int], None] = run_drafts
    if runner.records and model.ranks is None:
        run_step, run_draft = Played(step), Played(draft)

    begin = time.perf_counter()
    rows: list[int] = []
    seconds: list[float] = []
    draft_sizes: list[int] = []
    draft_seconds: list[float] = []
    for size in sizes:
        part = measure_curve(run_step, lambda _: None, [size], [1], repeats=_REPEATS)
        rows.append(size)
        seconds.append(part.seconds[0])
        if size <= most_sequences:
            part = measure_curve(lambda _: None, run_draft, [1], [size], repeats=_REPEATS)
            draft_sizes.append(size)
            draft_seconds.append(part.draft_seconds[0])
        if largest(time.perf_counter() - begin) > _SECONDS and len(rows) > 1:
            break
    if model.ranks is not None:
        for layer in model.ranks.layers:
            layer.counts.zero_()  # made-up rows are no load
    return CostCurve(tuple(rows), tuple(seconds), tuple(draft_sizes), tuple(draft_seconds))
