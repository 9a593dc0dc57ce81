"""One rank of a pool of processes, run as a script: takes the names of cases, one a line.

Starting an interpreter with torch costs more than every case here, so the processes are kept.
"""

from __future__ import annotations

import json
import sys
import traceback
from typing import Any

import numpy as np
import torch
from torch._C._distributed_c10d import TCPStore

from deepinfer.chat.token_map import load_token_map
from deepinfer.config.engine import NumericsConfig
from deepinfer.config.load import resolve_model
from deepinfer.config.mesh import Mesh
from deepinfer.kernels.engram import engram_lookup
from deepinfer.kernels.quantize import round_trip
from deepinfer.model.fast.model import FastModel
from deepinfer.model.fast.session import Session
from deepinfer.parallel.experts import (
    ExpertExchange,
    ExpertMaps,
    ExpertRanks,
    LayerExperts,
    make_exchange,
)
from deepinfer.parallel.group import Ranks
from deepinfer.parallel.placement import Placement
from deepinfer.parallel.tables import ShardedRows
from deepinfer.weights.reader import Checkpoint

NUM_EXPERTS, ACTIVE, WIDTH = 8, 3, 64
CPU = torch.device("cpu")


def collectives(ranks: Ranks, args: Any) -> object:
    """Every call of a group, with the values that must come out."""
    world, rank = ranks.world, ranks.rank
    assert world.all_gather(torch.tensor([rank])).flatten().tolist() == list(range(world.size))
    assert world.all_reduce(torch.tensor([rank]), largest=True).item() == world.size - 1
    assert world.share_bytes(b"abc" if rank == 1 else None, 3, source=1) == b"abc"
    out = torch.empty(world.size - 1 if rank == 0 else 1, 2, dtype=torch.bfloat16)
    # Everybody sends one row to rank 0; rank 0 sends one to each of the others.
    given = [1] * world.size if rank == 0 else [1] + [0] * (world.size - 1)
    given[rank] = 0
    taken = list(given)
    x = torch.full((sum(given), 2), rank, dtype=torch.bfloat16)
    world.all_to_all(out, x, taken, given).wait()
    others = [r for r in range(world.size) if r] if rank == 0 else [0]
    assert out[:, 0].tolist() == others, out
    words = torch.full((world.size, 3), 1 << rank, dtype=torch.int32)
    mine = torch.empty(1, 3, dtype=torch.int32)
    world.sum_scatter(mine, words).wait()
    assert mine.flatten().tolist() == [(1 << world.size) - 1] * 3
    return dict(world.counts)


def _placement(world: int) -> Placement:
    """Copies of some experts, in an order that is no identity."""
    if world == 2:
        return Placement([[5, 1, 2, 3, 4, 0, 6, 7, 0, 1, 2, 3]], NUM_EXPERTS, 2)
    return Placement([[7, 1, 2, 6, 3, 0, 5, 4, 0, 1, 2, 3]], NUM_EXPERTS, world)


