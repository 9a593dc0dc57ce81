"""SamplingParams: what is accepted, what is refused and how it is stored."""

from __future__ import annotations

import math

import numpy as np
import pytest

from deepinfer.engine.request import SamplingParams
from deepinfer.errors import RequestError

BAD = [
    {"temperature": -1},
    {"temperature": math.nan},
    {"temperature": math.inf},
    {"temperature": "hot"},
    {"temperature": True},
    {"top_p": 0},
    {"top_p": 1.01},
    {"top_p": math.nan},
    {"top_k": 0},
    {"top_k": -2},
    {"top_k": 2.5},
    {"temperature": 10**400},
    {"logit_bias": {1: -(10**400)}},
    {"max_tokens": -1},
    {"max_tokens": 2**31},
    {"max_tokens": 1.0},
    {"min_tokens": -1},
    {"min_tokens": 5, "max_tokens": 4},
    {"seed": 1.5},
    {"seed": "7"},
    {"stop": ""},
    {"stop": ["a", ""]},
    {"stop": [1]},
    {"stop": 3},
    {"stop_token_ids": [-1]},
    {"stop_token_ids": 5},
    {"stop_token_ids": ["a"]},
    {"ignore_eos": 1},
    {"logprobs": -1},
    {"logprobs": 1001},
    {"logprobs": "yes"},
    {"top_logprobs": -1},
    {"top_logprobs": 1001},
    {"top_logprobs": True},
    {"logprobs_mode": "cooked"},
    {"logit_bias": {-1: 0.0}},
    {"logit_bias": {1: math.inf}},
    {"logit_bias": {1: math.nan}},
    {"logit_bias": [1]},
    {"forced_token_ids": [-5]},
    {"n": 0},
    {"n": 1025},
    {"n": True},
    {"prompt_logprobs": 1},
    {"logits_processors": [3]},
    {"logits_processors": 3},
]


@pytest.mark.parametrize("fields", BAD, ids=str)
def test_refused(fields: dict[str, object]) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**fields)  # type: ignore[arg-type]
    assert next(iter(fields)) in str(caught.value)


def test_all_problems_are_told_together() -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(temperature=-1, top_p=0, top_k=0, stop="")
    assert len(caught.value.problems) == 4


def test_unknown_fields_are_refused() -> None:
    with pytest.raises(TypeError):
        SamplingParams(best_of=2)  # type: ignore[call-arg]


def test_canonical_form() -> None:
    params = SamplingParams(
        max_tokens=0,
        stop="x",
        stop_token_ids=np.array([3, 4]),
        seed=-1,
        logit_bias={np.int64(2): 1},
    )
    assert params.max_tokens == 1
    assert params.stop_strings == ("x",) and params.stop_ids == (3, 4)
    assert params.seed == 2**64 - 1
    assert SamplingParams(seed=2**64 + 5).seed == 5
    assert params.logit_bias == {2: 1.0}
    assert hash(params) == hash(params)


def test_greedy_turns_filters_off() -> None:
    params = SamplingParams(temperature=9e-6, top_p=0.3, top_k=5)
    assert params.is_greedy and params.top_p == 1.0 and params.top_k == -1
    assert not SamplingParams(temperature=1e-5).is_greedy


@pytest.mark.parametrize(
    ("fields", "logprobs", "top"),
    [
        ({}, False, 0),
        ({"logprobs": True}, True, 0),
        ({"logprobs": 0}, False, 0),
        ({"logprobs": 3}, True, 3),
        ({"top_logprobs": 2}, True, 2),
        ({"logprobs": 3, "top_logprobs": 5}, True, 5),
    ],
)
def test_logprobs(fields: dict[str, int], logprobs: bool, top: int) -> None:
    params = SamplingParams(**fields)  # type: ignore[arg-type]
    assert (params.logprobs, params.top_logprobs) == (logprobs, top)


def test_ids_out_of_vocabulary() -> None:
    params = SamplingParams(stop_token_ids=[10], forced_token_ids=[3, 12], logit_bias={9: 1.0})
    assert len(params.ids_out_of(10)) == 2
    assert params.ids_out_of(13) == []
