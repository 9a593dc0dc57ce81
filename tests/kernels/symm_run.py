"""The kernels of the exchange through shared memory: interpreted, with ranks of one process, or
compiled for cards that are absent.

Processes of their own, as for `triton_run.py`: `symm_run.py run` or `compile ARCH...`. Prints what
is wrong; nothing when all is right.
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "1" if sys.argv[1] == "run" else "0"

import torch
from torch import Tensor

from deepinfer.kernels.expert_exchange import triton as kernels
from deepinfer.kernels.quantize import round_trip
from deepinfer.parallel.experts import SPREAD, ExpertMaps, LayerExperts
from deepinfer.parallel.placement import Placement
from deepinfer.parallel.symm import Symmetric, room

NUM_LOCAL, ACTIVE, CAPACITY = 4, 3, 6


class Plain:
    """One rank's view of buffers that lie in one process."""

    def __init__(self, buffers: list[Tensor], place: int) -> None:
        self.buffers = buffers  # of all ranks: others write here, too
        self.local = buffers[place]
        self.addresses = [buffer.data_ptr() for buffer in buffers]


def ranks(size: int, columns: int, dtype: torch.dtype, quantize: bool) -> list[Symmetric]:
    total = room(size, CAPACITY, columns, ACTIVE, dtype.itemsize, quantize).total
    buffers = [torch.zeros(total, dtype=torch.uint8) for _ in range(size)]
    return [
        Symmetric(Plain(buffers, place), place, quantize, capacity=CAPACITY, columns=columns,
                  active=ACTIVE, dtype=dtype, limit=3)
        for place in range(size)
    ]  # fmt: skip


def scaled(rows: Tensor, slots: Tensor, weight: Tensor) -> Tensor:
    """What the made-up expert of a slot computes."""
    return (rows.float() * (slots + 1).unsqueeze(-1) * weight.unsqueeze(-1)).to(rows.dtype)


def call(members: list[Symmetric], sizes: list[int], columns: int, dtype: torch.dtype,
         quantize: bool, active: int, generator: torch.Generator) -> list[str]:  # fmt: skip
    """One dispatch and combine of all ranks; returns what differs."""
    size = len(members)
    total = size * NUM_LOCAL
    sent = []
    for num in sizes:
        x = torch.randn(num, columns, generator=generator).to(dtype)
        perms = [torch.randperm(total, generator=generator)[:active] for _ in range(num)]
        slots = torch.stack(perms) if num else torch.empty(0, active, dtype=torch.int64)
        if num > 1:
            slots[1, 0] = -1
        sent.append((x, slots, torch.rand(num, active, generator=generator)))
    for member in members:
        member.begin(max(*sizes, 1))
    pending = [m.dispatch(*rows, NUM_LOCAL) for m, rows in zip(members, sent, strict=True)]
    for place, (member, pushed) in enumerate(zip(members, pending, strict=True)):
        found = pushed.wait()
        end = int(found.offsets[-1])
        counts = found.offsets.diff()
        slot = place * NUM_LOCAL + torch.repeat_interleave(torch.arange(NUM_LOCAL), counts)
        rows = found.values[found.rows[:end]]
        outputs = torch.full((len(found.rows), columns), float("nan"), dtype=dtype)
        outputs[:end] = scaled(rows, slot, found.weight[:end])
        member.give_back(pushed, outputs)
    problems = []
    for place, (member, pushed) in enumerate(zip(members, pending, strict=True)):
        x, slots, weight = sent[place]
        terms = member.take_back(pushed)
        came = round_trip(x, "act8") if quantize else x
        want = scaled(came.unsqueeze(1).expand(-1, active, -1), slots, weight)
        real = slots >= 0
        if not torch.equal(terms[real], want[real]):
            problems.append(
                f"{size} ranks, {sizes} rows, {dtype}, {quantize}: rank {place} differs"
            )
        if int(member.error):
            problems.append(f"rank {place} waited in vain for rank {int(member.error) - 1}")
    return problems


