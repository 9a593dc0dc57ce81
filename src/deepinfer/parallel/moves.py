"""Which experts to move: the plan that pays best, in this process or in one of its own (pure).

Planning 40 layers takes ten seconds of Python, which a thread would take from the thread that
launches steps. So large plans are made by a process that gets everything through a pipe.
"""

from __future__ import annotations

import contextlib
import pickle
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from deepinfer.errors import DeepInferError
from deepinfer.parallel.balance import LoadWindow, adapt, judge, plan_by_steps, refine
from deepinfer.parallel.migrate import Migration, Stage, plan_migration, relabel
from deepinfer.parallel.placement import Placement

__all__ = ["Moves", "plan_all", "plan_moves"]

_MOVE_ROWS: Final = 512
"""What moving an expert may cost, in rows: 19 MB over NVLink against a row of a large product."""
_SMALL: Final = 2048
"""Most slots of all layers that are planned in the calling process."""
_PROGRAM: Final = """
import os, pickle, sys, threading
source = sys.stdin.buffer
sys.path[:0] = pickle.load(source)
from deepinfer.parallel.moves import plan_moves
if hasattr(os, "nice"):
    os.nice(5)
work, horizon, spare = pickle.load(source)
threading.Thread(target=lambda: (os.read(0, 1), os._exit(1)), daemon=True).start()
pickle.dump([plan_moves(now, window, horizon, spare) for now, window in work], sys.stdout.buffer)
"""


@dataclass(frozen=True, slots=True)
class Moves:
    """What a plan comes to; without stages nothing pays.

    rows_now, rows_planned  of the busiest rank, on steps the plan has not seen, summed over layers
    """

    after: Placement
    stages: tuple[Stage, ...]
    rows_now: float
    rows_planned: float


def plan_moves(now: Placement, window: LoadWindow, horizon: int, spare: int) -> Moves:
    """Return the moves that pay best within `horizon` steps: a plan made anew, or from what is.

    Depends on its arguments alone, so that ranks with the same counts make the same moves.
    """
    seen, unseen = window.split()
    fresh = plan_by_steps(seen, now.num_ranks, now.num_slots)
    best: tuple[float, Migration, float] | None = None
    rows_now = 0.0
    for wished in (refine(now, seen, exchanges=32), adapt(now, seen), relabel(now, fresh)):
        migration = plan_migration(now, wished, spare)
        cost = _MOVE_ROWS * int(migration.received().max(initial=0))
        gain = judge(now, migration.after, unseen, remaining_steps=horizon, migration_rows=cost)
        rows_now = gain.rows_now
        net = (gain.rows_now - gain.rows_planned) * horizon - cost
        if gain.worth_it and migration.stages and (best is None or net > best[0]):
            best = (net, migration, gain.rows_planned)
    if best is None:
        return Moves(now, (), rows_now, rows_now)
    return Moves(best[1].after, best[1].stages, rows_now, best[2])


def plan_all(
    work: Sequence[tuple[Placement, LoadWindow]], horizon: int, spare: int, small: int = _SMALL
) -> list[Moves]:
    """Plan several groups of layers, in a process of its own where that takes long.

    small  most slots that are planned here. Raises DeepInferError when the process fails. Its input
           is open while it plans; when this process ends, however it does, the other ends with it
    """
    if sum(now.slots.size for now, _ in work) <= small:
        return [plan_moves(now, window, horizon, spare) for now, window in work]
    data = pickle.dumps([path for path in sys.path if path])
    data += pickle.dumps((list(work), horizon, spare))
    with subprocess.Popen(
        [sys.executable, "-P", "-c", _PROGRAM],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        process_group=0,  # Ctrl-C is for the engine
    ) as child:
        assert child.stdin is not None and child.stdout is not None and child.stderr is not None
        with contextlib.suppress(BrokenPipeError):
            child.stdin.write(data)
            child.stdin.flush()
        made, why = child.stdout.read(), child.stderr.read()
    if child.returncode:
        told = why.decode(errors="replace").strip().splitlines() or ["nothing was told"]
        raise DeepInferError(f"planning where experts go failed: {told[-1]}")
    found: list[Moves] = pickle.loads(made)
    return found
