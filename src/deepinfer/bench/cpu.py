"""The CPU's speed through the public engine: decoding, prefill, Python's share, loading, memory.

Prompts are random ids of a fixed seed and sampling is greedy without an end, so that every repeat
does the same work.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, Literal
from unittest.mock import patch

import torch

from deepinfer.bench.machine import describe_machine, describe_versions
from deepinfer.bench.report import Figure, Record, changed_settings
from deepinfer.config.engine import EngineConfig
from deepinfer.config.load import PACKAGED_MODELS
from deepinfer.engine.request import Completion, SamplingParams
from deepinfer.errors import DeepInferError, RequestError
from deepinfer.llm import LLM
from deepinfer.model.fast.model import FastModel
from deepinfer.sampling.sampler import Sampler

__all__ = ["Sizes", "StepWatch", "measure_cpu"]

_SEED: Final = 20
_LOAD_MODULE: Final = "deepinfer.bench.load"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How much a repeat does; smaller than these only in tests."""

    prompt: int = 16
    output: int = 64
    streams: int = 16
    prefill: int = 300
    overhead_steps: int = 48


def measure_cpu(
    model: str,
    config: EngineConfig,
    repeat: int,
    sizes: Sizes = Sizes(),
    tell: Callable[[str], None] = lambda text: None,
) -> list[Record]:
    """Measure every figure and return one Record each.

    config  settings of all figures
    tell    called with a line before each figure
    Raises RequestError when the model cannot hold the prompts, and what LLM raises.
    """
    assert repeat >= 1, repeat
    when = datetime.now(UTC).isoformat(timespec="seconds")
    machine = describe_machine() | _load_average()
    tell(f"load: {repeat} processes")
    loads = _measure_loads(model, config, repeat)
    found: list[Figure] = []
    with LLM(model, device="cpu", config=config) as llm:
        for figure in _figures(llm, sizes):
            tell(f"{figure.name}: one warm-up, then {repeat} repeats")
            figure.run()
            found.append(figure.of([figure.run() for _ in range(repeat)]))
        threads = torch.get_num_threads()
    found += _load_figures(loads)
    return [
        Record(
            suite="cpu",
            figure=figure,
            model=model if model in PACKAGED_MODELS else Path(model).resolve().name,
            when=when,
            threads=threads,
            machine=machine,
            versions=describe_versions(),
            settings=changed_settings(config),
        )
        for figure in found
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Measure:
    """One figure: its definition, and the call that measures it once."""

    name: str
    unit: str
    better: Literal["higher", "lower"]
    how: str
    run: Callable[[], float]

    def of(self, values: Sequence[float]) -> Figure:
        """Return the figure with its values."""
        return Figure(
            name=self.name,
            unit=self.unit,
            better=self.better,
            values=_rounded(values),
            warmup=1,
            how=self.how,
        )


def _rounded(values: Sequence[float]) -> tuple[float, ...]:
    return tuple(float(f"{value:.5g}") for value in values)


def _load_average() -> dict[str, str]:
    """Return the programs that wanted to run in the last minute, where the system tells."""
    try:
        return {"load_before": f"{os.getloadavg()[0]:.2f}"}
    except (OSError, AttributeError):
        return {}


def _figures(llm: LLM, sizes: Sizes) -> list[_Measure]:
    num = sizes.streams
    return [
        _Measure(
            name="decode_1",
            how=f"one stream, prompt of {sizes.prompt}, output of {sizes.output}: tokens after "
            "the first, over the time from the first to the last",
            unit="tokens/s",
            better="higher",
            run=lambda: _decode_speed(llm, 1, sizes),
        ),
        _Measure(
            name=f"decode_{num}",
            how=f"{num} streams, prompts of {sizes.prompt}, outputs of {sizes.output}: tokens "
            "after each stream's first, over the time from the earliest first to the last of all",
            unit="tokens/s",
            better="higher",
            run=lambda: _decode_speed(llm, num, sizes),
        ),
        _Measure(
            name=f"prefill_{sizes.prefill}",
            how=f"prompt of {sizes.prefill}: from its submission to its first token",
            unit="s",
            better="lower",
            run=lambda: _prefill_time(llm, sizes),
        ),
        _Measure(
            name=f"overhead_{num}",
            how=f"a step of {num} rows: time of LLM.step less the time inside FastModel.forward "
            "and Sampler.sample, mean over the steps of a repeat, prefill included; so building "
            "the step's inputs, scheduling, reading the tokens and finishing count as far as they "
            "are not hidden behind the model",
            unit="ms",
            better="lower",
            run=lambda: _overhead(llm, sizes),
        ),
    ]


def _prompt(llm: LLM, length: int, which: int) -> list[int]:
    """Return a prompt that depends on its arguments only."""
    rng = random.Random(_SEED * 1000 + which)
    return [rng.randrange(llm.model_config.vocab_size) for _ in range(length)]


def _params(output: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=output, ignore_eos=True)


def _checked(completion: Completion, output: int) -> Completion:
    """Return a completion that ran to its end; raises RequestError otherwise."""
    if completion.error is not None:
        raise RequestError(f"a request of the benchmark failed: {completion.error}")
    if len(completion.token_ids) != output:
        raise RequestError(
            f"a request of the benchmark ended after {len(completion.token_ids)} of {output} "
            f"tokens ({completion.finish_reason}): raise scheduling.max_model_len"
        )
    return completion


def _decode_speed(llm: LLM, streams: int, sizes: Sizes) -> float:
    """Return the decoded tokens per second of all streams together."""
    submitted: dict[int, float] = {}
    firsts: list[float] = []
    ends: list[float] = []
    for stream in range(streams):
        now = time.perf_counter()
        prompt = _prompt(llm, sizes.prompt, stream)
        submitted[llm.submit(prompt, _params(sizes.output))] = now
    while len(ends) < streams:
        for completion in llm.step():
            _checked(completion, sizes.output)
            assert completion.ttft_s is not None
            firsts.append(submitted[completion.request_id] + completion.ttft_s)
            ends.append(submitted[completion.request_id] + completion.finish_s)
    return streams * (sizes.output - 1) / (max(ends) - min(firsts))


def _prefill_time(llm: LLM, sizes: Sizes) -> float:
    """Return the seconds of one prompt."""
    prompt = _prompt(llm, sizes.prefill, 0)
    start = time.perf_counter()
    (completion,) = llm.generate([prompt], _params(1))
    took = time.perf_counter() - start
    _checked(completion, 1)
    return took


@dataclass(slots=True)
class StepWatch:
    """Adds up the time inside model and sampler, and notes the rows of the last forward pass."""

    inside_s: float = 0.0
    rows: int = 0
    sampled: int = 0

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Time every call of the model and the sampler within the block."""
        forward, sample = FastModel.forward, Sampler.sample

        def timed_forward(model: FastModel, inputs: Any, caches: Any, rows: Any) -> Any:
            start = time.perf_counter()
            result = forward(model, inputs, caches, rows)
            self.inside_s += time.perf_counter() - start
            self.rows, self.sampled = inputs.num_rows, rows.shape[0]
            return result

        def timed_sample(sampler: Sampler, *args: Any, **options: Any) -> Any:
            start = time.perf_counter()
            result = sample(sampler, *args, **options)
            self.inside_s += time.perf_counter() - start
            return result

        with (
            patch.object(FastModel, "forward", timed_forward),
            patch.object(Sampler, "sample", timed_sample),
        ):
            yield


def _overhead(llm: LLM, sizes: Sizes) -> float:
    """Return the milliseconds of a step outside model and sampler."""
    watch = StepWatch()
    steps, whole = 0, False
    output = sizes.overhead_steps + 1
    for stream in range(sizes.streams):
        llm.submit(_prompt(llm, sizes.prompt, stream), _params(output))
    finished = 0
    with watch.installed():
        start = time.perf_counter()
        while finished < sizes.streams:
            completions = llm.step()
            steps += 1
            whole = whole or watch.rows == watch.sampled == sizes.streams
            for completion in completions:
                _checked(completion, output)
                finished += 1
        took = time.perf_counter() - start
    if not whole:
        raise RequestError(
            f"no step decoded all {sizes.streams} streams: raise scheduling.max_num_seqs"
        )
    return 1000 * (took - watch.inside_s) / steps


def _measure_loads(model: str, config: EngineConfig, repeat: int) -> list[dict[str, float]]:
    """Load the model in fresh processes, one after the other; raises DeepInferError."""
    sets = [f"{key}={_spelled(value)}" for key, value in changed_settings(config).items()]
    command = [sys.executable, "-m", _LOAD_MODULE, model, *sets]
    found = []
    for _ in range(repeat):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
            raise DeepInferError(f"loading {model} in a process of its own failed: {lines[-1]}")
        found.append(json.loads(done.stdout.splitlines()[-1]))
    return found


def _spelled(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _load_figures(loads: Sequence[Mapping[str, float]]) -> list[Figure]:
    return [
        Figure(
            name="import",
            unit="s",
            better="lower",
            values=_rounded([load["import_s"] for load in loads]),
            warmup=0,
            how="importing the engine and torch in a fresh process",
        ),
        Figure(
            name="load",
            unit="s",
            better="lower",
            values=_rounded([load["load_s"] for load in loads]),
            warmup=0,
            how="building LLM in a fresh process, imports not counted; the first may read files "
            "from disk",
        ),
        Figure(
            name="peak_memory",
            unit="MiB",
            better="lower",
            values=_rounded([load["peak_bytes"] / 2**20 for load in loads]),
            warmup=0,
            how="most resident memory of a fresh process that loads the model and generates one "
            "token, libraries included",
        ),
    ]
