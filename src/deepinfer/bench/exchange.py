"""How fast rows travel between ranks: dispatch and combine of every back end, beside an all-to-all.

`python -m deepinfer.bench.exchange --ranks 2 --device cuda` starts the other ranks itself. Before a
back end is timed, what it returns is compared with the same arithmetic at home. Times are the
slowest rank's. Bandwidth counts what leaves a rank for others: rows once for each rank, one row
back for every choice.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from torch._C._distributed_c10d import TCPStore

from deepinfer.config.mesh import Mesh
from deepinfer.errors import DeepInferError
from deepinfer.kernels.quantize import round_trip
from deepinfer.parallel.comm import Group
from deepinfer.parallel.experts import ExpertExchange, RowShape, Wire, make_exchange
from deepinfer.parallel.group import Ranks

__all__ = ["main"]

_EXPERTS: Final = 384
_ACTIVE: Final = 6
_WIDTH: Final = 5120
_SECONDS: Final = 0.15  # of one measurement, about


class _Routed:
    """Rows of one rank with choices drawn evenly, and what must come back."""

    def __init__(self, ranks: Ranks, rows: int, width: int, experts: int) -> None:
        generator = torch.Generator().manual_seed(1000 * rows + ranks.rank)
        device = ranks.device
        self.num_local = experts // ranks.expert.size
        self.x = torch.randn(rows, width, generator=generator).to(device, torch.bfloat16)
        order = torch.rand(rows, experts, generator=generator).argsort(1)
        self.slots = order[:, :_ACTIVE].contiguous().to(device)
        self.weight = torch.rand(rows, _ACTIVE, generator=generator).to(device)
        owner = self.slots // self.num_local
        away = owner != ranks.expert.place
        needed = torch.zeros(rows, ranks.expert.size, dtype=torch.bool, device=device)
        needed.scatter_(1, owner, True)
        needed[:, ranks.expert.place] = False
        row_bytes = Wire(True).width(width, _ACTIVE, torch.bfloat16)
        self.sent_bytes = int(needed.sum()) * row_bytes + int(away.sum()) * 2 * width

        self._outputs = self.x[:0]

    def turn(self, exchange: ExpertExchange) -> Tensor:
        """Send all rows; take back what `check` has made of them, so that no expert is timed."""
        pending = exchange.dispatch(self.x, self.slots, self.weight, self.num_local)
        pending.wait()
        return exchange.combine(pending, self._outputs)

    def check(self, exchange: ExpertExchange) -> bool:
        """Whether every choice's row comes back as it is sent."""
        pending = exchange.dispatch(self.x, self.slots, self.weight, self.num_local)
        found = pending.wait()
        self._outputs = found.values[found.rows]
        terms = exchange.combine(pending, self._outputs)
        want = round_trip(self.x, "act8").unsqueeze(1).expand(-1, _ACTIVE, -1)
        return torch.equal(terms, want) and torch.equal(self.turn(exchange), want)


