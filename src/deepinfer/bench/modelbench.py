"""Whole models of random weights at any depth, their steps timed and split by op.

Nothing here needs a checkpoint: weights are made on the device (`model/fast/random.py`), caches are
filled with random valid bytes for a stated context, and a step runs as the engine's runner runs it:
forward, greedy choice, drafts.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Final
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from deepinfer.bench.timing import make_clock
from deepinfer.cache.layout import CacheLayout
from deepinfer.cache.tensors import Caches
from deepinfer.config import ModelConfig
from deepinfer.device import pick_device
from deepinfer.errors import ConfigError
from deepinfer.kernels.cache_io import PagedCache
from deepinfer.kernels.libraries import why_not
from deepinfer.kernels.ops import Ops
from deepinfer.kernels.table import TABLE
from deepinfer.model.fast import model as model_module
from deepinfer.model.fast.inputs import (
    DecodeRows,
    ModelInputs,
    ReplayMode,
    SequenceRows,
    build_inputs,
    decode_inputs,
)
from deepinfer.model.fast.model import FastModel
from deepinfer.model.fast.random import random_model, shallow

__all__ = ["ModelBench", "OpSplit", "StepTime", "choose_layers", "decode_step", "prefill_step"]

_TOKENS_PER_BLOCK: Final = 128
_ROOM: Final = 256
"""Positions behind a context that steps may move on to."""
_SCALES: Final = {"window_fp8": (117, 122), "main_fp4": (0x1C, 0x38), "index_fp4": (122, 128)}
"""Scale bytes that give entries of about unit size."""


def choose_layers(config: ModelConfig, depth: int) -> tuple[int, ...]:
    """Return which layers a model of `depth` keeps: every kind early, then evenly.

    Each layer brings the sources that it reads from. `depth` may be exceeded by these.
    """
    if depth >= config.num_hidden_layers:
        return tuple(range(config.num_hidden_layers))
    kept: set[int] = set()
    seen: set[tuple[object, ...]] = set()
    kind: tuple[object, ...]

    def keep(layer_id: int) -> None:
        layer = config.layers[layer_id]
        sources = [s for s in (layer.kv_source, layer.index_source) if s is not None]
        if layer.ratio:
            sources += [max(i for i in config.index_k_source_layer_ids if i <= layer_id)]
        if layer.filters_candidates and config.candidate_source_layer_id is not None:
            sources.append(config.candidate_source_layer_id)
        kept.add(layer_id)
        for source in sources:
            if source not in kept:
                keep(source)

    for engram in (False, True):  # those with Engram after all other kinds
        for layer in config.layers:
            kind = (layer.kind, layer.ratio, layer.is_candidate_source)
            kind = ("Engram",) if engram and layer.engram_idx is not None else kind
            if kind not in seen and len(kept) < depth:
                seen.add(kind)
                keep(layer.layer_id)
    for place in range(depth):
        if len(kept) < depth:
            keep(place * config.num_hidden_layers // depth)
    for layer_id in range(config.num_hidden_layers):
        if len(kept) < depth:
            keep(layer_id)
    return tuple(sorted(kept))


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Microseconds of a step.

    us, us_burst  of the device, under steady load and after a pause (`bench/timing.py`)
    wall_us       from step to step in a loop that stays one step ahead, None on a CPU
    mode          "graph", "no graph", "events" or "clock"
    """

    us: float
    us_burst: float
    wall_us: float | None
    mode: str

    @property
    def idle(self) -> float | None:
        """Share of the loop in which the device has no work."""
        return None if self.wall_us is None else max(0.0, 1.0 - self.us / self.wall_us)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpSplit:
    """Where the device's time of one step goes, microseconds.

    ops       op -> time of its kernels; "other" is what belongs to none
    counts    op -> calls
    kinds     kind of layer -> mean time of one layer
    launches  kernels of the step, 0 on a CPU
    """

    ops: Mapping[str, float]
    counts: Mapping[str, int]
    kinds: Mapping[str, float]
    launches: int