def _expert(rows: torch.Tensor, expert: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return (rows.float() * (expert + 1).unsqueeze(-1) * weight.unsqueeze(-1)).to(rows.dtype)


def _exchange_once(
    exchange: ExpertExchange, maps: ExpertMaps, x: torch.Tensor, chosen: torch.Tensor,
    weight: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    layer = LayerExperts(maps, exchange, torch.zeros(NUM_EXPERTS, dtype=torch.int64))
    slots, weight, places = layer.choose(chosen, weight)
    pending = layer.dispatch(x, slots, weight)
    assert places.flatten().tolist() == list(range(chosen.numel()))
    found = pending.wait()
    counts = torch.from_numpy(np.diff(found.offsets.numpy()))
    expert = torch.repeat_interleave(torch.tensor(maps.local_experts), counts)
    end = int(found.offsets[-1])
    outputs = torch.full((len(found.rows), WIDTH), float("nan"), dtype=x.dtype)
    outputs[:end] = _expert(found.values[found.rows[:end]], expert, found.weight[:end])
    assert int(layer.counts.sum()) == chosen.numel()
    return exchange.combine(pending, outputs)


def exchange(ranks: Ranks, args: Any) -> object:
    """A back end against the same arithmetic at home, bit for bit, for awkward batches."""
    name, factor, quantize, dtype = args
    group = ranks.expert
    exchange = make_exchange(name, group, quantize, factor)
    maps = ExpertMaps.of(_placement(group.size), 0, group.place, CPU)
    generator = torch.Generator().manual_seed(ranks.rank)
    kind = getattr(torch, dtype)
    before = dict(group.counts)
    for sizes in ([3, 11, 1, 7], [0, 5, 0, 2], [0, 0, 0, 0], [1, 1, 1, 1]):
        num = sizes[ranks.rank]
        exchange.begin(max(sizes))
        x = torch.randn(num, WIDTH, generator=generator).to(kind)
        perm = [torch.randperm(NUM_EXPERTS, generator=generator)[:ACTIVE] for _ in range(num)]
        chosen = torch.stack(perm) if num else torch.empty(0, ACTIVE, dtype=torch.int64)
        if sizes[1] == 5:
            chosen[:] = torch.tensor([6, 0, 1])  # all tokens to the same experts
        weight = torch.rand(num, ACTIVE, generator=generator)
        terms = _exchange_once(exchange, maps, x, chosen, weight)
        chosen, order = chosen.sort(dim=1)  # in which terms come back
        weight = weight.gather(1, order)
        sent = round_trip(x, "act8") if quantize else x
        want = _expert(sent.unsqueeze(1).expand(-1, ACTIVE, -1), chosen, weight)
        assert torch.equal(terms.view(torch.int16), want.contiguous().view(torch.int16)), sizes
    return {key: count - before.get(key, 0) for key, count in group.counts.items()}


def tables(ranks: Ranks, args: Any) -> object:
    """Rows of a table in which each tells where it stands, whatever rank holds them."""
    height, width = 37, 32  # no multiple of the ranks
    codes = torch.arange(height * width) * 7 % 120
    codes = codes.to(torch.uint8).view(height, width).view(torch.float8_e4m3fn)
    scale = (120 + torch.arange(height) % 9).to(torch.uint8).view(height, 1)
    table = ShardedRows(codes, scale, ranks.engram, CPU)
    assert table.num_rows == [10, 10, 10, 7][ranks.rank]
    generator = torch.Generator().manual_seed(ranks.rank)
    before = dict(ranks.engram.counts)
    for num in ([3, 0, 40, 1][ranks.rank], 0, 5):
        rows = torch.randint(0, height, (num, 3), generator=generator)
        if num == 5:
            rows[:] = torch.tensor([0, height - 1, 10])  # the same for all, at the borders
        found = table.start(rows).wait(torch.bfloat16)
        wanted = engram_lookup(codes, scale, rows, torch.bfloat16)
        assert torch.equal(found, wanted) and found.shape == (num, 3 * width)
    return {key: count - before.get(key, 0) for key, count in ranks.engram.counts.items()}


def model(ranks: Ranks, args: Any) -> object:
    """Logits of a shared model equal those of a whole one, bit for bit, whatever the placement."""
    name, back_end, copies = args
    path = resolve_model(name)
    checkpoint = Checkpoint.open(path)
    token_map = load_token_map(path, checkpoint.config)
    numerics = NumericsConfig()
    whole = FastModel.load(checkpoint, numerics, "cpu", token_map, 1 << 27, with_drafts=True)
    exchange = make_exchange(back_end, ranks.expert, True)
    shares = ExpertRanks(ranks.expert, CPU, exchange, copies)

    def table(codes: torch.Tensor, scale: torch.Tensor) -> ShardedRows:
        return ShardedRows(codes, scale, ranks.engram, CPU)

    shared = FastModel.load(
        checkpoint, numerics, "cpu", token_map, 1 << 27, with_drafts=True, ranks=shares,
        tables=table,
    )  # fmt: skip
    held = shared.blocks[0].moe.w2.codes.shape[0]
    assert held == shares.layers[0].maps.num_local < checkpoint.config.n_routed_experts
    with torch.inference_mode():
        shared.begin(32)
        ids = [(7 * i + 13 * ranks.rank) % 500 + 3 for i in range(6 + 5 * ranks.rank)]
        first, second = Session(whole, 128), Session(shared, 128)
        before = ranks.counts()
        want, found = first.prefill(ids), second.prefill(ids)
        assert torch.equal(want.view(torch.int32), found.view(torch.int32))
        full = _since(before, ranks.counts())
        assert set(full) == {"expert", "engram"}
        # A rank without rows makes as many calls as one with rows.
        before = ranks.counts()
        if ranks.rank % 2:
            shared.idle()
        else:
            assert torch.equal(first.decode(9), second.decode(9))
        idle = _since(before, ranks.counts())
        assert full == idle, (full, idle)
        assert shared.draft is not None
        shared.draft.idle()
    return full


def _since(before: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """Return the calls made between two counts, by group."""
    made = {
        group: {name: count - before.get(group, {}).get(name, 0) for name, count in counts.items()}
        for group, counts in now.items()
    }
    made = {group: {n: c for n, c in counts.items() if c} for group, counts in made.items()}
    return {group: counts for group, counts in made.items() if counts}


def _make_ranks(rank: int, port: int, sizes: dict[str, int]) -> Ranks:
    store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    return Ranks.connect(Mesh(**sizes), rank, CPU, store, 60.0)


CASES = {f.__name__: f for f in (collectives, exchange, tables, model)}


def main() -> None:
    """Answer cases until the input ends."""
    torch.set_num_threads(1)
    begin = json.loads(sys.stdin.readline())
    ranks = _make_ranks(begin["rank"], begin["port"], begin["mesh"])
    for line in sys.stdin:
        name, args = json.loads(line)
        try:
            answer = {"value": CASES[name](ranks, args)}
        except BaseException:
            answer = {"error": traceback.format_exc()}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
