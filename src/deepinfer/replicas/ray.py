"""Datasets through engines on Ray: a replica is an actor, and one of several ranks has more.

`Replica` is a class for `Dataset.map_batches`: rows in, the same rows with their answers out. With
one rank the engine lives in the replica's own process. With several, the replica asks for no GPU
itself; it reserves a placement group, in which an actor for each rank joins as torchrun's processes
would. A replica whose rank is gone starts its engine once more and answers the batch again: with
seeds, answers do not depend on how often they are computed.

Source: parallelism specification, 7.2.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import AsyncIterator, Mapping
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from deepinfer.config.load import load_engine_config
from deepinfer.engine.request import Completion, SamplingParams
from deepinfer.errors import RankError, RequestError, UnsupportedError

if TYPE_CHECKING:
    from deepinfer.llm import LLM

__all__ = ["Batch", "Replica", "answer_dataset"]

Batch = dict[str, Any]
"""Columns of a batch, equally long."""

_RESULTS: Final = ("generated_text", "generated_token_ids", "finish_reason", "error")
_START_S: Final = 900.0


def _ray() -> Any:
    try:
        import ray
    except ImportError as error:
        raise UnsupportedError.missing_extra("ray", "ray", "a dataset through replicas") from error
    return ray


class Replica:
    """One engine, for `map_batches` with `batch_format="numpy"`.

    model, device, config  as of LLM; config is a mapping of dotted keys
    params   of rows, as keywords of SamplingParams; a column of the same name has the row's own
    prompt   the column of texts or token ids
    cpus, gpus  what each rank's actor asks for
    Answers are the columns generated_text, generated_token_ids, finish_reason and error. A row that
    fails has its error there, and the others go on.
    """

    def __init__(
        self,
        model: str,
        device: str = "auto",
        config: Mapping[str, object] | None = None,
        params: Mapping[str, Any] | None = None,
        prompt: str = "prompt",
        cpus: float = 1.0,
        gpus: float = 0.0,
    ) -> None:
        self._engine = (model, device, dict(config or {}))
        self._params = dict(params or {})
        SamplingParams(**self._params)  # refused here rather than in every row
        self._prompt = prompt
        world = load_engine_config(values=self._engine[2]).mesh.world
        self._group = _Group(*self._engine, world, cpus, gpus) if world > 1 else None
        self._llm: LLM | None = None
        if self._group is None:
            from deepinfer.llm import LLM

            self._llm = LLM(*self._engine)

    async def __call__(self, batch: Batch) -> AsyncIterator[Batch]:
        """Answer a batch; several may be under way and share the engine's steps."""
        prompts, params = self._requests(batch)
        if self._group is not None:
            completions = await self._group.generate(prompts, params)
        else:
            assert self._llm is not None
            completions = await _collect(self._llm, prompts, params)
        yield {**batch, **_columns(completions)}

    def _requests(self, batch: Batch) -> tuple[list[Any], list[SamplingParams]]:
        """Return the prompts and parameters of a batch's rows."""
        if self._prompt not in batch:
            raise RequestError(
                f"the rows have no column {self._prompt!r}, but {', '.join(sorted(batch))}: name "
                "the column of prompts with prompt="
            )
        names = [n for n in SamplingParams.__dataclass_fields__ if n in batch and n != self._prompt]
        prompts = [
            text if isinstance(text, str) else [int(i) for i in text]
            for text in batch[self._prompt]
        ]
        params = []
        for row in range(len(prompts)):
            own = {name: _plain(batch[name][row]) for name in names}
            given = {name: value for name, value in own.items() if value is not None}
            params.append(SamplingParams(**{**self._params, **given}))
        return prompts, params


def _plain(value: Any) -> Any:
    """Return a column's value as Python has it; what is missing is None."""
    value = value.item() if isinstance(value, np.generic) else value
    if isinstance(value, float) and np.isnan(value):
        return None
    return value.tolist() if isinstance(value, np.ndarray) else value


async def _collect(llm: LLM, prompts: list[Any], params: list[SamplingParams]) -> list[Completion]:
    """Return one completion for each prompt, in order."""
    found: dict[int, Completion] = {}
    async for chunk in llm.agenerate(prompts, params):
        if chunk.completion is not None:
            found[chunk.index] = chunk.completion
    return [found[index] for index in range(len(prompts))]


def _columns(completions: list[Completion]) -> Batch:
    values: dict[str, list[Any]] = {
        "generated_text": [c.text or "" for c in completions],
        "generated_token_ids": [np.array(c.token_ids, dtype=np.int64) for c in completions],
        "finish_reason": [str(c.finish_reason) for c in completions],
        "error": [c.error or "" for c in completions],
    }
    columns: Batch = {}
    for name in _RESULTS:
        column = np.empty(len(completions), dtype=object)
        column[:] = values[name]
        columns[name] = column
    return columns


