"""Replicas: what a batch becomes, without Ray; and with it, datasets over several processes."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest

from deepinfer.engine.request import SamplingParams
from deepinfer.errors import ConfigError, RequestError, UnsupportedError
from deepinfer.llm import LLM
from deepinfer.replicas import ray as replicas

needs_ray = pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed")


def answer(replica: replicas.Replica, batch: replicas.Batch) -> replicas.Batch:
    async def every() -> list[replicas.Batch]:
        return [found async for found in replica(batch)]

    (answered,) = asyncio.run(every())
    return answered


def column(*values: Any) -> np.ndarray:
    found = np.empty(len(values), dtype=object)
    found[:] = values
    return found


def test_a_batch() -> None:
    """Rows keep their columns and gain answers; columns named like parameters hold for the row."""
    replica = replicas.Replica("golden", "cpu", params={"max_tokens": 3, "seed": 5})
    batch = {
        "id": np.array([7, 8, 9]),
        "prompt": column(np.array([5, 6]), [7, 10**9], [9]),
        "max_tokens": np.array([2.0, np.nan, np.nan]),  # how a table has what is missing
        "min_tokens": column(None, None, 3),
    }
    batch["max_tokens"] = column(2, None, None)
    found = answer(replica, batch)
    assert found["id"].tolist() == [7, 8, 9]
    assert [len(ids) for ids in found["generated_token_ids"]] == [2, 0, 3]
    assert found["error"][0] == "" and "vocabulary" in found["error"][1]
    with LLM("golden", "cpu") as llm:
        (wanted,) = llm.generate([9], SamplingParams(max_tokens=3, min_tokens=3, seed=5))
    assert tuple(found["generated_token_ids"][2]) == wanted.token_ids
    assert found["generated_text"][2] == wanted.text
    with pytest.raises(RequestError, match="no column 'prompt'"):
        answer(replica, {"text": column("a")})


def test_what_is_refused() -> None:
    with pytest.raises(RequestError):
        replicas.Replica("golden", "cpu", params={"max_tokens": -1})
    with pytest.raises(ConfigError):
        replicas.Replica("golden", "cpu", {"parallel.experts": 2})


def test_without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    with pytest.raises(UnsupportedError, match=r"deepinfer\[ray\]"):
        replicas.answer_dataset(None, "demo")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    ray = pytest.importorskip("ray")
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False,
             object_store_memory=100 * 2**20)  # fmt: skip
    yield ray
    ray.shutdown()


def texts(ray: Any, count: int) -> Any:
    rows = [{"id": i, "prompt": f"row {i}", "seed": i} for i in range(count)]
    return ray.data.from_items(rows, override_num_blocks=8)


@needs_ray
@pytest.mark.slow
@pytest.mark.multi
def test_a_thousand_rows_once(cluster: Any) -> None:
    answers = replicas.answer_dataset(
        texts(cluster, 1000), "golden", replicas=2, device="cpu", batch_size=50,
        params={"max_tokens": 4}, cpus=0.5,
    ).take_all()  # fmt: skip
    assert Counter(row["id"] for row in answers) == Counter(range(1000))
    assert not any(row["error"] for row in answers)
    with LLM("golden", "cpu") as llm:
        prompts = [row["prompt"] for row in answers[::100]]
        params = [SamplingParams(max_tokens=4, seed=row["id"]) for row in answers[::100]]
        wanted = [c.token_ids for c in llm.generate(prompts, params)]
    assert [tuple(row["generated_token_ids"]) for row in answers[::100]] == wanted


@needs_ray
@pytest.mark.slow
@pytest.mark.multi
def test_ranks_as_actors(cluster: Any) -> None:
    """An engine of two actors gives one process's tokens, also after one of them was killed."""
    config = {"parallel.expert": 2}
    params = {"max_tokens": 4}
    replica = replicas.Replica("golden", "cpu", config, params, cpus=0.5)
    prompts = [[5, 6], [7], [8, 9, 10]]
    batch = {"prompt": column(*prompts), "seed": np.array([1, 2, 3])}
    found = answer(replica, batch)
    with LLM("golden", "cpu") as llm:
        each = [SamplingParams(max_tokens=4, seed=seed) for seed in (1, 2, 3)]
        wanted = [c.token_ids for c in llm.generate(prompts, each)]
    assert [tuple(ids) for ids in found["generated_token_ids"]] == wanted
    assert replica._group is not None
    os.kill(replica._group.processes[1], signal.SIGKILL)
    again = answer(replica, batch)
    assert [tuple(ids) for ids in again["generated_token_ids"]] == wanted
