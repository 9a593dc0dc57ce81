"""A pool of ranks for tests: processes that run cases of `rank_cases.py` together."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from torch._C._distributed_c10d import TCPStore

__all__ = ["Pool"]


class Pool:
    """Processes of one mesh; `run` runs a case on all of them and returns what each found."""

    def __init__(self, **mesh: int) -> None:
        world = max(mesh.get("data", 1) * mesh.get("context", 1), mesh.get("engram", 1))
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        env = dict(os.environ, OMP_NUM_THREADS="1")
        env["PYTHONPATH"] = os.pathsep.join(os.path.abspath(path) for path in sys.path if path)
        script = str(Path(__file__).with_name("rank_cases.py"))
        self._ranks = [
            subprocess.Popen(
                [sys.executable, "-P", script],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env, text=True,
            )
            for _ in range(world)
        ]  # fmt: skip
        for rank in range(world):
            self._send(rank, {"rank": rank, "port": self._store.port, "mesh": mesh})

    def run(self, case: str, *args: Any) -> list[Any]:
        """Run a case everywhere; raises AssertionError with the first rank's trouble."""
        for rank in range(len(self._ranks)):
            self._send(rank, [case, args])
        answers = []
        for process in self._ranks:
            assert process.stdout is not None
            line = process.stdout.readline()
            answers.append(json.loads(line) if line else {"error": "the process has ended"})
        for rank, answer in enumerate(answers):
            assert "error" not in answer, f"rank {rank}: {answer['error']}"
        return [answer["value"] for answer in answers]

    def close(self) -> None:
        """End the processes."""
        for process in self._ranks:
            assert process.stdin is not None and process.stdout is not None
            process.stdin.close()
            process.stdout.close()
        for process in self._ranks:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _send(self, rank: int, message: object) -> None:
        stdin = self._ranks[rank].stdin
        assert stdin is not None
        stdin.write(json.dumps(message) + "\n")
        stdin.flush()