class _Rank:
    """The actor of a rank."""

    def __init__(self, rank: int, world: int) -> None:
        self._rank, self._world = rank, world
        self._llm: LLM | None = None

    def where(self) -> tuple[str, int]:
        """Return this host's address and a port that is free there."""
        with socket.socket() as free:
            free.bind(("", 0))
            return str(_ray().util.get_node_ip_address()), int(free.getsockname()[1])

    def start(
        self, address: str, port: int, local_world: int, engine: tuple[str, str, dict[str, object]]
    ) -> int:
        """Join the engine as torchrun's process of this rank would; the actor sees its GPU only."""
        os.environ |= {
            "RANK": str(self._rank), "WORLD_SIZE": str(self._world), "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": str(local_world), "MASTER_ADDR": address, "MASTER_PORT": str(port),
        }  # fmt: skip
        from deepinfer.llm import LLM

        self._llm = LLM(*engine)
        return os.getpid()

    def serve(self) -> None:
        """Step with rank 0 until it ends."""
        assert self._llm is not None
        self._llm.serve()

    async def generate(self, prompts: list[Any], params: list[SamplingParams]) -> list[Completion]:
        """Answer prompts (rank 0)."""
        assert self._llm is not None
        return await _collect(self._llm, prompts, params)


class _Group:
    """The ranks of one engine, each an actor in one placement group."""

    def __init__(
        self, model: str, device: str, config: dict[str, object], world: int, cpus: float,
        gpus: float,
    ) -> None:  # fmt: skip
        ray = _ray()
        self._engine, self._world = (model, device, config), world
        self._resources = (cpus, gpus)
        bundle = {"CPU": cpus} | ({"GPU": gpus} if gpus else {})
        self._place = ray.util.placement_group([bundle] * world, strategy="PACK")
        ray.get(self._place.ready(), timeout=_START_S)
        self._ranks: list[Any] = []
        self.processes: list[int] = []
        self._start()

    async def generate(self, prompts: list[Any], params: list[SamplingParams]) -> list[Completion]:
        """Answer prompts, on a new engine where the old one has lost a rank."""
        ray = _ray()
        lost = (RankError, ray.exceptions.RayActorError)
        began = self._ranks
        try:
            return list(await began[0].generate.remote(prompts, params))
        except (*lost, ray.exceptions.RayTaskError) as error:
            cause = getattr(error, "cause", error)
            if not isinstance(error, lost) and not isinstance(cause, lost):
                raise
            if self._ranks is began:  # the first of several batches that were under way
                self._stop()
                self._start()
            return list(await self._ranks[0].generate.remote(prompts, params))

    def _start(self) -> None:
        ray = _ray()
        cpus, gpus = self._resources
        make = ray.remote(_Rank)
        strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
        self._ranks = [
            make.options(
                num_cpus=cpus,
                num_gpus=gpus,
                max_concurrency=8 if rank == 0 else 2,
                scheduling_strategy=strategy(self._place, placement_group_bundle_index=rank),
            ).remote(rank, self._world)
            for rank in range(self._world)
        ]
        places = ray.get([rank.where.remote() for rank in self._ranks], timeout=_START_S)
        address, port = places[0]
        hosts = [host for host, _ in places]
        self.processes = ray.get(
            [
                rank.start.remote(address, port, hosts.count(host), self._engine)
                for rank, host in zip(self._ranks, hosts, strict=True)
            ],
            timeout=_START_S,
        )
        self._serving = [rank.serve.remote() for rank in self._ranks[1:]]

    def _stop(self) -> None:
        ray = _ray()
        for rank in self._ranks:
            with contextlib.suppress(Exception):
                ray.kill(rank)


def answer_dataset(
    dataset: Any,
    model: str,
    *,
    replicas: int | tuple[int, int] = 1,
    device: str = "auto",
    config: Mapping[str, object] | None = None,
    params: Mapping[str, Any] | None = None,
    prompt: str = "prompt",
    batch_size: int = 64,
    cpus: float = 1.0,
    gpus: float = 0.0,
) -> Any:
    """Return a Ray dataset with the answers of every row beside it.

    replicas    engines that share the dataset, or (least, most) of them
    batch_size  rows of a batch; a replica works on several batches at a time
    cpus, gpus  of each rank
    The other arguments are those of `Replica`. Rows come in any order: carry an id.
    Raises UnsupportedError when Ray is not installed.
    """
    _ray()
    world = load_engine_config(values=dict(config or {})).mesh.world
    alone = world == 1
    return dataset.map_batches(
        Replica,
        fn_constructor_kwargs={
            "model": model, "device": device, "config": dict(config or {}), "params": params,
            "prompt": prompt, "cpus": cpus, "gpus": gpus,
        },
        batch_size=batch_size,
        batch_format="numpy",
        concurrency=replicas,
        num_cpus=cpus if alone else 0.0,
        num_gpus=gpus if alone else 0.0,
    )  # fmt: skip
