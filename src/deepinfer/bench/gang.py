"""Benchmarks over several ranks: their processes, and times that are the slowest rank's."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch._C._distributed_c10d import TCPStore

from deepinfer.config.mesh import Mesh
from deepinfer.parallel.group import Ranks

__all__ = ["Gang", "gang", "rank_options", "wait"]

_SECONDS: Final = 0.15  # of one measurement, about


def rank_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that `gang` reads."""
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--out", type=Path, help="append the lines to a file, too")
    parser.add_argument("--rank", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, default=0, help=argparse.SUPPRESS)


class Gang:
    """One rank among those of a benchmark."""

    def __init__(self, ranks: Ranks, args: argparse.Namespace) -> None:
        self.ranks = ranks
        self.on_card = ranks.device.type != "cpu"
        self._args = args

    def tell(self, entry: dict[str, Any]) -> None:
        """Print one result as a line of JSON, and keep it; rank 0 does."""
        if not self.ranks.leads:
            return
        line = json.dumps({"ranks": self._args.ranks, "device": self._args.device, **entry})
        print(line, flush=True)
        if self._args.out is not None:
            with self._args.out.open("a", encoding="utf-8") as file:
                file.write(line + "\n")

    def anywhere(self, wrong: bool) -> bool:
        """Whether something is so on some rank; all ranks ask."""
        return self.largest(int(wrong)) > 0

    def largest(self, value: int) -> int:
        """Return the largest of the ranks' values; all ranks ask."""
        return int(self.ranks.world.all_reduce(torch.tensor([value]), largest=True))

    def seconds(self, work: Callable[[], object], most: int = 300) -> float:
        """Return the seconds of one call, the slowest rank's; all ranks call it as often."""
        for _ in range(3):
            work()
        once = self._mean(work, 1)
        return self._mean(work, max(3, min(most, int(_SECONDS / max(once, 1e-6)))))

    def _mean(self, work: Callable[[], object], count: int) -> float:
        wait(self.ranks.device)
        self.ranks.world.meet()
        begin = time.perf_counter()
        for _ in range(count):
            work()
        wait(self.ranks.device)
        return 1e-9 * self.largest(int(1e9 * (time.perf_counter() - begin) / count))

    def recorded(self, work: Callable[[], object]) -> Callable[[], object]:
        """Capture calls as one CUDA graph; the caller has run them before.

        What the calls hold lives as long as what is returned: a graph knows addresses only.
        """
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work()
        return partial(_replay, graph, work)

    def kernels_us(self, work: Callable[[], object], count: int = 5) -> dict[str, float]:
        """Return the time of each kernel in one call on this rank, longest first."""
        from torch.profiler import ProfilerActivity, profile

        wait(self.ranks.device)
        self.ranks.world.meet()
        with profile(activities=[ProfilerActivity.CUDA]) as found:
            for _ in range(count):
                work()
            wait(self.ranks.device)
        times = {e.key: e.self_device_time_total / count for e in found.key_averages()}
        ordered = sorted(times.items(), key=lambda item: -item[1])
        return {name[:60]: round(us, 1) for name, us in ordered if us > 0}


def _replay(graph: torch.cuda.CUDAGraph, kept: object) -> None:
    graph.replay()


def wait(device: torch.device) -> None:
    """Wait until a device has done everything."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


@contextmanager
def gang(module: str, argv: Sequence[str], args: argparse.Namespace) -> Iterator[Gang]:
    """Start the other ranks of a benchmark, all in one expert group, and meet them.

    module  run by the other ranks, with the same arguments and --rank and --port
    args    what `rank_options` has read
    """
    leads = args.rank == 0
    store = TCPStore("127.0.0.1", args.port, is_master=leads, wait_for_workers=False)
    children = []
    if leads:
        env = dict(os.environ, PYTHONPATH=os.pathsep.join(p for p in sys.path if p))
        for rank in range(1, args.ranks):
            own = ["--rank", str(rank), "--port", str(store.port)]
            command = [sys.executable, "-P", "-m", module, *argv, *own]
            children.append(subprocess.Popen(command, env=env))
    device = torch.device(args.device)
    if device.type == "cuda":
        device = torch.device("cuda", args.rank)
        torch.cuda.set_device(device)
    try:
        mesh = Mesh(data=args.ranks, expert=args.ranks)
        ranks = Ranks.connect(mesh, args.rank, device, store, 60.0)
        yield Gang(ranks, args)
        wait(device)
        ranks.world.meet()
        ranks.close()
        for child in children:
            child.wait(20)
    finally:
        for child in children:
            if child.poll() is None:
                child.kill()
