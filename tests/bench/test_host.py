"""The host's suites on tiny sizes: what is measured, not how fast. No test asserts a time."""

from __future__ import annotations

import statistics

import pytest

from deepinfer.bench import batching
from deepinfer.bench.batching import measure_batching, run_jobs
from deepinfer.bench.host import measure_host
from deepinfer.bench.report import Record
from deepinfer.bench.workload import Job, log_normal_mix, longest_first
from deepinfer.config.engine import EngineConfig
from deepinfer.errors import RequestError
from deepinfer.llm import LLM


def test_host_figures() -> None:
    records = measure_host(2, steps=5, rows=(3, 5), device_s=0.002)
    names = [record.figure.name for record in records]
    assert names == [
        "host_3", "prepare_3", "host_5", "prepare_5", "busy_plain", "busy_overlapped",
    ]  # fmt: skip
    assert all(len(r.figure.values) == 2 and min(r.figure.values) > 0 for r in records)
    assert [Record.from_json(record.to_json()) for record in records] == records


def test_a_mix_is_a_function_of_its_seed() -> None:
    mix = log_normal_mix(400, 100, seed=7)
    assert mix == log_normal_mix(400, 100, seed=7) != log_normal_mix(400, 100, seed=8)
    outputs = [job.output for job in mix]
    assert 25 <= statistics.median(outputs) <= 40 and max(outputs) > 100
    assert all(1 <= len(job.prompt) <= 256 and 1 <= job.output <= 256 for job in mix)
    assert all(3 <= token < 100 for job in mix for token in job.prompt)
    assert sorted(outputs, reverse=True) == [job.output for job in longest_first(mix)]


def test_batching_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    def short(count: int, vocab_size: int, *, seed: int) -> list[Job]:
        return [Job((5 + seed,) * (3 + i), 2 + i) for i in range(count)]

    monkeypatch.setattr(batching, "log_normal_mix", short)
    config = EngineConfig.from_dotted({"scheduling.max_num_seqs": 4})
    records = measure_batching("golden", config, 1, count=5, alone=2)
    assert [record.figure.name for record in records] == [
        "one_by_one", "continuous", "oracle", "over_one_by_one", "of_oracle", "p99_wait",
    ]  # fmt: skip
    assert all(min(record.figure.values) > 0 for record in records)
    assert records[0].settings == {"scheduling.max_num_seqs": 4}


def test_a_failing_job_is_told() -> None:
    with (
        LLM("golden", device="cpu", config={"scheduling.max_model_len": 8}) as llm,
        pytest.raises(RequestError, match="failed"),
    ):
        run_jobs(llm, [Job((5,) * 9, 2)], together=True)