class ModelBench:
    """A model of random weights with caches of a stated context."""

    def __init__(
        self,
        config: ModelConfig,
        device: torch.device,
        *,
        depth: int | None = None,
        experts: tuple[int, int] | None = None,
        sequences: int,
        context: int,
        rows: int,
        drafts: bool = True,
        seed: int = 0,
        model: FastModel | None = None,
        use: Sequence[tuple[str, str]] = (),
    ) -> None:
        """Make the model, caches for `sequences` of `context` tokens and `rows` more each.

        model  one that was made with the same config, depth, experts and drafts, to go on with
        use    (op, implementation) to take instead of the table's first, also those that the
               engine does not choose
        Raises ConfigError for one that the table does not have for this device.
        """
        self.whole = config
        self.layers = choose_layers(config, depth or config.num_hidden_layers)
        if len(self.layers) < config.num_hidden_layers:
            config = shallow(config, self.layers)
        self.config, self.device = config, device
        self.sequences, self.context, self.rows = sequences, context, rows
        self.with_drafts = drafts and config.num_nextn_predict_layers > 0
        before = _allocated(device)
        self.model: FastModel = model or random_model(
            config, device, experts, seed, with_drafts=self.with_drafts
        )
        self.weight_bytes = _allocated(device) - before
        self.model.ops = ops = with_implementations(self.model.ops, use, device)
        if self.model.draft is not None:
            self.model.draft.ops = ops
        self.layout = CacheLayout.build(config, "official", _TOKENS_PER_BLOCK)
        self.per_sequence = -(-(context + rows + _ROOM) // _TOKENS_PER_BLOCK)
        before = _allocated(device)
        num_blocks = sequences * self.per_sequence + 1
        self.caches = Caches.allocate(self.layout, num_blocks, sequences + 1, device)
        self.cache_bytes = _allocated(device) - before
        fill_caches(self.caches, config, device, seed)
        self._rng = np.random.default_rng(seed)
        self.tables = self._rng.permutation(num_blocks - 1).reshape(sequences, -1) + 1

    def decode_inputs(self) -> ModelInputs:
        """Lay out a step of `rows` rows for every sequence behind its context."""
        count, rows = self.sequences, self.rows
        return decode_inputs(
            DecodeRows(
                slots=np.arange(1, count + 1),
                starts=np.full(count, self.context),
                counts=None if rows == 1 else np.full(count, rows),
                token_ids=self._tokens(count * rows),
                blocks=self.tables,
                held=np.full(count, self.per_sequence),
            ),
            self.layout,
            self.device,
        )

    def prefill_inputs(self, replay: ReplayMode, keep: int) -> ModelInputs:
        """Lay out the last `rows` tokens of a prompt of context + rows, for every sequence.

        keep  under bounded replay, the positions of the end that the decoder half runs
        """
        end = self.context + self.rows
        floor = 0 if replay == "off" else max(0, end - keep)
        ids = self._tokens(self.sequences * self.rows).reshape(self.sequences, -1)
        sequences = [
            SequenceRows(slot, self.context, row.tolist(), table.tolist(), floor)
            for slot, row, table in zip(range(1, self.sequences + 1), ids, self.tables, strict=True)
        ]
        return build_inputs(sequences, False, self.layout, self.device, replay)

    def _tokens(self, count: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        high = min(self.config.vocab_size, 128000)
        return self._rng.integers(3, high, count)


def with_implementations(ops: Ops, use: Sequence[tuple[str, str]], device: torch.device) -> Ops:
    """Return ops with other implementations; raises ConfigError naming what there is."""
    arch = pick_device(str(device)).capability.arch
    functions: dict[str, Any] = {}
    choices = dict(ops.choices)
    for op, name in use:
        lines = {
            line.name: line
            for line in TABLE.get(op, ())
            if (not line.archs or arch in line.archs) and not (line.needs and why_not(line.needs))
        }
        if name not in lines:
            raise ConfigError(
                f"{op}={name}: expected one of {', '.join(sorted(lines)) or 'no implementation'} "
                f"on {arch}"
            )
        choices[op] = lines[name]
        functions[op] = getattr(import_module(f"deepinfer.kernels.{lines[name].module}"), op)
    return dataclasses.replace(ops, choices=choices, **functions)


def _allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def fill_caches(caches: Caches, config: ModelConfig, device: torch.device, seed: int = 0) -> None:
    """Fill every ring, page and tail with random bytes that are valid entries."""
    generator = torch.Generator(device).manual_seed(seed)
    for cache in (*caches.windows, *caches.main.values(), *caches.index.values()):
        _fill(cache, generator)
    for ring in caches.tails.values():
        ring.normal_(generator=generator)
    if caches.engram_tail is not None:
        high = max(1, config.engram_compressed_vocab_size)
        caches.engram_tail.random_(0, high, generator=generator)


def _fill(cache: PagedCache, generator: torch.Generator) -> None:
    if cache.scales is None:
        cache.codes.normal_(generator=generator)
        return
    low, high = _SCALES[cache.format]
    step = max(1, (1 << 26) // max(1, cache.codes[0].numel()))
    for start in range(0, cache.codes.shape[0], step):
        codes, scales = cache.codes[start : start + step], cache.scales[start : start + step]
        made = torch.empty(codes.shape, dtype=torch.uint8, device=codes.device)
        made.random_(0, 256, generator=generator)
        if cache.format == "window_fp8":
            made -= ((made & 127) == 127).to(torch.uint8)  # no NaN
        codes.copy_(made)
        made = torch.empty(scales.shape, dtype=torch.uint8, device=scales.device)
        scales.copy_(made.random_(low, high, generator=generator))


# One step, as the runner runs it


def decode_step(bench: ModelBench, inputs: ModelInputs) -> Callable[[], Tensor]:
    """Return what runs a decode step: forward, greedy tokens of every row, drafts behind them."""
    model, device = bench.model, bench.device
    every = torch.arange(inputs.num_rows, device=device)
    slots = torch.arange(1, bench.sequences + 1, device=device)
    last = torch.full_like(slots, bench.context + bench.rows - 1)
    ends = torch.arange(1, bench.sequences + 1, device=device) * bench.rows - 1

    def step() -> Tensor:
        tokens = model.forward(inputs, bench.caches, every).argmax(-1)
        if model.draft is None:
            return tokens
        return model.draft.propose(bench.caches, slots, last, tokens[ends])[0]

    return step


def prefill_step(bench: ModelBench, inputs: ModelInputs) -> Callable[[], Tensor]:
    """Return what runs a prefill step: forward, and the token behind every sequence's last row."""
    ends = torch.arange(1, bench.sequences + 1, device=bench.device) * bench.rows - 1

    def step() -> Tensor:
        return bench.model.forward(inputs, bench.caches, ends).argmax(-1)

    return step


def time_step(step: Callable[[], Tensor], device: torch.device, loops: int = 12) -> StepTime:
    """Time a step, outside graphs, and from step to step in a loop with inputs and tokens."""
    with torch.inference_mode():
        clock = make_clock([step], 1e30, device, most_calls=0)
        clock.burst()
        clock.load()
        clock.later()
        timing = clock.timing()
        wall = _loop(clock.run, step, device, loops) if device.type == "cuda" else None
        clock.close()
    return StepTime(us=timing.us, us_burst=timing.us_burst, wall_us=wall, mode=timing.mode)


def _loop(
    run: Callable[[], None], step: Callable[[], Tensor], device: torch.device, loops: int
) -> float:
    """Return microseconds a step of a loop that stays one step ahead of the device.

    Each turn copies a packed input of 64 KiB to the device, runs, copies tokens back, and waits for
    the tokens of the turn before.
    """
    packed = torch.zeros(1 << 16, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(packed.shape, dtype=torch.uint8, device=device)
    tokens = step()
    host = [torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True) for _ in range(2)]
    events = [torch.cuda.Event() for _ in range(2)]  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    times: list[float] = []
    before = time.perf_counter()
    for turn in range(loops):
        there.copy_(packed, non_blocking=True)
        run()
        host[turn % 2].copy_(tokens, non_blocking=True)
        events[turn % 2].record()
        if turn:
            events[(turn - 1) % 2].synchronize()
        now = time.perf_counter()
        times.append((now - before) * 1e6)
        before = now
    torch.cuda.synchronize()
    return statistics.median(times[2:])


# Where the time goes


@contextmanager
def _named(bench: ModelBench) -> Iterator[None]:
    """Name every op and every layer for the profiler."""
    model = bench.model
    plain, mark = model.ops, torch.profiler.record_function

    def name(op: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def named(*arguments: Any, **options: Any) -> Any:
            with mark(f"op:{op}"):
                return function(*arguments, **options)

        return named

    found = {
        f.name: name(f.name, getattr(plain, f.name))
        for f in dataclasses.fields(Ops)
        if callable(getattr(plain, f.name))
    }
    layers = iter([f"layer:{layer.kind} {layer.ratio}" for layer in bench.config.layers])
    run_block: Callable[..., Any] = vars(model_module)["run_block"]

    def block(*arguments: Any, **options: Any) -> Any:
        with mark(next(layers, "layer:draft")):
            return run_block(*arguments, **options)

    timed = dataclasses.replace(plain, **found)  # type: ignore[arg-type]
    model.ops = timed
    if model.draft is not None:
        model.draft.ops = timed
    try:
        with patch.object(model_module, "run_block", block):
            yield
    finally:
        model.ops = plain
        if model.draft is not None:
            model.draft.ops = plain


def split_ops(bench: ModelBench, step: Callable[[], object]) -> OpSplit:
    """Profile one step outside graphs and add up the kernels of each op."""
    card = bench.device.type == "cuda"
    kinds = [torch.profiler.ProfilerActivity.CPU]
    if card:
        kinds.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.inference_mode():
        step()
        if card:
            torch.cuda.synchronize()
        with _named(bench), torch.profiler.profile(activities=kinds) as profile:
            step()
            if card:
                torch.cuda.synchronize()
    ops: dict[str, float] = {}
    counts: dict[str, int] = {}
    layers: dict[str, list[float]] = {}
    total, launches = 0.0, 0
    events: Any = profile.events()
    for event in events:
        on_device = str(event.device_type).endswith("CUDA")
        if on_device:
            if not event.name.startswith(("op:", "layer:", "Memcpy HtoD", "Memcpy DtoH")):
                total += event.time_range.elapsed_us()
                launches += not event.name.startswith(("Memcpy", "Memset"))
            continue
        spent = event.device_time_total if card else event.cpu_time_total
        kind, _, name = event.name.partition(":")
        if kind == "op":
            ops[name] = ops.get(name, 0.0) + spent
            counts[name] = counts.get(name, 0) + 1
        elif kind == "layer":
            layers.setdefault(name, []).append(spent)
    if not card:
        total = _cpu_total(profile)
    if total > sum(ops.values()):
        ops["other"] = total - sum(ops.values())
    return OpSplit(
        ops=dict(sorted(ops.items(), key=lambda item: -item[1])),
        counts=counts,
        kinds={name: statistics.fmean(times) for name, times in layers.items()},
        launches=launches,
    )


def _cpu_total(profile: torch.profiler.profile) -> float:
    """Add up what begins at the top, outside of every other event."""
    events: Any = profile.events()  # type: ignore[no-untyped-call]
    return float(sum(e.cpu_time_total for e in events if e.cpu_parent is None))


def sequence_flops(config: ModelConfig, rows: int, layers: Sequence[int]) -> float:
    """Return the operations of so many rows in the linears and experts of some layers."""
    heads, dim = config.num_attention_heads, config.head_dim
    dense = config.hidden_size * (config.q_lora_rank + dim) + config.q_lora_rank * heads * dim
    dense += heads * dim * config.o_lora_rank + config.o_groups * config.o_lora_rank * (
        config.hidden_size
    )
    expert = 3 * config.hidden_size * config.moe_intermediate_size
    active = config.num_experts_per_tok + config.n_shared_experts
    return 2.0 * rows * len(layers) * (dense + active * expert)
