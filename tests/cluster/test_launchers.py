"""Processes that somebody else starts: torchrun, and what happens when one of them hangs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from deepinfer.engine.request import SamplingParams
from deepinfer.llm import LLM

pytestmark = pytest.mark.multi

SCRIPT = """
import os, sys
from deepinfer.engine.request import SamplingParams
from deepinfer.llm import LLM
open(sys.argv[1] + os.environ["RANK"], "w").write(str(os.getpid()))
with LLM("golden", "cpu", {"parallel.expert": 2}) as llm:
    first = llm.generate([[5, 6, 7], [8, 9]], SamplingParams(max_tokens=4, seed=1))
    again = llm.generate([first[0].token_ids], SamplingParams(max_tokens=3, seed=1))
    print(llm.rank, *first[1].token_ids, *again[0].token_ids, flush=True)
    if len(sys.argv) > 2:
        llm.generate([[5]], SamplingParams(max_tokens=10**4, ignore_eos=True))
"""


def test_torchrun(tmp_path: Path) -> None:
    """Every rank gets the same lists, and goes on with them."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone",
         str(script), str(tmp_path / "pid")],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    told = sorted(line.split() for line in done.stdout.splitlines() if line[:1] in "01")
    with LLM("golden", "cpu") as llm:
        first = llm.generate([[5, 6, 7], [8, 9]], SamplingParams(max_tokens=4, seed=1))
        again = llm.generate([first[0].token_ids], SamplingParams(max_tokens=3, seed=1))
    wanted = [str(i) for i in (*first[1].token_ids, *again[0].token_ids)]
    assert told == [["0", *wanted], ["1", *wanted]]


@pytest.mark.slow
def test_a_rank_that_hangs_elsewhere(tmp_path: Path) -> None:
    """Nobody can kill it from here, and its connections stay: the others end all the same."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    env = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29713"}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), str(tmp_path / "pid"), "long"],
            env={**env, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        assert ranks[1].stdout is not None and ranks[1].stdout.readline().startswith("1 ")
        time.sleep(1.0)
        ranks[1].send_signal(signal.SIGSTOP)
        _, told = ranks[0].communicate(timeout=40)
        assert ranks[0].returncode != 0 and "rank 1 of 2 gives no sign of life" in told
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
