"""`deepinfer bench layer | decode | prefill | slice`: steps of models of random weights."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import Any, Final, Literal

import torch

from deepinfer.bench.ceilings import Ceilings, measure_ceilings
from deepinfer.bench.floors import Rates, floor_us, step_loads
from deepinfer.bench.machine import describe_card, describe_machine, describe_versions
from deepinfer.bench.modelbench import (
    ModelBench,
    OpSplit,
    StepTime,
    choose_layers,
    decode_step,
    prefill_step,
    split_ops,
    time_step,
)
from deepinfer.bench.records import record_of
from deepinfer.bench.slices import (
    Fabric,
    Network,
    Part,
    Replayed,
    Slice,
    exchange_part,
    install,
    statement,
    sync_factor,
)
from deepinfer.config import ModelConfig
from deepinfer.config.engine import NumericsConfig
from deepinfer.device import pick_device
from deepinfer.errors import ConfigError
from deepinfer.kernels.table import W4A8
from deepinfer.model.fast.inputs import ReplayMode

__all__ = ["Asked", "StepRecord", "measure_slice", "measure_steps", "read_step"]

Form = Literal["layer", "decode", "prefill", "slice"]

_SPREAD: Final = ((0.5, 1.0), (1.5, 1.0), (1.0, 0.5), (1.0, 1.5))
"""Factors on latencies and rate of a fabric, for the table of what they change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What to measure.

    depth      layers, None = all
    sequences  each a step of its own
    rows       of each sequence: 1 + drafts in decode, the chunk in prefill
    context    cached tokens of each sequence before the step
    ranks      the experts held are those of one rank of so many
    keep       under bounded replay, the positions that the decoder half runs
    use        (op, implementation) to take instead of the table's first
    numerics   the engine's settings, None = the fastest of them
    branches   recorded steps have branches
    settings   those that differ from the defaults, for the record
    """

    depth: int | None
    sequences: tuple[int, ...]
    rows: int
    context: int
    ranks: int = 1
    replay: ReplayMode = "off"
    keep: int = 140
    drafts: bool = True
    split: bool = True
    seed: int = 0
    use: tuple[tuple[str, str], ...] = ()
    numerics: NumericsConfig | None = None
    branches: bool = True
    settings: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One step timed.

    tokens        rows of the step that a user gets something for: all of a prefill, one each of a
                  decode without drafts, the stated law of a slice
    ops           op -> microseconds of its kernels in a step run without a graph
    kinds         kind of layer -> mean microseconds of one
    kernels       name -> microseconds of the largest kernels of that step
    variants      name -> {"step_us", "tokens_per_s"} with the network of a slice
    sensitivity   the same for other latencies and rates
    floors        part -> microseconds below which no version of it runs (`bench/floors.py`)
    ceilings      what the chip reads and multiplies, measured in the same run
    replay        of a prefill, what its decoder half runs
    settings      dotted keys that differ from the defaults
    statement     what the figures of a slice rest on, "" for others
    """

    form: Form
    depth: int
    of_depth: int
    ranks: int
    sequences: int
    rows: int
    context: int
    step_us: float
    burst_us: float
    wall_us: float | None
    idle: float | None
    mode: str
    tokens: float
    tokens_per_s: float
    weight_bytes: int = 0
    cache_bytes: int = 0
    peak_bytes: int = 0
    pairs: float = 0.0
    launches: int = 0
    launches_per_layer: float = 0.0
    ops: Mapping[str, float] = field(default_factory=dict)
    kinds: Mapping[str, float] = field(default_factory=dict)
    kernels: Mapping[str, float] = field(default_factory=dict)
    choices: Mapping[str, str] = field(default_factory=dict)
    variants: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    sensitivity: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    floors: Mapping[str, float] = field(default_factory=dict)
    ceilings: Mapping[str, float] = field(default_factory=dict)
    replay: str = ""
    settings: Mapping[str, object] = field(default_factory=dict)
    used: Sequence[Sequence[str]] = ()
    law: str = ""
    slice_mode: str = ""
    sync: float = 0.0
    statement: str = ""
    when: str = ""
    machine: Mapping[str, str | int] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> str:
        """Return the record as one line."""
        return json.dumps({"format": 1, "suite": "steps", **asdict(self)}, ensure_ascii=False)


def read_step(line: str) -> StepRecord:
    """Read what `to_json` wrote; raises ValueError when the line is no such record."""
    return record_of(line, "steps", StepRecord)


