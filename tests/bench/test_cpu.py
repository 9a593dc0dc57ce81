"""The suite on tiny sizes: what is measured, not how fast. No test asserts a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from deepinfer.bench import cpu
from deepinfer.bench.cpu import Sizes, StepWatch, measure_cpu
from deepinfer.bench.report import Record
from deepinfer.config.engine import EngineConfig
from deepinfer.engine.request import SamplingParams
from deepinfer.errors import DeepInferError, RequestError
from deepinfer.llm import LLM
from deepinfer.model.fast.model import FastModel
from deepinfer.sampling.sampler import Sampler

TINY = Sizes(prompt=2, output=3, streams=2, prefill=5, overhead_steps=2)
CONFIG = EngineConfig.from_dotted({"scheduling.max_num_seqs": 4})


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("golden", device="cpu", config=CONFIG) as engine:
        yield engine


@pytest.fixture(scope="module")
def records() -> list[Record]:
    return measure_cpu("golden", CONFIG, 2, TINY)


def test_every_figure_is_there_once(records: list[Record]) -> None:
    names = [record.figure.name for record in records]
    assert names == [
        "decode_1", "decode_2", "prefill_5", "overhead_2", "import", "load", "peak_memory",
    ]  # fmt: skip
    for record in records:
        assert len(record.figure.values) == 2
        assert all(value > 0 for value in record.figure.values)
        assert record.figure.how


def test_a_run_shares_what_it_depends_on(records: list[Record]) -> None:
    assert len({(r.suite, r.when, r.model, r.threads) for r in records}) == 1
    assert records[0].settings == {"scheduling.max_num_seqs": 4}


def test_records_survive_json(records: list[Record]) -> None:
    assert [Record.from_json(record.to_json()) for record in records] == records


def test_repeats_do_the_same_work(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[int]] = []
    submit = LLM.submit

    def noted(self: LLM, prompt: Any, params: SamplingParams | None = None) -> int:
        seen.append(list(prompt))
        return submit(self, prompt, params)

    monkeypatch.setattr(LLM, "submit", noted)
    cpu._decode_speed(llm, 2, TINY)
    cpu._decode_speed(llm, 2, TINY)
    assert seen[:2] == seen[2:]
    assert seen[0] != seen[1]


def test_the_watch_sees_model_and_sampler_and_leaves(llm: LLM) -> None:
    before = (FastModel.forward, Sampler.sample)
    watch = StepWatch()
    with watch.installed():
        llm.generate([[5, 6, 7]], SamplingParams(temperature=0, max_tokens=1))
        assert (watch.rows, watch.sampled) == (3, 1)
        llm.generate([[5]], SamplingParams(temperature=0, max_tokens=1))
        assert (watch.rows, watch.sampled) == (1, 1)
    assert watch.inside_s > 0
    assert (FastModel.forward, Sampler.sample) == before


def test_streams_that_never_run_together_are_refused(llm: LLM) -> None:
    many = Sizes(prompt=1, output=2, streams=5, prefill=1, overhead_steps=1)
    with pytest.raises(RequestError, match="max_num_seqs"):
        cpu._overhead(llm, many)


def test_a_prompt_beyond_the_limit_is_one_error() -> None:
    config = EngineConfig.from_dotted({"scheduling.max_model_len": 8})
    with LLM("golden", device="cpu", config=config) as small:
        with pytest.raises(RequestError, match="benchmark"):
            cpu._prefill_time(small, Sizes(prefill=20))
        with pytest.raises(RequestError, match="benchmark"):
            cpu._decode_speed(small, 1, Sizes(prompt=6, output=9))


def test_a_model_that_cannot_load_says_why(tmp_path: Any) -> None:
    with pytest.raises(DeepInferError, match="process of its own failed"):
        cpu._measure_loads(str(tmp_path / "none"), EngineConfig(), 1)
