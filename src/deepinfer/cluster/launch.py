"""Joining an engine of several ranks, whoever starts the processes.

Three ways: this process starts the others on its host; `torchrun` has started all of them; SLURM
has. Processes of our own are fresh interpreters: nothing is forked, and the caller's main module is
not imported again.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch._C._distributed_c10d import TCPStore
from torch.distributed import DistNetworkError, DistStoreError
from torch.distributed.distributed_c10d import PrefixStore, Store

from deepinfer.cluster.watch import Watch, end_process, how_it_ended
from deepinfer.config.engine import EngineConfig
from deepinfer.config.mesh import Mesh
from deepinfer.errors import ConfigError, RankError
from deepinfer.parallel.comm import GroupBroken
from deepinfer.parallel.group import Ranks

__all__ = ["Environment", "Membership", "Started", "environment", "join", "rank_device"]

_PAUSE_S: Final = 0.05
_STOP_S: Final = 10.0
_PORT: Final = 29500
_STARTER: Final = "DEEPINFER_STARTED"  # set for processes of our own


@dataclass(frozen=True, slots=True)
class Environment:
    """What a launcher told this process.

    rank, world              among all processes
    local_rank, local_world  among those of this host
    address, port            where rank 0 listens
    has_store                whether the launcher itself listens there
    """

    rank: int
    world: int
    local_rank: int
    local_world: int
    address: str
    port: int
    has_store: bool = False


@dataclass(frozen=True, slots=True)
class Started:
    """What a process of our own is told by the one that starts it, as JSON on its input."""

    rank: int
    world: int
    port: int
    model: str
    device: str
    config: dict[str, Any]

    def environment(self) -> Environment:
        """Return it as a launcher would have told it."""
        return Environment(self.rank, self.world, self.rank, self.world, "127.0.0.1", self.port,
                           True)  # fmt: skip


def environment(env: Mapping[str, str] = os.environ) -> Environment | None:
    """Return what torchrun or SLURM told this process; None when neither started several.

    Raises ConfigError when they told half of it.
    """
    if "RANK" in env and "WORLD_SIZE" in env:  # torchrun, and most others
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        rank, world = _number(env, "RANK"), _number(env, "WORLD_SIZE")
        local_world = _number(env, "LOCAL_WORLD_SIZE", world)
        local_rank = _number(env, "LOCAL_RANK", rank % local_world)
        address = env.get("MASTER_ADDR", "127.0.0.1" if local_world == world else "")
        if not address:
            raise ConfigError(f"{names[0]} is set but MASTER_ADDR is not: start with torchrun")
        agent = env.get("TORCHELASTIC_USE_AGENT_STORE", "") == "True"
        port = _number(env, "MASTER_PORT", _PORT)
        found = Environment(rank, world, local_rank, local_world, address, port, agent)
    elif "SLURM_PROCID" in env and "SLURM_STEP_ID" in env:  # inside srun, not the batch script
        world = _number(env, "SLURM_NTASKS", 1)
        per_node = env.get("SLURM_NTASKS_PER_NODE") or env.get("SLURM_TASKS_PER_NODE", str(world))
        local_world = int(re.split(r"[(,]", per_node)[0])
        address = env.get("MASTER_ADDR") or _first_host(env.get("SLURM_STEP_NODELIST", ""))
        job = int(re.sub(r"\D", "", env.get("SLURM_JOB_ID", "0")) or 0)
        port = _number(env, "MASTER_PORT", 20000 + job % 20000)
        found = Environment(
            _number(env, "SLURM_PROCID"), world, _number(env, "SLURM_LOCALID", 0), local_world,
            address, port,
        )  # fmt: skip
    else:
        return None
    return found if found.world > 1 else None


def _number(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = env.get(name)
    if text is None and default is not None:
        return default
    try:
        return int(text or "")
    except ValueError:
        raise ConfigError(
            f"{name} is {text!r}, expected an integer: see docs/parallel.md"
        ) from None


def _first_host(nodes: str) -> str:
    """Return the first of SLURM's list of hosts: `gpu[03-06,09],big1` -> `gpu03`."""
    match = re.match(r"([^\[,]+)(?:\[([^\]]*)\])?", nodes)
    if match is None:
        return "127.0.0.1"
    prefix, ranges = match.groups()
    return str(prefix) + (re.split(r"[-,]", ranges)[0] if ranges else "")