def measure_steps(
    form: Form,
    config: ModelConfig,
    device: str,
    asked: Asked,
    tell: Callable[[str], None] = lambda text: None,
    keep: Callable[[StepRecord], None] = lambda record: None,
) -> list[StepRecord]:
    """Time a decode or prefill step (or its layers) for each number of sequences.

    keep  called with each record once it is measured
    """
    plan = Slice(ranks=asked.ranks, mode="fold", seed=asked.seed) if asked.ranks > 1 else None
    _check(config, asked, plan, device)
    records: list[StepRecord] = []
    bench: ModelBench | None = None
    chip = _chip(device)
    for sequences in asked.sequences:
        bench, step = _prepare(form, config, device, asked, sequences, plan, bench)
        timed, split = _run(bench, step, asked.split, form != "prefill")
        tokens = _own_tokens(form, bench)
        records.append(
            _record(form, bench, asked, timed, split, tokens, plan, chip, form == "prefill")
        )
        keep(records[-1])
        tell(f"{form}: {sequences} x {asked.rows} rows {timed.us:,.0f} us ({timed.mode})")
    return records


def measure_slice(
    config: ModelConfig,
    device: str,
    asked: Asked,
    plan: Slice,
    fabric: Fabric,
    accepted: float,
    prefill: bool = False,
    tell: Callable[[str], None] = lambda text: None,
    keep: Callable[[StepRecord], None] = lambda record: None,
    chunk: Asked | None = None,
) -> list[StepRecord]:
    """Time one rank's step for each number of sequences, and add the modelled network.

    accepted  tokens that a sequence gains in a step: the law of acceptance
    keep      called with each record once it is measured
    chunk     a prompt's chunk to time afterwards on the same weights
    """
    _check(config, asked, plan, device)
    todo = [(asked, sequences, prefill) for sequences in asked.sequences]
    if chunk is not None:
        _check(config, chunk, plan, device)
        todo += [(chunk, sequences, True) for sequences in chunk.sequences]
    records: list[StepRecord] = []
    bench: ModelBench | None = None
    chip = _chip(device)
    for part, sequences, whole in todo:
        form: Form = "prefill" if whole else "decode"
        bench, step = _prepare(form, config, device, part, sequences, plan, bench)
        exchanges: tuple[Replayed, ...] = ()
        if plan.mode == "replay":
            exchanges = install(plan, bench.model, sequences * part.rows, bench.device)
        timed, split = _run(bench, step, part.split, not whole)
        tokens = float(sequences * part.rows) if whole else accepted * sequences
        record = _record("slice", bench, part, timed, split, tokens, plan, chip, whole)
        drawn = [rows.pick.shape[0] for e in exchanges for rows in e.drawn.values()]
        pairs = sum(drawn) / len(drawn) if drawn else 0.0
        record = _with_network(record, bench, part, plan, fabric, accepted, whole, pairs)
        records.append(record)
        keep(record)
        tell(f"slice: {sequences} x {part.rows} rows {timed.us:,.0f} us ({timed.mode})")
    return records


def _check(config: ModelConfig, asked: Asked, plan: Slice | None, device: str) -> None:
    """Refuse what cannot be run; raises ConfigError with every problem."""
    problems = []
    held = config.n_routed_experts // (plan.ranks if plan is not None else 1)
    layers = len(choose_layers(config, asked.depth or config.num_hidden_layers))
    least = layers * held * 3 * config.hidden_size * config.moe_intermediate_size // 2
    available = pick_device(device).available_bytes()
    if least > available:
        problems.append(
            f"memory: {held} experts in each of {layers} layers alone take {least / 1e9:,.1f} GB, "
            f"{available / 1e9:,.1f} are free here: give --ranks, --depth or smaller --dims"
        )
    if plan is not None and config.n_routed_experts % plan.ranks:
        problems.append(f"ranks: {plan.ranks} does not divide {config.n_routed_experts} experts")
    longest = asked.context + asked.rows
    if longest > config.max_position_embeddings:
        problems.append(
            f"context: {longest} positions, the model has {config.max_position_embeddings}"
        )
    if plan is not None and plan.mode == "fold" and plan.hot != 1.0:
        problems.append("hot: folded choices are even; use the mode replay")
    if problems:
        raise ConfigError("the step cannot be measured as asked", problems)


def _chip(device: str) -> Ceilings:
    """Measure what the chip does at most, before weights fill its memory."""
    picked = pick_device(device)
    picked.bind_thread()
    with torch.inference_mode():
        found = measure_ceilings(picked.torch_device)
    if picked.torch_device.type == "cuda":
        torch.cuda.empty_cache()
    return found