def _timed(group: Group, device: torch.device, work: Callable[[], object]) -> float:
    """Return seconds of one call, the slowest rank's; all ranks call it as often."""
    for _ in range(3):
        work()
    _wait(device)
    group.meet()
    begin = time.perf_counter()
    work()
    _wait(device)
    once = torch.tensor([int(1e9 * (time.perf_counter() - begin))])
    count = max(3, min(300, int(_SECONDS / (1e-9 * int(group.all_reduce(once, largest=True))))))
    group.meet()
    begin = time.perf_counter()
    for _ in range(count):
        work()
    _wait(device)
    mean = torch.tensor([int(1e9 * (time.perf_counter() - begin) / count)])
    return 1e-9 * int(group.all_reduce(mean, largest=True))


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def _graphed(work: Callable[[], object]) -> Callable[[], object]:
    """Capture calls as one CUDA graph; the caller has run them before."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def _bandwidth(ranks: Ranks, num_bytes: int) -> tuple[float, float]:
    """Return the seconds and the bytes that left a rank of an all-to-all of so many bytes each."""
    size = ranks.expert.size
    x = torch.zeros(size, num_bytes // size, dtype=torch.uint8, device=ranks.device)
    out = torch.empty_like(x)
    seconds = _timed(ranks.world, ranks.device, lambda: ranks.expert.all_to_all(out, x).wait())
    return seconds, x.numel() * (size - 1) / size


def _measure(
    ranks: Ranks, args: argparse.Namespace, tell: Callable[[dict[str, Any]], None]
) -> None:
    device, on_card = ranks.device, ranks.device.type != "cpu"
    for num_bytes in args.bytes:
        seconds, left = _bandwidth(ranks, num_bytes)
        tell({"what": "all_to_all", "bytes": int(left), "us": round(1e6 * seconds, 1),
              "gb_s": round(left / seconds / 1e9, 1)})  # fmt: skip
    shape = RowShape(
        capacity=max(args.rows), columns=args.width, active=_ACTIVE, experts=args.experts,
        dtype=torch.bfloat16,
    )  # fmt: skip
    routed = {rows: _Routed(ranks, rows, args.width, args.experts) for rows in args.rows}
    for name in args.back_ends:
        try:
            exchange = make_exchange(name, ranks.expert, True, 0.0, shape, ranks.store, device)
        except (DeepInferError, RuntimeError) as error:
            tell({"what": name, "error": str(error).splitlines()[0][:200]})
            continue
        for rows, batch in routed.items():
            exchange.begin(rows)
            right = torch.tensor([not batch.check(exchange)], dtype=torch.int64)
            wrong = bool(ranks.world.all_reduce(right, largest=True))
            entry: dict[str, Any] = {"what": name, "rows": rows, "right": not wrong}
            if not wrong:
                work = partial(batch.turn, exchange)
                seconds = _timed(ranks.world, device, work)
                entry |= _speed(batch, seconds, "")
                if on_card and name == "symm":
                    replay = _graphed(work)
                    entry |= _speed(batch, _timed(ranks.world, device, replay), "graph_")
            tell(entry)


def _speed(batch: _Routed, seconds: float, prefix: str) -> dict[str, Any]:
    return {
        f"{prefix}us": round(1e6 * seconds, 1),
        f"{prefix}gb_s": round(batch.sent_bytes / seconds / 1e9, 1),
    }


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print a JSON line for each result."""
    parser = argparse.ArgumentParser(prog="python -m deepinfer.bench.exchange", description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--rows", type=_numbers, default=[32, 512], help="rows of a rank")
    parser.add_argument("--bytes", type=_numbers, default=[1 << 20, 1 << 26], help="of all-to-alls")
    parser.add_argument("--width", type=int, default=_WIDTH)
    parser.add_argument("--experts", type=int, default=_EXPERTS)
    parser.add_argument(
        "--back-ends", type=lambda t: t.split(","), default=["exact", "fixed", "gathered"]
    )
    parser.add_argument("--out", type=Path, help="append the lines to a file, too")
    parser.add_argument("--rank", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    leads = args.rank == 0
    store = TCPStore("127.0.0.1", args.port, is_master=leads, wait_for_workers=False)
    children = []
    if leads:
        given = list(sys.argv[1:] if argv is None else argv)
        env = dict(os.environ, PYTHONPATH=os.pathsep.join(p for p in sys.path if p))
        for rank in range(1, args.ranks):
            own = ["--rank", str(rank), "--port", str(store.port)]
            command = [sys.executable, "-P", "-m", "deepinfer.bench.exchange", *given, *own]
            children.append(subprocess.Popen(command, env=env))
    device = torch.device(args.device)
    if device.type == "cuda":
        device = torch.device("cuda", args.rank)
        torch.cuda.set_device(device)

    def tell(entry: dict[str, Any]) -> None:
        if leads:
            line = json.dumps({"ranks": args.ranks, "device": args.device, **entry})
            print(line, flush=True)
            if args.out is not None:
                with args.out.open("a", encoding="utf-8") as file:
                    file.write(line + "\n")

    try:
        mesh = Mesh(data=args.ranks, expert=args.ranks)
        ranks = Ranks.connect(mesh, args.rank, device, store, 60.0)
        _measure(ranks, args, tell)
        ranks.world.meet()
        ranks.close()
        for child in children:
            child.wait(20)
    finally:
        for child in children:
            if child.poll() is None:
                child.kill()
    return 0


if __name__ == "__main__":
    sys.exit(main())