@dataclass(slots=True, eq=False)
class Membership:
    """This process as a rank of an engine.

    ranks     its groups
    watch     who notices what goes wrong
    children  processes that this one has started, by rank
    """

    ranks: Ranks
    watch: Watch
    local_world: int
    children: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)

    def fail(self, error: BaseException) -> None:
        """Let all ranks know that this one could not start, and end them."""
        rank, world = self.ranks.rank, self.ranks.world.size
        told = str(error) or type(error).__name__
        self.watch.report(f"rank {rank} of {world} could not start: {told}")
        self.end(orderly=False)

    def end(self, orderly: bool) -> None:
        """Leave the groups; processes of our own get a while to follow, or none."""
        if not self.ranks.leads:
            self.watch.close()  # the store may be gone right after the meeting
        if orderly:
            with contextlib.suppress(GroupBroken):
                self.ranks.world.meet()
        self.watch.close()
        if orderly:
            self.ranks.close()
        _end_children(self.children, _STOP_S if orderly else 0.0)
        if not orderly:
            self.ranks.abort()
            self.ranks.close()


def _end_children(children: Mapping[int, subprocess.Popen[bytes]], patience_s: float) -> None:
    deadline = time.monotonic() + patience_s
    for child in children.values():
        if patience_s:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(max(0.0, deadline - time.monotonic()))
        if child.poll() is None:
            child.kill()
    for child in children.values():
        child.wait()
        if child.stdin is not None:
            with contextlib.suppress(OSError):
                child.stdin.close()


def rank_device(device: str, started: Started | None = None) -> str:
    """Return a rank's device: GPUs of a host go to its ranks in order, from `cuda:N` on."""
    if device == "cpu" or (device == "auto" and not torch.cuda.is_available()):
        return device
    if started is not None:
        return started.device if ":" in started.device else f"{device}:{started.rank}"
    found = environment()
    local_rank = 0 if found is None else found.local_rank
    kind, _, first = device.partition(":")
    if kind not in ("auto", "cuda") or (first and not first.isdecimal()):
        return device
    return f"cuda:{int(first or 0) + local_rank}"


_engines = 0
_stores: dict[tuple[str, int], Store] = {}


def join(
    config: EngineConfig,
    mesh: Mesh,
    model: str,
    device: str,
    torch_device: torch.device,
    started: Started | None = None,
) -> Membership:
    """Become a rank, starting the other processes where nobody else has.

    started  what this process was told, when another one of ours has started it
    Raises ConfigError when a launcher started another number of processes, and RankError when one
    of them does not come.
    """
    global _engines
    children: dict[int, subprocess.Popen[bytes]] = {}
    found = environment() if started is None else started.environment()
    timeout = datetime.timedelta(seconds=config.parallel.timeout_s)
    if found is None:
        server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timeout)
        found = Environment(0, mesh.world, 0, mesh.world, "127.0.0.1", server.port, True)
        children = _start(mesh.world, server.port, model, device, config)
        _stores[found.address, found.port] = server
    if found.world != mesh.world:
        raise ConfigError(
            f"{found.world} processes were started, but parallel.data x parallel.context and "
            f"parallel.engram need {mesh.world}"
        )
    if torch_device.type == "cuda":
        torch.cuda.set_device(torch_device)  # what libraries take when they are not told
    try:
        store = _store(found, timeout)
        name = f"engine {_engines}" if not children and started is None else "engine"
        _engines += 1
        own = PrefixStore(name, store)
        own.set(f"here/{found.rank}", str(os.getpid()))
        if found.rank == 0:
            _gather(own, mesh.world, children, config.parallel.timeout_s)
        watched = PrefixStore(name, _connect(found, timeout))
        broken: list[Ranks] = []

        def on_failure(told: str) -> None:
            _end_children(children, 0.0)
            for ranks in broken:
                ranks.abort()
            # A collective over gloo ends only with its connections, and a rank that hangs on
            # another host keeps them: then this process cannot go on either.
            if started is not None or not (children or watch.was_taken(_STOP_S)):
                end_process(told)

        watch = Watch(
            watched, found.rank, mesh.world, config.parallel.timeout_s, on_failure, children
        )
        try:
            ranks = Ranks.connect(mesh, found.rank, torch_device, own, config.parallel.timeout_s)
        except GroupBroken as error:
            raise RankError(watch.wait(3.0) or f"ranks could not meet: {error}") from error
        broken.append(ranks)
    except BaseException:
        _end_children(children, 0.0)
        raise
    return Membership(ranks, watch, found.local_world, children)