def _floors(
    bench: ModelBench, asked: Asked, plan: Slice | None, chip: Ceilings, prefill: bool
) -> dict[str, float]:
    """Return the least time of every part of a step on this chip, under steady load."""
    config = bench.config
    bounded = prefill and asked.replay != "off"
    loads = step_loads(
        config,
        sequences=bench.sequences,
        rows=bench.rows,
        context=bench.context,
        local_experts=plan.experts(config)[1] if plan is not None else config.n_routed_experts,
        drafts=bench.with_drafts and not prefill,
        fp8_experts=bench.model.ops.choices["routed_experts"].name == W4A8,
        kept=asked.keep if bounded else None,
        head_rows=1 if prefill else None,
        hot=plan.hot if plan is not None else 1.0,
    )
    rates = Rates(
        read=max(chip.read, chip.copy),
        bf16=chip.bf16_steady or chip.bf16,
        fp8=chip.fp8_steady or chip.bf16_steady or chip.bf16,
    )
    return floor_us(loads, rates)


def _prepare(
    form: Form,
    config: ModelConfig,
    device: str,
    asked: Asked,
    sequences: int,
    plan: Slice | None,
    before: ModelBench | None,
) -> tuple[ModelBench, Callable[[], torch.Tensor]]:
    picked = pick_device(device)
    picked.bind_thread()
    prefill = form == "prefill"
    model, weight_bytes = None, 0
    if before is not None:  # the same weights, other caches
        model, weight_bytes = before.model, before.weight_bytes
        del before.caches
        _free(before)
    with torch.inference_mode():
        bench = ModelBench(
            config,
            picked.torch_device,
            depth=asked.depth,
            experts=plan.experts(config) if plan is not None else None,
            sequences=sequences,
            context=asked.context,
            rows=asked.rows,
            drafts=asked.drafts,
            seed=asked.seed,
            model=model,
            use=asked.use,
            numerics=asked.numerics,
        )
        bench.weight_bytes = bench.weight_bytes or weight_bytes
        bench.model.branch(asked.branches)
        if prefill:
            return bench, prefill_step(bench, bench.prefill_inputs(asked.replay, asked.keep))
        return bench, decode_step(bench, bench.decode_inputs())


def _run(
    bench: ModelBench, step: Callable[[], torch.Tensor], split: bool, decode: bool
) -> tuple[StepTime, OpSplit | None]:
    """Time a step and split it: on a card a decode step is one of the engine's runner there."""
    if not decode or bench.device.type != "cuda":
        timed = time_step(step, bench.device)
        return timed, split_ops(bench, step) if split else None
    from deepinfer.bench.enginesteps import RunnerSteps

    steps = RunnerSteps(bench, graphs=True)
    timed = steps.time()
    steps.runner.graphs.forget()
    return timed, split_ops(bench, RunnerSteps(bench, graphs=False).run) if split else None


def _free(bench: ModelBench) -> None:
    if bench.device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(bench.device)


def _own_tokens(form: Form, bench: ModelBench) -> float:
    return float(bench.sequences * bench.rows) if form == "prefill" else float(bench.sequences)


def _record(
    form: Form,
    bench: ModelBench,
    asked: Asked,
    timed: StepTime,
    split: OpSplit | None,
    tokens: float,
    plan: Slice | None,
    chip: Ceilings,
    prefill: bool,
) -> StepRecord:
    card = bench.device.type == "cuda"
    blocks = bench.config.num_hidden_layers
    return StepRecord(
        form=form,
        depth=blocks,
        of_depth=bench.whole.num_hidden_layers,
        ranks=asked.ranks,
        sequences=bench.sequences,
        rows=bench.rows,
        context=bench.context,
        step_us=timed.us,
        burst_us=timed.us_burst,
        wall_us=timed.wall_us,
        idle=timed.idle,
        mode=timed.mode,
        tokens=tokens,
        tokens_per_s=tokens / (timed.us * 1e-6),
        weight_bytes=bench.weight_bytes,
        cache_bytes=bench.cache_bytes,
        peak_bytes=torch.cuda.max_memory_allocated(bench.device) if card else 0,
        pairs=float(bench.sequences * bench.rows * bench.config.num_experts_per_tok),
        launches=split.launches if split else 0,
        launches_per_layer=split.launches / blocks if split else 0.0,
        ops=split.ops if split else {},
        kinds=split.kinds if split else {},
        kernels=split.kernels if split else {},
        floors=_floors(bench, asked, plan, chip, prefill),
        ceilings=asdict(chip),
        replay=asked.replay if prefill else "",
        settings=asked.settings,
        used=asked.use,
        choices={op: choice.name for op, choice in bench.model.ops.choices.items()},
        when=datetime.now(UTC).isoformat(timespec="seconds"),
        machine=describe_machine() | describe_card(bench.device),
        versions=describe_versions(),
    )


