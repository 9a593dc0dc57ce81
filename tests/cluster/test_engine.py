"""Engines of several processes on this host: the tokens of one process, and what failures do."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deepinfer.cluster.loop import GroupLoop
from deepinfer.engine.request import Completion, SamplingParams
from deepinfer.errors import RankError, UnsupportedError
from deepinfer.llm import LLM

SMALL = {"scheduling.max_num_seqs": 4, "scheduling.chunk_size": 16}
LIMIT_S = 15.0  # within which a failure has to end everything


def prompts(count: int) -> list[list[int]]:
    return [[(7 * i + j) % 400 + 3 for j in range(3 + 5 * i)] for i in range(count)]


def params(count: int) -> list[SamplingParams]:
    return [
        SamplingParams(max_tokens=4 + 3 * (i % 5), seed=i, temperature=0.8 if i % 2 else 0.0)
        for i in range(count)
    ]


SHAPED = [
    SamplingParams(max_tokens=12, seed=i, structured={"choice": ["yes", "no", f"row {i}"]})
    for i in range(5)
]


def loop_of(llm: LLM) -> GroupLoop:
    assert isinstance(llm._loop, GroupLoop)
    return llm._loop


def is_gone(pid: int) -> bool:
    """Whether a process has ended; one that nobody has waited for has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def wait_gone(pids: list[int], seconds: float) -> None:
    limit = time.monotonic() + seconds
    while not all(map(is_gone, pids)):
        assert time.monotonic() < limit, "processes are left"
        time.sleep(0.05)


def same(found: list[Completion], wanted: list[Completion]) -> None:
    assert [c.token_ids for c in found] == [c.token_ids for c in wanted]
    assert [c.text for c in found] == [c.text for c in wanted]
    assert [c.logprobs for c in found] == [c.logprobs for c in wanted]


def test_four_ranks_give_the_tokens_of_one() -> None:
    """Two copies of the experts on two ranks each, drafts, several calls, everything in between."""
    settings = {**SMALL, "speculation.num_drafts": 2}
    with LLM("golden", "cpu", settings) as one:
        wanted = one.generate(prompts(9), params(9))
        shaped = one.generate(prompts(5), SHAPED)
        chunks = list(one.stream(prompts(2), SamplingParams(max_tokens=6, logprobs=True, seed=3)))
        sampled = one.generate(prompts(1), SamplingParams(max_tokens=5, n=3, seed=4, temperature=1))
    ranks = {"parallel.data": 4, "parallel.expert": 2, "parallel.engram": 4,
             "speculation.variable": True}  # fmt: skip
    with LLM("golden", "cpu", {**settings, **ranks}) as llm:
        loop = loop_of(llm)
        children = [child.pid for child in loop.member.children.values()]
        assert len(children) == 3
        same(llm.generate(prompts(9), params(9)), wanted)
        same(llm.generate(prompts(5), SHAPED), shaped)  # grammars are compiled where they run
        assert all(c.text in SHAPED[c.index].structured.choice for c in shaped)
        streamed = list(llm.stream(prompts(2), SamplingParams(max_tokens=6, logprobs=True, seed=3)))
        ends = [[c.completion for c in part if c.completion] for part in (streamed, chunks)]
        same(*(sorted(end, key=lambda c: c.index) for end in ends))
        same(
            llm.generate(prompts(1), SamplingParams(max_tokens=5, n=3, seed=4, temperature=1)),
            sampled,
        )
        # Requests of other ranks can be cancelled and taken down.
        ids = [llm.submit(prompt, SamplingParams(max_tokens=16)) for prompt in prompts(5)]
        llm.step()
        llm.step()
        assert {loop.owner(i) for i in ids} == {None, 1, 2, 3}
        state = llm.snapshot(next(i for i in ids if loop.owner(i) == 2))
        assert len(state.token_ids) >= 0 and llm.cancel(ids[1]) and not llm.cancel(10**6)
        ended: dict[int, Completion] = {}
        while llm.has_work:
            ended |= {c.request_id: c for c in llm.step()}
        assert sorted(ended) == ids
        assert str(ended[ids[1]].finish_reason) == "abort" and ended[ids[0]].error is None
        bad = llm.generate([[5], [10**9]], SamplingParams(max_tokens=2))
        assert bad[0].error is None and bad[1].error is not None
        assert llm.stats().num_finished["length"] >= 12
        counts = [loop.ranks.counts(), *loop.ask("collectives")]
        assert len({json.dumps(count["expert"], sort_keys=True) for count in counts}) == 1
        with pytest.raises(UnsupportedError, match="ranks above 0"):
            llm.serve()
    wait_gone(children, 5.0)


@pytest.mark.multi
def test_eight_ranks() -> None:
    """Two groups of four share the experts, all eight the tables; the trained checkpoint."""
    settings = {**SMALL, "scheduling.max_num_seqs": 2, "speculation.num_drafts": 3}
    with LLM("demo", "cpu", settings) as one:
        wanted = one.generate(prompts(24), params(24))
    ranks = {"parallel.data": 8, "parallel.expert": 4, "parallel.engram": 8}
    others = {"parallel.backend": "fixed", "parallel.placement": "fixed"}
    with LLM("demo", "cpu", {**settings, **ranks, **others}) as llm:
        same(llm.generate(prompts(24), params(24)), wanted)