def _store(found: Environment, timeout: datetime.timedelta) -> Store:
    """Return the connection of this process to the store, which rank 0 opens."""
    key = found.address, found.port
    if key not in _stores:
        _stores[key] = _connect(found, timeout, found.rank == 0 and not found.has_store)
    return _stores[key]


def _connect(found: Environment, timeout: datetime.timedelta, opens: bool = False) -> Store:
    """Connect to the store, or open it; raises RankError when that fails."""
    try:
        return TCPStore(
            found.address, found.port, is_master=opens, wait_for_workers=False, timeout=timeout
        )
    except (DistNetworkError, DistStoreError) as error:
        what = "open" if opens else "reach"
        where = f"{found.address}:{found.port} (MASTER_ADDR, MASTER_PORT)"
        told = str(error).strip().splitlines()[0]
        raise RankError(
            f"rank {found.rank} of {found.world} cannot {what} rank 0's store at {where}: {told}"
        ) from error


def _gather(
    store: Store, world: int, children: Mapping[int, subprocess.Popen[bytes]], timeout_s: float
) -> None:
    """Wait until every rank is there; raises RankError naming those that are not."""
    deadline = time.monotonic() + timeout_s
    missing = list(range(1, world))
    while missing:
        missing = [rank for rank in missing if not store.check([f"here/{rank}"])]
        for rank in missing:
            code = children[rank].poll() if rank in children else None
            if code is not None:
                raise RankError(f"rank {rank} of {world} {how_it_ended(code)} while it started")
        if missing and time.monotonic() > deadline:
            named = ", ".join(str(rank) for rank in missing)
            raise RankError(f"ranks {named} of {world} did not come within {timeout_s:g} s")
        if missing:
            time.sleep(_PAUSE_S)


def _start(
    world: int, port: int, model: str, device: str, config: EngineConfig
) -> dict[int, subprocess.Popen[bytes]]:
    """Start the other ranks on this host."""
    env = dict(os.environ)
    paths: Sequence[str] = [os.path.abspath(path) for path in sys.path if path]
    env["PYTHONPATH"] = os.pathsep.join(paths)
    children: dict[int, subprocess.Popen[bytes]] = {}
    try:
        for rank in range(1, world):
            kind, colon, first = device.partition(":")
            own = f"{kind}:{int(first) + rank}" if colon else device
            told = Started(rank, world, port, model, own, dict(config.to_dotted()))
            child = subprocess.Popen(
                [sys.executable, "-P", "-m", "deepinfer.replicas.worker"],
                stdin=subprocess.PIPE,
                stdout=2,  # what is printed by mistake is no result
                env=env,
                process_group=0,  # Ctrl-C is for the first process
            )
            children[rank] = child
            assert child.stdin is not None
            line = {name: getattr(told, name) for name in Started.__dataclass_fields__}
            child.stdin.write(json.dumps(line).encode() + b"\n")
            child.stdin.flush()
    except BaseException:
        _end_children(children, 0.0)
        raise
    return children