def _with_network(
    record: StepRecord,
    bench: ModelBench,
    asked: Asked,
    plan: Slice,
    fabric: Fabric,
    accepted: float,
    prefill: bool,
    pairs: float,
) -> StepRecord:
    """Add the fabric's variants, what they change, and the statement."""
    tokens = bench.sequences * bench.rows
    parts = _parts(bench, asked, plan, tokens, prefill)
    net = Network(
        fabric=fabric,
        parts=parts,
        hidden=bench.config.hidden_size,
        overlap_us=_shared_us(bench, tokens),
    )
    # With two micro-batches in turn, the other one's whole layer runs meanwhile.
    halves = record.step_us / max(1, sum(part.layers for part in parts)) / 2.0
    two = Network(fabric=fabric, parts=parts, hidden=net.hidden, overlap_us=halves)
    variants = {
        "N0, no network": record.step_us,
        "N1, serial": record.step_us + net.serial_us,
        "N2, behind the shared expert": record.step_us + net.overlapped_us,
        "N2, behind another micro-batch": record.step_us + two.overlapped_us,
    }
    others = {
        f"N1, latency x {latency:g}, rate x {rate:g}": record.step_us
        + net.with_fabric(latency, rate).serial_us
        for latency, rate in _SPREAD
    }
    parts_us = {op: us for op, us in record.ops.items() if op != "other"} or record.floors
    share = sum(us for op, us in parts_us.items() if "expert" in op) / record.step_us
    sync = sync_factor(plan, bench.config, tokens, min(1.0, share))
    law = (
        "a prompt's chunk counts whole"
        if prefill
        else f"{accepted:g} tokens a step of {bench.rows} rows"
    )

    def rates(found: Mapping[str, float]) -> dict[str, dict[str, float]]:
        return {
            name: {"step_us": us, "tokens_per_s": record.tokens / (us * 1e-6)}
            for name, us in found.items()
        }

    fields = {name: getattr(record, name) for name in record.__dataclass_fields__}
    fields.update(
        ranks=plan.ranks,
        pairs=pairs or record.pairs,
        variants=rates(variants),
        sensitivity=rates(others),
        law=law,
        slice_mode=plan.mode if plan.hot == 1.0 else f"{plan.mode}, hot {plan.hot:g}",
        sync=sync,
        statement=statement(
            plan,
            str(record.machine.get("card") or record.machine.get("cpu", "device")),
            record.depth,
            record.of_depth,
            law,
            fabric,
            sync,
            beside=record.mode == "graph" and not prefill,
        ),
    )
    return StepRecord(**fields)


def _parts(
    bench: ModelBench, asked: Asked, plan: Slice, tokens: int, prefill: bool
) -> tuple[Part, ...]:
    config = bench.config
    layers = config.num_hidden_layers
    if prefill and asked.replay == "compact" and config.first_decoder_layer is not None:
        kept = min(tokens, asked.keep * bench.sequences)
        encoder = config.first_decoder_layer
        return (
            exchange_part(plan, config, tokens, encoder),
            exchange_part(plan, config, kept, layers - encoder),
        )
    drafts = config.num_nextn_predict_layers if bench.with_drafts and not prefill else 0
    return (exchange_part(plan, config, tokens, layers + drafts),)


def _shared_us(bench: ModelBench, tokens: int) -> float:
    """Time the shared expert of a layer alone, cold: what can hide an exchange in a serial step."""
    from deepinfer.bench.timing import make_clock

    model, config = bench.model, bench.config
    ops, quantize = model.ops, model.numerics.quantize
    x = torch.randn(tokens, config.hidden_size, device=bench.device).to(model.numerics.dtype)

    def call(weights: Any) -> Callable[[], torch.Tensor]:
        def run() -> torch.Tensor:
            gate, up = ops.fp8_linear(x, weights.shared_w1_w3, False).chunk(2, dim=-1)
            hidden = ops.swiglu(gate, up, config.swiglu_limit, None)
            return ops.fp8_linear(hidden, weights.shared_w2, quantize)

        return run

    with torch.inference_mode():
        calls = [call(block.moe) for block in model.blocks[:8]]
        clock = make_clock(calls, 6.0 * tokens * config.hidden_size, bench.device)
        clock.burst()
        found = clock.timing().us
        clock.close()
    return found
