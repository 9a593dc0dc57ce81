"""Whole models of random weights at any depth, their steps timed and split by op.

Nothing here needs a checkpoint: weights are made on the device (`model/fast/random.py`), caches are
filled with random valid bytes for a stated context, and a step runs as the engine's runner runs it:
forward, greedy choice, drafts.
"""

from __future__ import annotations

import bisect
import dataclasses
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib import import_module
from itertools import repeat
from typing import Any, Final
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from deepinfer.bench.timing import make_clock
from deepinfer.cache.layout import CacheLayout
from deepinfer.cache.tensors import Caches
from deepinfer.config import ModelConfig
from deepinfer.config.engine import NumericsConfig
from deepinfer.device import pick_device
from deepinfer.errors import ConfigError
from deepinfer.kernels.cache_io import PagedCache
from deepinfer.kernels.libraries import why_not
from deepinfer.kernels.ops import Ops
from deepinfer.kernels.table import TABLE
from deepinfer.model import dspark as draft_module
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
    kernels   name -> time of the largest kernels, on a card
    """

    ops: Mapping[str, float]
    counts: Mapping[str, int]
    kinds: Mapping[str, float]
    launches: int
    kernels: Mapping[str, float]


_FASTEST: Final = NumericsConfig(batch_invariant=False)


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
        numerics: NumericsConfig | None = None,
    ) -> None:
        """Make the model, caches for `sequences` of `context` tokens and `rows` more each.

        model  one that was made with the same config, depth, experts and drafts, to go on with
        use    (op, implementation) to take instead of the table's first, also those that the
               engine does not choose
        numerics  settings of the engine; by default every kernel, also those whose bits for a
                  row depend on its batch
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
            config,
            device,
            experts,
            seed,
            numerics=numerics or _FASTEST,
            with_drafts=self.with_drafts,
            lean=device.type != "cpu" and not use,  # others may want another packed form
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


def time_step(step: Callable[[], Tensor], device: torch.device) -> StepTime:
    """Time a step, outside graphs, and from step to step in a loop with inputs and tokens."""
    with torch.inference_mode():
        clock = make_clock([step], 1e30, device, most_calls=0)
        clock.burst()
        clock.load()
        clock.later()
        timing = clock.timing()
        loops = max(4, min(12, int(2e6 / timing.us)))
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

    def block(run: Callable[..., Any], names: Iterator[str]) -> Callable[..., Any]:
        def named(*arguments: Any, **options: Any) -> Any:
            with mark(next(names, "layer:more")):
                return run(*arguments, **options)

        return named

    timed = dataclasses.replace(plain, **found)  # type: ignore[arg-type]
    model.ops = timed
    if model.draft is not None:
        model.draft.ops = timed
    places = [(model_module, each, layers) for each in ("run_block", "run_open")]
    places += [(draft_module, each, repeat("layer:draft")) for each in ("run_block", "run_open")]
    try:
        with ExitStack() as stack:
            for module, attribute, names in places:
                run = vars(module).get(attribute)
                if run is not None:
                    stack.enter_context(patch.object(module, attribute, block(run, names)))
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
    spans = _spans(profile, "op:")
    times = _kernels(profile) if card else _tops(profile)
    ops: dict[str, float] = {}
    for name, spent in _by_span(spans, times):
        ops[name] = ops.get(name, 0.0) + spent
    layers: dict[str, list[float]] = {}
    for name, spent in _by_span(_spans(profile, "layer:"), times, each=True):
        layers.setdefault(name, []).append(spent)
    layers.pop(_OTHER, None)
    counts = Counter(name for _, _, name in spans)
    return OpSplit(
        ops=dict(sorted(ops.items(), key=lambda item: -item[1])),
        counts=dict(counts),
        kinds={name: statistics.fmean(found) for name, found in layers.items()},
        launches=len(times) if card else 0,
        kernels=_largest(profile) if card else {},
    )


_OTHER: Final = "other"
_Span = tuple[int, int, str]
"""Begin and end in nanoseconds of the host, and a name."""


def _raw(profile: Any) -> list[Any]:
    """Return the profiler's own events: names, host times, what launched which kernel."""
    return list(profile.profiler.kineto_results.events())


def _spans(profile: Any, prefix: str) -> list[_Span]:
    """Return what was marked on the host, in order of begin."""
    found = [
        (e.start_ns(), e.start_ns() + e.duration_ns(), e.name().removeprefix(prefix))
        for e in _raw(profile)
        if e.name().startswith(prefix) and str(e.device_type()).endswith("CPU")
    ]
    return sorted(found)


def _kernels(profile: Any) -> list[tuple[int, float]]:
    """Return when each kernel was launched by the host, and its microseconds on the device.

    A kernel without the record of its launch gets the time of the launch before it.
    """
    events = _raw(profile)
    launched = {
        e.correlation_id(): e.start_ns()
        for e in events
        if str(e.device_type()).endswith("CPU") and "aunch" in e.name()
    }
    device = [e for e in events if str(e.device_type()).endswith("CUDA")]
    kernels = [e for e in device if not e.name().startswith(_NO_KERNELS)]
    found: list[tuple[int, float]] = []
    before = 0
    for event in sorted(kernels, key=lambda e: e.start_ns()):
        before = launched.get(event.correlation_id(), before)
        found.append((before, event.duration_ns() / 1e3))
    return found


_NO_KERNELS: Final = ("op:", "layer:", "Memcpy", "Memset", "ProfilerStep")


def _largest(profile: Any, count: int = 24) -> dict[str, float]:
    """Return the kernels that take most of the time, all launches of a name added up."""
    spent: Counter[str] = Counter()
    for event in _raw(profile):
        if str(event.device_type()).endswith("CUDA") and not event.name().startswith(_NO_KERNELS):
            spent[event.name()[:80]] += event.duration_ns() / 1e3
    return {name: round(us, 1) for name, us in spent.most_common(count)}


def _tops(profile: Any) -> list[tuple[int, float]]:
    """Return begin and microseconds of what the host did, each stretch once: on a CPU."""
    found = [
        (e.start_ns(), e.start_ns() + e.duration_ns())
        for e in _raw(profile)
        if str(e.device_type()).endswith("CPU") and not e.name().startswith(("op:", "layer:"))
    ]
    times: list[tuple[int, float]] = []
    end = 0
    for start, stop in sorted(found, key=lambda pair: (pair[0], -pair[1])):
        if start >= end:
            times.append((start, (stop - start) / 1e3))
            end = stop
    return times


def _by_span(
    spans: Sequence[_Span], times: Sequence[tuple[int, float]], each: bool = False
) -> list[tuple[str, float]]:
    """Add times up by the span they begin in; what begins in none is "other".

    each  return every span by itself, in order, instead of every time
    """
    starts = [span[0] for span in spans]
    sums = [0.0] * len(spans)
    left = 0.0
    for at, spent in times:
        place = bisect.bisect_right(starts, at) - 1
        if place >= 0 and at < spans[place][1]:
            sums[place] += spent
        else:
            left += spent
    found = [(span[2], total) for span, total in zip(spans, sums, strict=True)]
    if not each:
        found.append((_OTHER, left))
    return found