def test_replicas_without_shared_experts() -> None:
    """They need no common step, and the trained checkpoint's tokens stay what they are."""
    with LLM("demo", "cpu", SMALL) as one:
        wanted = one.generate(prompts(6), params(6))
    with LLM("demo", "cpu", {**SMALL, "parallel.data": 2}) as llm:
        assert not loop_of(llm).ranks.in_step
        same(llm.generate(prompts(6), params(6)), wanted)


MOVING = {
    "parallel.copies": 4, "parallel.balance_window": 4, "parallel.balance_interval": 4,
    "parallel.balance_horizon": 1_000_000,
}  # fmt: skip


@pytest.mark.parametrize("kind", ["prefill", "decode", "moving"])
def test_a_killed_rank_ends_the_engine(kind: str) -> None:
    """In a step of either kind, and while weights of experts travel."""
    length = 400 if kind == "prefill" else 5
    inputs = [[5 + i] * length for i in range(9)]
    settings = {**SMALL, "parallel.expert": 2, "cache.num_blocks": 64}
    settings |= MOVING if kind == "moving" else {}
    with LLM("golden", "cpu", settings) as llm:
        loop, balancer = loop_of(llm), llm._balancer
        child = loop.member.children[1]
        killed: list[float] = []

        def kill() -> None:
            while True:  # inside a step of this kind, not between two
                phase, step, now = loop.member.watch._now
                if kind == "moving":
                    if balancer is not None and (balancer._under_way or balancer._sending):
                        break
                elif phase == "step" and step > 2 and now == kind:
                    break
                time.sleep(0.001)
            os.kill(child.pid, signal.SIGKILL)
            killed.append(time.monotonic())

        told = "decode|prefill" if kind == "moving" else kind
        thread = threading.Thread(target=kill, daemon=True)
        thread.start()
        with pytest.raises(RankError, match=r"rank 1 of 2 \(process \d+\) was killed by SIGKILL; "
                           rf"it was (in|after) step \d+ \({told}\)"):  # fmt: skip
            llm.generate(inputs, SamplingParams(max_tokens=64, ignore_eos=True))
        thread.join()
        assert time.monotonic() - killed[0] < LIMIT_S
        with pytest.raises(RankError, match="rank 1 of 2"):
            llm.generate([[5]])
        assert is_gone(child.pid)


def write_rows(path: Path, count: int) -> None:
    """Rows that end one after the other, so that some are left whenever one is answered."""
    lengths = [12 + 8 * (i % 4) for i in range(count)]
    rows = [
        {"prompt": f"row {i}", "max_tokens": length, "ignore_eos": True}
        for i, length in enumerate(lengths)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


class Command:
    """`deepinfer run` over two ranks, as a process."""

    def __init__(self, folder: Path) -> None:
        self.output = folder / "out.jsonl"
        self.process = subprocess.Popen(
            [sys.executable, "-m", "deepinfer", "run", "-i", str(folder / "in.jsonl"),
             "-o", str(self.output), "--model", "demo", "--device", "cpu", "--quiet",
             "--set", "parallel.expert=2", "--set", "scheduling.max_num_seqs=2", "--window", "4"],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip

    def children(self) -> list[int]:
        pid = self.process.pid
        return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]

    def wait_for_rows(self, count: int) -> list[int]:
        """Wait until so many rows are answered; return the processes of the other ranks."""
        limit = time.monotonic() + 120
        while not (self.output.exists() and len(self.output.read_text().splitlines()) >= count):
            assert self.process.poll() is None and time.monotonic() < limit
            time.sleep(0.01)
        return self.children()

    def end(self) -> tuple[int, str]:
        _, told = self.process.communicate(timeout=120)
        return self.process.returncode, told


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    write_rows(tmp_path / "in.jsonl", 8)
    yield tmp_path


def test_a_job_goes_on_after_a_rank_was_killed_and_after_ctrl_c(folder: Path) -> None:
    """Exactly one answer for each row in the end; one clear error, and no process, each time."""
    first = Command(folder)
    (child,) = first.wait_for_rows(1)
    os.kill(child, signal.SIGKILL)
    begin = time.monotonic()
    code, told = first.end()
    assert code == 1 and time.monotonic() - begin < LIMIT_S
    assert told.count("rank 1 of 2") == 1 and "SIGKILL" in told and "step" in told, told
    assert "Traceback" not in told
    second = Command(folder)
    (child,) = second.wait_for_rows(len(second.output.read_text().splitlines()) + 1)
    second.process.send_signal(signal.SIGINT)
    code, told = second.end()
    assert code == 130 and "goes on from here" in told, told
    wait_gone([child], 5.0)
    code, told = Command(folder).end()
    assert code == 0, told
    answers: list[dict[str, Any]] = [
        json.loads(line) for line in second.output.read_text().splitlines()
    ]
    keys = [answer["run"]["key"] for answer in answers]
    assert len(keys) == len(set(keys)) == 8


@pytest.mark.multi
def test_ranks_end_with_their_parent(folder: Path) -> None:
    command = Command(folder)
    children = command.wait_for_rows(1)
    command.process.kill()
    command.end()
    wait_gone(children, 10.0)
