"""The public API in five seconds: read this first.

Everything runs on the packaged checkpoint, on the CPU.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from deepinfer import LLM, EngineConfig, SamplingParams
from deepinfer.errors import RequestError


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    # Settings are dotted keys, as in `--set key=value`; `EngineConfig()` holds every default.
    with LLM("demo", device="cpu", config={"scheduling.max_num_seqs": 4}) as engine:
        yield engine


def test_text_in_text_out(llm: LLM) -> None:
    (result,) = llm.generate("Once upon a time", SamplingParams(temperature=0, max_tokens=8))
    assert isinstance(result.text, str)
    assert result.index == 0 and result.error is None
    assert len(result.token_ids) <= 8
    assert result.finish_reason in {"length", "stop"}


def test_many_prompts_of_any_kind_one_result_each(llm: LLM) -> None:
    prompts = ["A first prompt", [5, 6, 7], "", [10**6], "More prompts than sequences at a time"]
    results = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=4))
    assert [r.index for r in results] == [0, 1, 2, 3, 4]
    assert [r.index for r in results if r.finish_reason == "invalid_request"] == [2, 3]
    assert results[1].prompt_token_ids == (5, 6, 7)
    assert "empty" in (results[2].error or "") and "vocabulary" in (results[3].error or "")


def test_a_seed_makes_samples_repeatable(llm: LLM) -> None:
    params = SamplingParams(temperature=0.8, top_p=0.95, top_k=50, seed=7, max_tokens=8)
    alone = llm.generate([5, 6, 7], params)[0]
    crowd = llm.generate([[1, 2], [5, 6, 7], [3] * 40], params)[1]
    assert alone.token_ids == crowd.token_ids


def test_logprobs(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, top_logprobs=2)
    (result,) = llm.generate([5, 6, 7], params)
    assert result.logprobs is not None and result.top_logprobs is not None
    assert len(result.logprobs) == len(result.top_logprobs) == 3
    best_id, best = result.top_logprobs[0][0]
    assert (best_id, best) == (result.token_ids[0], result.logprobs[0])


def test_streaming(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    chunks = list(llm.stream("Once", params))
    whole = chunks[-1].completion
    assert whole is not None and whole.finish_reason == "length"
    assert "".join(chunk.text for chunk in chunks) == whole.text
    assert tuple(i for chunk in chunks for i in chunk.token_ids) == whole.token_ids


def test_submit_step_cancel(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    first = llm.submit([5, 6, 7], params)
    second = llm.submit("unwanted", params)
    llm.cancel(second)
    done = {}
    while llm.has_work:
        done.update({result.request_id: result for result in llm.step()})
    assert done[first].finish_reason == "length" and len(done[first].token_ids) == 5
    assert done[second].finish_reason == "abort"


def test_mistakes_are_told_together() -> None:
    with pytest.raises(RequestError, match="temperature") as caught:
        SamplingParams(temperature=-1, top_p=0)
    assert len(caught.value.problems) == 2


def test_settings_are_one_printable_tree() -> None:
    config = EngineConfig.from_dotted({"numerics.mode": "noq"})
    assert config.numerics.mode == "noq"
    assert config.to_dotted()["scheduling.max_num_seqs"] == 64
