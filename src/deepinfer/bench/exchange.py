"""How fast rows travel between ranks: dispatch and combine of every back end, beside an all-to-all.

`python -m deepinfer.bench.exchange --ranks 2 --device cuda` starts the other ranks itself. Before a
back end is timed, what it returns is compared with the same arithmetic at home. Times are the
slowest rank's. Bandwidth counts what leaves a rank for others: rows once for each rank, one row
back for every choice.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from deepinfer.bench.gang import Gang, gang, rank_options
from deepinfer.errors import DeepInferError
from deepinfer.kernels.quantize import round_trip
from deepinfer.parallel.experts import ExpertExchange, RowShape, Wire, make_exchange
from deepinfer.parallel.group import Ranks

__all__ = ["main"]

_EXPERTS: Final = 384
_ACTIVE: Final = 6
_WIDTH: Final = 5120


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
        """Send all rows; take back what `check` has made, so that no expert is timed.

        What comes back is right only by chance: received rows have no fixed order within a slot.
        """
        pending = exchange.dispatch(self.x, self.slots, self.weight, self.num_local)
        pending.wait()
        return exchange.combine(pending, self._outputs)

    def check(self, exchange: ExpertExchange) -> bool:
        """Whether every choice's row comes back as it is sent, twice."""
        want = round_trip(self.x, "act8").unsqueeze(1).expand(-1, _ACTIVE, -1)
        right = True
        for _ in range(2):
            pending = exchange.dispatch(self.x, self.slots, self.weight, self.num_local)
            found = pending.wait()
            self._outputs = found.values[found.rows]
            right = torch.equal(exchange.combine(pending, self._outputs), want) and right
        return right


def _bandwidth(team: Gang, num_bytes: int) -> tuple[float, float]:
    """Return the seconds and the bytes that left a rank of an all-to-all of so many bytes each."""
    group = team.ranks.expert
    x = torch.zeros(group.size, num_bytes // group.size, dtype=torch.uint8)
    x = x.to(team.ranks.device)
    out = torch.empty_like(x)
    seconds = team.seconds(lambda: group.all_to_all(out, x).wait())
    return seconds, x.numel() * (group.size - 1) / group.size


def _measure(team: Gang, args: argparse.Namespace) -> None:
    ranks, best = team.ranks, 0.0
    for num_bytes in args.bytes:
        seconds, left = _bandwidth(team, num_bytes)
        best = max(best, left / seconds)
        team.tell({"what": "all_to_all", "bytes": int(left), "us": round(1e6 * seconds, 1),
                   "gb_s": round(left / seconds / 1e9, 1)})  # fmt: skip
    shape = RowShape(
        capacity=max(args.rows), columns=args.width, active=_ACTIVE, experts=args.experts,
        dtype=torch.bfloat16,
    )  # fmt: skip
    routed = {rows: _Routed(ranks, rows, args.width, args.experts) for rows in args.rows}
    for name in args.back_ends:
        try:
            exchange = make_exchange(
                name, ranks.expert, True, 0.0, shape, ranks.store, ranks.device
            )
        except (DeepInferError, RuntimeError) as error:
            team.tell({"what": name, "error": str(error).splitlines()[0][:200]})
            continue
        for rows, batch in routed.items():
            exchange.begin(rows)
            wrong = team.anywhere(not batch.check(exchange))
            entry: dict[str, Any] = {"what": name, "rows": rows, "right": not wrong}
            if not wrong:
                work = partial(batch.turn, exchange)
                entry["bytes"] = batch.sent_bytes
                entry |= _speed(batch, team.seconds(work), "", best)
                if team.on_card and name == "symm":
                    replay = team.recorded(work)
                    entry |= _speed(batch, team.seconds(replay), "graph_", best)
                    if args.split:
                        entry["kernels_us"] = team.kernels_us(replay)
            team.tell(entry)


def _speed(batch: _Routed, seconds: float, prefix: str, best: float) -> dict[str, Any]:
    """Return a time, bytes that left a rank in it, and their share of the best all-to-all."""
    rate = batch.sent_bytes / seconds
    return {
        f"{prefix}us": round(1e6 * seconds, 1),
        f"{prefix}gb_s": round(rate / 1e9, 1),
        **({f"{prefix}share": round(rate / best, 3)} if best else {}),
    }


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print a JSON line for each result."""
    parser = argparse.ArgumentParser(prog="python -m deepinfer.bench.exchange", description=__doc__)
    rank_options(parser)
    parser.add_argument("--rows", type=_numbers, default=[32, 512], help="rows of a rank")
    parser.add_argument("--bytes", type=_numbers, default=[1 << 20, 1 << 26], help="of all-to-alls")
    parser.add_argument("--width", type=int, default=_WIDTH)
    parser.add_argument("--experts", type=int, default=_EXPERTS)
    parser.add_argument(
        "--back-ends", type=lambda t: t.split(","), default=["exact", "fixed", "gathered"]
    )
    parser.add_argument("--split", action="store_true", help="times of symm's kernels, too")
    given = list(sys.argv[1:] if argv is None else argv)
    args = parser.parse_args(given)
    with gang("deepinfer.bench.exchange", given, args) as team:
        _measure(team, args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
