"""LLM over a toy device: inputs of every kind, one completion each, streams, cancels, Ctrl-C."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from toy_llm import MAX_LEN, PARAMS, VOCAB, Letters, ToyLLM, expected, finish

from deepinfer.engine.plan import StepPlan
from deepinfer.engine.request import FinishReason, SamplingParams
from deepinfer.errors import ConfigError, RequestError, UnsupportedError
from deepinfer.llm import LLM, Interrupted, Progress


@pytest.fixture(params=[False, True], ids=["plain", "overlapped"])
def llm(request: pytest.FixtureRequest) -> Iterator[ToyLLM]:
    with ToyLLM(overlap=request.param) as engine:
        yield engine
        assert engine._loop is None or not engine._loop.scheduler.has_requests


@pytest.mark.parametrize(
    ("prompts", "ids"),
    [
        ("abc", [[97, 98, 99]]),
        ([5, 6, 7], [[5, 6, 7]]),
        ((5, 6), [[5, 6]]),
        (np.array([5, 6, 7], np.int32), [[5, 6, 7]]),
        (np.array([[5, 6], [7, 8]]), [[5, 6], [7, 8]]),
        (torch.tensor([5, 6, 7]), [[5, 6, 7]]),
        ([torch.tensor([5, 6]), [7]], [[5, 6], [7]]),
        (["ab", "c"], [[97, 98], [99]]),
        ([[5], (6, 7), np.array([8])], [[5], [6, 7], [8]]),
        (["a", [5, 6]], [[97], [5, 6]]),
        ([], []),
    ],
)
def test_inputs(llm: ToyLLM, prompts: object, ids: list[list[int]]) -> None:
    results = llm.generate(prompts, PARAMS)  # type: ignore[arg-type]
    assert [list(r.prompt_token_ids) for r in results] == ids
    assert [r.index for r in results] == list(range(len(ids)))
    for result in results:
        assert list(result.token_ids) == expected(result.prompt_token_ids, PARAMS)
        assert result.error is None and result.finish_s >= (result.ttft_s or 0) >= 0


@pytest.mark.parametrize(
    ("prompt", "reason", "told"),
    [
        ("", "invalid_request", "empty"),
        ([], "invalid_request", "empty"),
        ([VOCAB], "invalid_request", "vocabulary 0..287"),
        ([3, -1], "invalid_request", "vocabulary"),
        ([1, 2.5], "invalid_request", "2.5"),
        ([1, "a"], "invalid_request", "'a'"),
        (None, "invalid_request", "NoneType"),
        (7.5, "invalid_request", "float"),
        (np.zeros((2, 2), np.int64), "invalid_request", "dimension"),
        (np.array([1.0]), "invalid_request", "float64"),
        (torch.tensor([1.5]), "invalid_request", "float32"),
        (torch.tensor(5), "invalid_request", "0-dimensional"),
        (torch.tensor([1.5], requires_grad=True), "invalid_request", "integers"),
        ([5] * (MAX_LEN + 1), "prompt_length_exceeded", "max_model_len"),
    ],
)
def test_a_bad_prompt_does_not_stop_the_others(
    llm: ToyLLM, prompt: object, reason: str, told: str
) -> None:
    results = llm.generate([[5], prompt, "ok"], PARAMS)  # type: ignore[list-item]
    assert [r.index for r in results] == [0, 1, 2]
    bad = results[1]
    assert bad.finish_reason == reason and told in (bad.error or "")
    assert bad.token_ids == () and bad.text == ""
    assert results[0].error is None and results[2].error is None
    assert results[2].token_ids


@pytest.mark.parametrize("prompts", [None, 5, b"abc", {"a": 1}])
def test_arguments_that_are_no_prompts(llm: ToyLLM, prompts: object) -> None:
    with pytest.raises(RequestError):
        llm.generate(prompts)  # type: ignore[arg-type]


def test_sampling_params_per_prompt(llm: ToyLLM) -> None:
    params = [SamplingParams(seed=i, max_tokens=i + 1, ignore_eos=True) for i in range(4)]
    results = llm.generate([[5, 6]] * 4, params)
    assert [len(r.token_ids) for r in results] == [1, 2, 3, 4]
    for result, own in zip(results, params, strict=True):
        expected_ids = expected([5, 6], own)
        assert list(result.token_ids) == expected_ids
    with pytest.raises(RequestError, match="2 sampling_params for 3 prompts"):
        llm.generate([[1], [2], [3]], params[:2])
    with pytest.raises(RequestError, match="dict"):
        llm.generate([[1]], {"temperature": 1})  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="int"):
        llm.generate([[1]], [3])  # type: ignore[list-item]


def test_seeds(llm: ToyLLM) -> None:
    same = llm.generate([[5, 6]] * 3, SamplingParams(seed=9, max_tokens=8))
    assert len({r.token_ids for r in same}) == 1
    fresh = llm.generate([[5, 6]] * 3, SamplingParams(max_tokens=8))
    assert len({r.token_ids for r in fresh}) == 3


def test_text_leaves_the_ending_id_out(llm: ToyLLM) -> None:
    long = SamplingParams(seed=3, max_tokens=40, ignore_eos=True)
    ids = expected([5], long)
    end = ids.index(ids[4])
    result = llm.generate([5], SamplingParams(seed=3, max_tokens=40, stop_token_ids=[ids[4]]))[0]
    assert list(result.token_ids) == ids[: end + 1] and result.finish_reason == "stop"
    assert result.text == Letters().decode(ids[:end])
    whole = llm.generate([5], long)[0]
    assert whole.text == Letters().decode(ids) and whole.finish_reason == "length"


def test_stop_string_across_tokens(llm: ToyLLM) -> None:
    long = SamplingParams(seed=3, max_tokens=20, ignore_eos=True)
    text = Letters().decode(expected([5], long))
    result = llm.generate(
        [5], SamplingParams(seed=3, max_tokens=20, ignore_eos=True, stop=["?", text[3:6]])
    )[0]
    assert result.text == text[: text.index(text[3:6])]
    assert result.finish_reason == "stop" and len(result.token_ids) == text.index(text[3:6]) + 3


def test_ids_alone() -> None:
    with ToyLLM(with_text=False) as llm:
        results = llm.generate([[5, 6], "text"], PARAMS)
        assert list(results[0].token_ids) == expected([5, 6], PARAMS) and results[0].text is None
        assert "tokenizer.json" in (results[1].error or "") and results[1].text is None
        stop = llm.generate([5], SamplingParams(stop="x"))[0]
        assert stop.finish_reason == "invalid_request" and "stop_token_ids" in (stop.error or "")
        chunks = list(llm.stream([5, 6], PARAMS))
        assert [i for c in chunks for i in c.token_ids] == list(results[0].token_ids)
        assert chunks[-1].completion is not None and chunks[-1].completion.text is None


def test_params_that_do_not_fit_the_model(llm: ToyLLM) -> None:
    results = llm.generate([[5], [6]], [SamplingParams(stop_token_ids=[VOCAB]), PARAMS])
    assert results[0].finish_reason == "invalid_request" and "stop_token_ids" in (
        results[0].error or ""
    )
    assert results[1].error is None
    nothing = SamplingParams(min_tokens=1, stop_token_ids=range(VOCAB))
    assert "no token" in (llm.generate([5], nothing)[0].error or "")


def test_stream_adds_up(llm: ToyLLM) -> None:
    prompts = [[5, 6], "", [7] * 20, [VOCAB]]
    params = SamplingParams(seed=3, max_tokens=9, stop=["zq"])
    plain = llm.generate(prompts, params)
    chunks = list(llm.stream(prompts, params))
    for index, result in enumerate(plain):
        own = [c for c in chunks if c.index == index]
        assert tuple(i for c in own for i in c.token_ids) == result.token_ids
        assert "".join(c.text for c in own) == result.text
        assert [c.finish_reason for c in own[:-1]] == [None] * (len(own) - 1)
        assert own[-1].finish_reason == result.finish_reason
        assert own[-1].completion is not None and own[-1].completion.text == result.text
    assert llm.step() == []


def test_leaving_a_stream_cancels_it(llm: ToyLLM) -> None:
    stream = llm.stream([[5], [6]], SamplingParams(max_tokens=50, ignore_eos=True))
    next(stream)
    assert llm.has_work
    stream.close()  # type: ignore[attr-defined]
    assert llm.step() == [] and not llm.has_work


def test_two_streams_and_a_call_at_once(llm: ToyLLM) -> None:
    params = SamplingParams(seed=3, max_tokens=9, ignore_eos=True)
    a, b = llm.stream([5], params), llm.stream([6], params)
    chunks_a, chunks_b = [next(a)], [next(b)]
    waiting = llm.submit([9], params)
    assert list(llm.generate([7], params)[0].token_ids) == expected([7], params)
    chunks_b += list(b)
    chunks_a += list(a)
    assert [i for c in chunks_a for i in c.token_ids] == expected([5], params)
    assert [i for c in chunks_b for i in c.token_ids] == expected([6], params)
    (other,) = finish(llm)
    assert other.request_id == waiting and list(other.token_ids) == expected([9], params)


def test_submit_step_cancel(llm: ToyLLM) -> None:
    params = SamplingParams(seed=3, max_tokens=20, ignore_eos=True)
    first, second, third = llm.submit([5], params), llm.submit("ab", params), llm.submit([VOCAB])
    early = llm.step()
    assert [c.request_id for c in early] == [third]
    assert llm.cancel(second) and not llm.cancel(second) and not llm.cancel(999)
    done = {c.request_id: c for c in finish(llm)}
    assert set(done) == {first, second}
    assert done[second].finish_reason == FinishReason.ABORT
    assert len(done[second].token_ids) == (0 if llm.overlaps else 1)  # read a step later
    assert done[second].text == Letters().decode(done[second].token_ids)
    assert list(done[first].token_ids) == expected([5], params)


def test_many_more_prompts_than_slots(llm: ToyLLM) -> None:
    prompts = [[i % VOCAB, 2, 3] for i in range(50)]
    seen: list[Progress] = []
    results = llm.generate(prompts, PARAMS, progress=seen.append)
    assert [list(r.token_ids) for r in results] == [expected(p, PARAMS) for p in prompts]
    assert seen[-1] == Progress(50, 50, sum(len(r.token_ids) for r in results))
    assert all(a.num_finished <= b.num_finished for a, b in pairwise(seen))
    assert seen[-1].num_failed == 0


def test_a_broken_progress_callback_does_not_stop_the_run(llm: ToyLLM) -> None:
    def broken(progress: Progress) -> None:
        raise ValueError("no")

    assert len(llm.generate([[5], [6]], PARAMS, progress=broken)) == 2


@pytest.mark.parametrize(
    "call",
    [lambda llm: llm.generate([7]), lambda llm: llm.step(), lambda llm: llm.close()],
    ids=["generate", "step", "close"],
)
def test_a_progress_callback_cannot_run_the_engine(
    llm: ToyLLM, call: Callable[[ToyLLM], object]
) -> None:
    refused: list[Exception] = []

    def progress(state: Progress) -> None:
        with pytest.raises(UnsupportedError, match="inside generate") as caught:
            call(llm)
        refused.append(caught.value)

    results = llm.generate([[5], [6]], PARAMS, progress=progress)
    assert refused and [list(r.token_ids) for r in results] == [
        expected(r.prompt_token_ids, PARAMS) for r in results
    ]
    assert llm.generate([[5]], PARAMS)[0].error is None


def test_interrupt_keeps_what_is_finished(llm: ToyLLM) -> None:
    params = [SamplingParams(seed=3, max_tokens=40, ignore_eos=True) for _ in range(5)]
    params[0] = replace(params[0], stop_token_ids=range(VOCAB))
    steps = 0

    def press(plan: StepPlan) -> None:
        nonlocal steps
        steps += 1
        if steps == 5:
            os.kill(os.getpid(), signal.SIGINT)

    llm.runner.hook = press
    with pytest.raises(Interrupted) as caught:
        llm.generate([[5], [6], "x", [VOCAB], [8]], params)
    results = caught.value.completions
    assert [r.index for r in results] == [0, 1, 2, 3, 4]
    reasons = [r.finish_reason for r in results]
    assert reasons == ["stop", "abort", "abort", "invalid_request", "abort"]
    assert results[1].token_ids and results[1].error is None
    assert list(results[1].token_ids) == expected([6], params[1])[: len(results[1].token_ids)]
    assert steps == 5 + llm.overlaps, "a step was launched after the interrupt"
    llm.runner.hook = lambda plan: None
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert list(llm.generate([5], PARAMS)[0].token_ids) == expected([5], PARAMS)


def test_a_second_interrupt_breaks_in_at_once(llm: ToyLLM) -> None:
    steps = 0

    def press(plan: StepPlan) -> None:
        nonlocal steps
        steps += 1
        if steps == 4:
            os.kill(os.getpid(), signal.SIGINT)
            threading.Event().wait(0.02)
            os.kill(os.getpid(), signal.SIGINT)
            threading.Event().wait(0.2)

    llm.runner.hook = press
    long = SamplingParams(seed=3, max_tokens=40, ignore_eos=True)
    with pytest.raises(Interrupted) as caught:
        llm.generate([[5], [6], [7], [8]], long)
    results = caught.value.completions
    assert [r.finish_reason for r in results] == ["abort"] * 4
    assert steps <= 5
    llm.runner.hook = lambda plan: None
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert list(llm.generate([5], PARAMS)[0].token_ids) == expected([5], PARAMS)


def test_interrupt_while_prompts_are_read(llm: ToyLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def encode(text: str) -> list[int]:
        if text == "b":
            raise KeyboardInterrupt
        return [5]

    monkeypatch.setattr(llm.tokenizer, "encode", encode)
    with pytest.raises(Interrupted) as caught:
        llm.generate(["a", "b", "c"], PARAMS)
    assert [r.finish_reason for r in caught.value.completions] == ["abort"] * 3
    assert [r.index for r in caught.value.completions] == [0, 1, 2]


def test_a_failing_step_is_told_and_leaves_the_engine_usable(llm: ToyLLM) -> None:
    waiting = llm.submit([9] * 4, PARAMS)

    def fail(plan: StepPlan) -> None:
        raise RuntimeError("disk on fire")

    llm.runner.hook = fail
    results = llm.generate([[5], [6]], PARAMS)
    assert [r.finish_reason for r in results] == [FinishReason.ENGINE_ERROR] * 2
    llm.runner.hook = lambda plan: None
    (lost,) = finish(llm)
    assert lost.request_id == waiting and "disk on fire" in (lost.error or "")
    assert list(llm.generate([5], PARAMS)[0].token_ids) == expected([5], PARAMS)


def test_numerical_error_of_one_request(llm: ToyLLM) -> None:
    llm.runner.fail_requests.add(1)
    results = llm.generate([[5], [6], [7]], PARAMS)
    assert [r.finish_reason == "numerical" for r in results] == [False, True, False]
    assert "layer 3" in (results[1].error or "")


def test_close_any_number_of_times() -> None:
    llm = ToyLLM()
    llm.submit([5])
    llm.close()
    llm.close()
    assert not llm.has_work
    for call in (
        lambda: llm.generate([5]),
        lambda: llm.stream([5]),
        llm.step,
        lambda: llm.submit([5]),
    ):
        with pytest.raises(UnsupportedError, match="closed"):
            call()


def test_unknown_model_and_device(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        LLM(tmp_path / "nothing")
    with pytest.raises(ConfigError, match=r"config\.json"):
        LLM(tmp_path)
    with pytest.raises(ConfigError, match="auto, cpu, cuda"):
        LLM("demo", device="abacus")
    with pytest.raises(ConfigError, match="auto, cpu, cuda"):
        LLM("demo", device=None)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="does not exist"):
        LLM("")
    for model in (None, 5):
        with pytest.raises(ConfigError, match="model must be a folder"):
            LLM(model)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="mapping of dotted keys, not int"):
        LLM("demo", config=5)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"scheduling\.max_num_seqs"):
        LLM("demo", config={"max_num_seqs": 3})


def test_generate_lets_the_largest_budgets_in_first(llm: ToyLLM) -> None:
    """With three sequences at a time, the long request among short ones does not wait for them."""
    budgets = [2, 2, 2, 2, 9, 2, 9]
    results = llm.generate(
        [[5, 6, i] for i in range(7)],
        [SamplingParams(max_tokens=n, temperature=0, ignore_eos=True) for n in budgets],
    )
    assert [result.index for result in results] == list(range(7))
    assert [len(result.token_ids) for result in results] == budgets
    first = llm.runner.plans[0].rows
    assert len(first) == 3 and {4, 6} <= {row.token_ids[-1] for row in first}
