"""Continuous batching on a mix of requests, against one by one and against a packer with foresight.

All requests are there from the beginning. The oracle is the same engine with the requests in the
order of `longest_first`, which needs to know every length.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, Literal

import torch

from deepinfer.bench.machine import describe_machine, describe_versions
from deepinfer.bench.report import Figure, Record, changed_settings
from deepinfer.bench.workload import Job, log_normal_mix, longest_first
from deepinfer.config.engine import EngineConfig
from deepinfer.config.load import PACKAGED_MODELS
from deepinfer.engine.request import SamplingParams
from deepinfer.errors import RequestError
from deepinfer.llm import LLM

__all__ = ["Outcome", "measure_batching", "run_jobs"]

_SEED: Final = 4


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a mix took.

    wall_s, cpu_s  time and CPU time of the process
    wait_s         per request, from its submission to its first token
    """

    num_tokens: int
    wall_s: float
    cpu_s: float
    wait_s: tuple[float, ...]
    tokens: tuple[tuple[int, ...], ...]


def run_jobs(llm: LLM, jobs: Sequence[Job], together: bool) -> Outcome:
    """Generate every job, all at once or one after the other.

    Raises RequestError when one of them fails.
    """
    params = [SamplingParams(temperature=0, max_tokens=job.output, ignore_eos=True) for job in jobs]
    begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
    if together:
        results = llm.generate([list(job.prompt) for job in jobs], params)
    else:
        results = [
            llm.generate([list(job.prompt)], own)[0] for job, own in zip(jobs, params, strict=True)
        ]
    wall_s, cpu_s = time.perf_counter() - begin_s, time.process_time() - begin_cpu_s
    for result in results:
        if result.error is not None:
            raise RequestError(f"a request of the benchmark failed: {result.error}")
    return Outcome(
        sum(len(result.token_ids) for result in results),
        wall_s,
        cpu_s,
        tuple(result.ttft_s or 0.0 for result in results),
        tuple(result.token_ids for result in results),
    )


def measure_batching(
    model: str,
    config: EngineConfig,
    repeat: int,
    count: int = 200,
    alone: int | None = None,
    tell: Callable[[str], None] = lambda text: None,
) -> list[Record]:
    """Measure a mix of `count` requests, `alone` of them (None = all) one by one.

    Raises RequestError when results differ between the orders: they must not.
    """
    with LLM(model, device="cpu", config=config) as llm:
        jobs = log_normal_mix(count, llm.model_config.vocab_size, seed=_SEED)
        run_jobs(llm, jobs[: min(8, count)], together=True)
        tell(f"{sum(job.output for job in jobs)} tokens in {count} requests; one by one")
        single = run_jobs(llm, jobs[:alone], together=False)
        together: list[Outcome] = []
        oracle: list[Outcome] = []
        for number in range(repeat):
            tell(f"repeat {number + 1} of {repeat}")
            together.append(run_jobs(llm, jobs, together=True))
            oracle.append(run_jobs(llm, longest_first(jobs), together=True))
    if together[0].tokens[: len(single.tokens)] != single.tokens:
        raise RequestError("a request gave other tokens in company than alone")
    single_speed = single.num_tokens / single.wall_s
    speeds = [run.num_tokens / run.wall_s for run in together]
    best = [run.num_tokens / run.wall_s for run in oracle]
    waits = [sorted(run.wait_s)[min(count - 1, int(0.99 * count))] for run in together]
    mix = f"{count} requests, log-normal lengths, seed {_SEED}"
    figures: list[tuple[str, str, Literal["higher", "lower"], list[float], str]] = [
        ("one_by_one", "tokens/s", "higher", [single_speed], f"{len(single.tokens)} of {mix}"),
        ("continuous", "tokens/s", "higher", speeds, f"{mix}, all there from the beginning"),
        ("oracle", "tokens/s", "higher", best, f"{mix}, longest outputs first"),
        ("over_one_by_one", "x", "higher", [s / single_speed for s in speeds], "ratio"),
        (
            "of_oracle",
            "x",
            "higher",
            [s / b for s, b in zip(speeds, best, strict=True)],
            "ratio of runs that followed each other",
        ),
        ("p99_wait", "s", "lower", waits, "from submission to first token, 99th of 100"),
    ]
    when = datetime.now(UTC).isoformat(timespec="seconds")
    machine, versions = describe_machine(), describe_versions()
    return [
        Record(
            suite="batching",
            figure=Figure(
                name=name,
                unit=unit,
                better=better,
                values=tuple(float(f"{value:.5g}") for value in values),
                warmup=1,
                how=how,
            ),
            model=model if model in PACKAGED_MODELS else Path(model).resolve().name,
            when=when,
            threads=torch.get_num_threads(),
            machine=machine,
            versions=versions,
            settings=changed_settings(config),
        )
        for name, unit, better, values, how in figures
    ]