def compile_all(archs: list[int]) -> list[str]:
    """Compile every kernel as the exchange launches it; returns what does not compile."""
    import triton
    from triton.backends.compiler import GPUTarget

    types = {torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.int64: "*i64",
             torch.uint8: "*u8", torch.int32: "*i32", torch.int8: "*i8"}  # fmt: skip
    problems, seen = [], set()

    def record(kernel, grid, *arguments, num_warps=4, **constants) -> None:
        free = [name for name in kernel.arg_names if name not in constants]
        kinds = [types[a.dtype] if isinstance(a, Tensor) else "i32" for a in arguments]
        signature = dict(zip(free, kinds, strict=True)) | dict.fromkeys(constants, "constexpr")
        signature = {name: signature[name] for name in kernel.arg_names}
        source = triton.compiler.ASTSource(kernel, signature, constexprs=constants)
        for arch in archs:
            key = f"{kernel.fn.__name__} {signature} {constants} for sm_{arch}"
            if key not in seen:
                seen.add(key)
                try:
                    target = GPUTarget("cuda", arch, 32)
                    made = triton.compile(source, target=target, options={"num_warps": num_warps})
                    assert made.asm["cubin"], "no binary"
                except Exception as error:
                    problems.append(f"{key}: {str(error)[-300:]}")

    kernels.launch = record
    for with_live in (False, True):
        chosen_slots(torch.Generator(), with_live)
    for columns, dtype, quantize in [(5120, torch.bfloat16, True), (64, torch.float32, False)]:
        member = ranks(2, columns, dtype, quantize)[0]
        rows = torch.ones(2, columns, dtype=dtype)
        pushed = member.dispatch(rows, torch.zeros(2, 3).long(), torch.ones(2, 3), NUM_LOCAL)
        count = len(pushed.wait().rows)
        member.combine(pushed, torch.zeros(count, columns, dtype=dtype))
    assert len(seen) >= 10 * len(archs), seen
    return problems


def chosen_slots(generator: torch.Generator, with_live: bool) -> bool:
    """Whether the kernel chooses, orders and counts as the plain ops do."""
    placement = Placement([[5, 1, 2, 3, 4, 0, 6, 7, 0, 1, 2, 3]], 8, 2)
    maps = ExpertMaps.of(placement, 0, 1, torch.device("cpu"))
    chosen = torch.stack([torch.randperm(8, generator=generator)[:3] for _ in range(9)])
    weight = torch.rand(9, 3, generator=generator)
    live = torch.rand(9, generator=generator) < 0.6 if with_live else None
    counts, again = torch.zeros(8, dtype=torch.int64), torch.zeros(8, dtype=torch.int64)
    layer = LayerExperts(maps, None, again)  # type: ignore[arg-type]  # nothing is sent
    found = kernels.choose_slots(
        chosen, weight, live, maps.log2phy, maps.copies, counts, maps.place, SPREAD
    )
    wanted = layer.choose(chosen, weight, live)
    real = wanted[2] >= 0  # of rows that are not live only the absence counts
    return (
        torch.equal(found[0], wanted[0])
        and torch.equal(found[1][real], wanted[1][real])
        and torch.equal(found[2], wanted[2])
        and torch.equal(counts, again)
    )


def interpret() -> list[str]:
    """Run all cases; returns what is wrong."""
    generator = torch.Generator().manual_seed(0)
    problems: list[str] = []
    for with_live in (False, True):
        if not chosen_slots(generator, with_live):
            problems.append(f"choose_slots differs, live {with_live}")
    for size, columns, dtype, quantize in [
        (2, 96, torch.bfloat16, True),
        (3, 1056, torch.bfloat16, True),
        (2, 32, torch.float32, False),
    ]:
        members = ranks(size, columns, dtype, quantize)
        for sizes, active in [([5, 2, 1], 3), ([0, 6, 0], 3), ([0, 0, 0], 2), ([1, 1, 4], 2)]:
            problems += call(members, sizes[:size], columns, dtype, quantize, active, generator)
    alone = ranks(2, 32, torch.bfloat16, True)[0]  # nobody answers
    alone.dispatch(torch.ones(1, 32).bfloat16(), torch.tensor([[0]]), torch.ones(1, 1), 4).wait()
    if int(alone.error) != 2:
        problems.append("a rank that does not come is not noticed")
    return problems


if __name__ == "__main__":
    torch.set_num_threads(1)
    run = sys.argv[1] == "run"
    found = interpret() if run else compile_all([int(arch) for arch in sys.argv[2:]])
    print("\n".join(found))
    sys.exit(bool(found))
