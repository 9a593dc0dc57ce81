"""LLM: the public engine. Builds the parts from a config, joins them, turns calls into requests.

Owns request ids, seeds, text in and out, and who gets which completion. What runs when is the
scheduler's matter. Threads take turns: whatever touches the engine waits for the step that runs.
"""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import torch

from deepinfer.cache.blocks import BlockPool
from deepinfer.cache.layout import CacheLayout
from deepinfer.cache.live import live_shapes
from deepinfer.cache.prefix import PrefixCache
from deepinfer.cache.slots import SlotPool
from deepinfer.cache.tensors import Caches
from deepinfer.chat.messages import MessageLike, ResponseFormat, Tool
from deepinfer.chat.token_map import load_token_map
from deepinfer.chat.tokenizer import Tokenizer
from deepinfer.cluster.launch import Membership, Started, join, rank_device
from deepinfer.cluster.loop import GroupLoop, Hooks
from deepinfer.config.engine import EngineConfig
from deepinfer.config.load import load_engine_config, load_model_config, resolve_model
from deepinfer.config.mesh import num_slots
from deepinfer.config.model import ModelConfig
from deepinfer.device import pick_device
from deepinfer.device.queue import InlineQueue, ThreadQueue
from deepinfer.dialog.chat import (
    ChatCompletion,
    ChatDelta,
    ChatOptions,
    answer,
    make_turns,
    stream_answers,
)
from deepinfer.engine.calibrate import make_drafter, make_planner
from deepinfer.engine.commit import Gate
from deepinfer.engine.device_runner import DeviceRunner, make_runner, settle
from deepinfer.engine.driver import EngineDriver
from deepinfer.engine.effective import cpu_threads, overlaps
from deepinfer.engine.executor import Executor, InProcessExecutor
from deepinfer.engine.graphs import row_bucket
from deepinfer.engine.loop import EngineLoop, interrupt_after
from deepinfer.engine.masks import MaskBuffer
from deepinfer.engine.memory import plan_caches
from deepinfer.engine.prompts import (
    BadPrompt,
    Prompt,
    Prompts,
    check_prompt,
    match_params,
    split_prompts,
)
from deepinfer.engine.replay import keep_tokens
from deepinfer.engine.request import Chunk, Completion, FinishReason, Request, SamplingParams
from deepinfer.engine.runner import Runner, host_rows
from deepinfer.engine.scheduler import Limits, Scheduler
from deepinfer.engine.shapes import Shapes, fill_matchers
from deepinfer.engine.sizing import Sizes, max_rollback, token_budgets
from deepinfer.engine.snapshot import ResumedGate, State, contradictions, fingerprint, mismatches
from deepinfer.engine.speculation import check_speculation
from deepinfer.engine.state import SlotState
from deepinfer.engine.stats import EngineStats
from deepinfer.engine.text import TextStream
from deepinfer.engine.turn import Turn
from deepinfer.errors import (
    ConfigError,
    RequestError,
    StateError,
    TokenizerError,
    UnsupportedError,
)
from deepinfer.grammar.report import Report
from deepinfer.grammar.spec import Structured
from deepinfer.model.fast.balanced import make_balancer
from deepinfer.model.fast.context import ContextShare
from deepinfer.model.fast.model import FastModel, resolve_numerics
from deepinfer.parallel.experts import ExpertRanks, RowShape, make_exchange
from deepinfer.parallel.live import LiveBalancer
from deepinfer.parallel.tables import HostRows, MakeTable, ShardedRows, mapped_rows
from deepinfer.sampling.noise import derive_seed
from deepinfer.sampling.sampler import Sampler
from deepinfer.weights.fingerprint import weights_digest
from deepinfer.weights.load import check_steering, find_nonfinite
from deepinfer.weights.reader import Checkpoint

__all__ = ["LLM", "Interrupted", "Progress", "set_cpu_threads"]

_SEARCHED_BYTES = 32 * 2**30
"""Checkpoints above this are not read through for the cause of a bad logit."""

_TABLE_SHARE = 0.25
"""Engram tables above this share of the device's free memory stay on the host."""

_log = logging.getLogger(__name__)


def set_cpu_threads(config: EngineConfig, model_config: ModelConfig, sharing: int = 1) -> None:
    """Set torch's threads for the whole process; bits do not depend on them.

    sharing  processes of this host that run the model together
    """
    threads = cpu_threads(config, model_config)
    if threads is None and sharing > 1:
        threads = max(1, (os.cpu_count() or 1) // sharing)
    if threads is not None:
        torch.set_num_threads(threads)


class Interrupted(KeyboardInterrupt):
    """Ctrl-C during `generate`. The engine stays usable.

    completions  one per input, in order; what had not finished ends with `abort` and holds the
                 tokens it had
    """

    def __init__(self, completions: Sequence[Completion]) -> None:
        super().__init__("interrupted")
        self.completions = list(completions)


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a call of `generate` is.

    num_finished  requests that ended well
    num_failed    requests that ended with an error, refused ones among them
    """

    num_finished: int
    num_requests: int
    num_tokens: int
    num_failed: int = 0


def _name_nonfinite(checkpoint: Checkpoint) -> str | None:
    """Name the first stored tensors that hold NaN or infinity; None when none does, or unread."""
    if sum(tensor.nbytes for tensor in checkpoint.tensors.values()) > _SEARCHED_BYTES:
        return None
    names = find_nonfinite(checkpoint, limit=3)
    return f"{', '.join(names)} holds NaN or infinity" if names else None


_Task = tuple[int, object, SamplingParams, int]
"""Index of a prompt, the prompt, its parameters for one sample, index of the sample."""


def _samples(entries: Sequence[object], params: Sequence[SamplingParams]) -> list[_Task]:
    """Return a task for every sample of every prompt, with seeds of their own."""
    tasks: list[_Task] = []
    for index, (prompt, asked) in enumerate(zip(entries, params, strict=True)):
        if asked.n == 1:
            tasks.append((index, prompt, asked, 0))
            continue
        seed = secrets.randbits(64) if asked.seed is None else asked.seed
        for sample in range(asked.n):
            one = replace(asked, n=1, seed=derive_seed(seed, sample))
            tasks.append((index, prompt, one, sample))
    return tasks


class LLM:
    """An offline engine for one checkpoint.

    model    checkpoint folder, or a packaged one: `demo` (trained), `golden` (random weights)
    device   `auto`, `cpu`, `cuda` or `cuda:N`
    config   an EngineConfig, or a mapping of dotted keys (`{"scheduling.max_num_seqs": 8}`); a
             mapping or None also takes what the environment sets
    With several ranks (`parallel.expert`, ...) the first process leads: it starts the others, or
    torchrun or SLURM has. A script that all ranks run gets the same list from `generate` and `chat`
    on every rank; everything else is for rank 0, while the others `serve`.
    Raises ConfigError, CheckpointError, TokenizerError, CacheError or UnsupportedError.

        with LLM("demo") as llm:
            for completion in llm.generate(["One prompt", [5, 6, 7]], SamplingParams(max_tokens=8)):
                print(completion.text)
    """

    _member: Membership | None = None
    _balancer: LiveBalancer | None = None

    def __init__(
        self,
        model: str | os.PathLike[str],
        device: str = "auto",
        config: EngineConfig | Mapping[str, object] | None = None,
        *,
        _started: Started | None = None,
    ) -> None:
        self._loop: EngineLoop | None = None
        if isinstance(config, EngineConfig):
            self.config = config
        elif not isinstance(config, Mapping | None):
            raise ConfigError(
                "config must be an EngineConfig or a mapping of dotted keys, "
                f"not {type(config).__name__}"
            )
        else:
            self.config = load_engine_config(values=config)
        self.path: Path = resolve_model(model)
        mesh = self.config.mesh
        if mesh.world > 1:
            device = rank_device(device, _started)
        self.device = pick_device(device)
        self.model_config: ModelConfig = load_model_config(self.path)
        if mesh.world > 1:
            self._check_ranks()
            where = self.device.torch_device
            self._member = join(self.config, mesh, str(self.path), device, where, _started)
        sharing = self._member.local_world if self._member is not None else 1
        set_cpu_threads(self.config, self.model_config, sharing)
        try:
            self._build()
        except BaseException as error:
            if self._member is not None:
                self._member.fail(error)
            raise

    def _build(self) -> None:
        self.tokenizer: Tokenizer | None = None
        if (self.path / "tokenizer.json").is_file():
            self.tokenizer = Tokenizer.load(self.path, self.model_config)
        self._shapes = Shapes(
            self.config.grammar,
            self.tokenizer,
            self.model_config.vocab_size,
            self.model_config.eos_token_id,
            frozenset(self.config.sampling.banned_token_ids),
        )
        runner, sizes = self._build_runner()
        self.sizes = sizes
        queue = ThreadQueue() if self.overlaps else InlineQueue()
        queue.submit(self.device.bind_thread)
        if isinstance(runner, DeviceRunner) and self._member is None:
            queue.submit(runner.prepare).wait()
        self._start(InProcessExecutor(runner, queue))

    def _check_ranks(self) -> None:
        """Refuse what several ranks cannot do, before any of them starts."""
        config, model_config = self.config, self.model_config
        num_slots(model_config.n_routed_experts, config.parallel.expert, config.parallel.copies)
        keep_tokens(config, model_config)
        check_speculation(config.speculation, model_config)

    def _expert_ranks(self) -> ExpertRanks | None:
        """Return what the model needs to share its experts with other ranks."""
        member, parallel = self._member, self.config.parallel
        if member is None or member.ranks.expert.size == 1:
            return None
        device = self.device.torch_device
        quantize = resolve_numerics(self.config.numerics, device).quantize
        model, drafts = self.model_config, self.config.speculation.num_drafts
        budget, _ = token_budgets(self.config, device.type == "cpu")
        block = max(1 + drafts, model.dspark_block_size if drafts else 0)
        most = row_bucket(self.config.scheduling.max_num_seqs)
        experts = max(model.n_routed_experts, model.dspark_n_routed_experts if drafts else 0)
        shape = RowShape(
            capacity=max(budget, row_bucket(most * block)),
            columns=model.hidden_size,
            active=max(
                model.num_experts_per_tok, model.dspark_num_experts_per_tok if drafts else 0
            ),
            experts=num_slots(experts, member.ranks.expert.size, parallel.copies),
            dtype=torch.bfloat16 if quantize else torch.float32,
        )
        exchange = make_exchange(
            parallel.backend, member.ranks.expert, quantize, parallel.capacity_factor, shape,
            member.ranks.store, device, parallel.timeout_s,
        )  # fmt: skip
        return ExpertRanks(member.ranks.expert, device, exchange, parallel.copies)

    def _experts(self) -> dict[str, object]:
        """Return where experts are and what has moved, nothing where they stay."""
        return {} if self._balancer is None else self._balancer.summary()

    def _tables(self, checkpoint: Checkpoint) -> MakeTable | None:
        """Return what makes the tables of Engram rows, None where they are on the device."""
        where, member = self.config.parallel.engram_rows, self._member
        device = self.device.torch_device
        if member is not None and member.ranks.engram.size > 1:
            group = member.ranks.engram
            return lambda codes, scale: ShardedRows(codes, scale, group, device)
        if where == "auto" and device.type != "cpu":  # a CPU has them mapped anyway
            tables = [t for name, t in checkpoint.tensors.items() if ".engram.embed." in name]
            most = _TABLE_SHARE * self.device.available_bytes()
            where = "host" if sum(t.nbytes for t in tables) > most else "device"
        if where == "mapped" and device.type == "cuda":
            return mapped_rows(device)
        return HostRows if where == "host" else None

    def _largest(self, value: float) -> float:
        """Return the largest of a number over all ranks, which call it together."""
        if self._member is None:
            return value
        found = torch.tensor([value], dtype=torch.float64)
        return float(self._member.ranks.world.all_reduce(found, largest=True))

    def _available_bytes(self) -> int:
        """Return what this rank may use, the same for all ranks: the least that one has."""
        available = self.device.available_bytes()
        if self._member is None:
            return available
        if self.device.torch_device.type == "cpu":
            available //= self._member.local_world
        return -int(self._largest(-available))

    def _build_runner(self) -> tuple[Runner, Sizes]:
        config, model_config = self.config, self.model_config
        device = self.device.torch_device
        keep_tokens(config, model_config)  # refuses what replay cannot do, before weights load
        check_speculation(config.speculation, model_config)
        banned = config.sampling.banned_token_ids
        outside = [i for i in banned if i >= model_config.vocab_size]
        if outside:
            raise ConfigError(
                f"sampling.banned_token_ids holds {outside[0]}, outside the vocabulary "
                f"0..{model_config.vocab_size - 1}"
            )
        token_map = load_token_map(self.path, model_config)
        if model_config.engram_layer_ids and token_map is None:
            raise TokenizerError(
                f"{self.path} has Engram layers, which need its tokenizer.json or the cached "
                "token map: put tokenizer.json into the folder"
            )
        checkpoint = Checkpoint.open(self.path)
        check_steering(checkpoint)
        model = FastModel.load(
            checkpoint,
            config.numerics,
            device,
            token_map,
            config.weights.dequantized_bytes,
            with_drafts=config.speculation.num_drafts > 0,
            ranks=self._expert_ranks(),
            tables=self._tables(checkpoint),
            lean=device.type != "cpu" and not config.keeps_stored,
        )
        model.branch(config.scheduling.graph_branches)
        if device.type != "cpu":
            tokens, rollback = config.cache.tokens_per_block, max_rollback(config)
            settle(model, CacheLayout.build(model_config, config.numerics.mode, tokens, rollback))
        plan = plan_caches(
            config,
            model_config,
            available_bytes=self._available_bytes(),
            on_cpu=device.type == "cpu",
        )
        layout, sizes = plan.layout, plan.sizes
        self._layout = layout
        caches = Caches.allocate(
            layout,
            sizes.num_blocks,
            sizes.num_slots,
            device,
            config.cache.dequantized_bytes if device.type == "cpu" else 0,
        )
        sampler = Sampler(model_config.vocab_size, sizes.num_slots, device, banned)
        state = SlotState(sizes.num_slots, config.speculation.num_drafts, device)
        runner = make_runner(
            config,
            sizes,
            model,
            caches,
            layout,
            sampler,
            state,
            device,
            make_drafter(config, model, sampler, state),
            lambda: _name_nonfinite(checkpoint),
        )
        ranks = None if self._member is None else self._member.ranks
        if ranks is not None and ranks.context.size > 1:
            runner.share_prefill(ContextShare(ranks.context, config.parallel.context_exchange))
        if ranks is not None and ranks.expert.size > 1 and config.parallel.balance_interval:
            self._balancer = make_balancer(config.parallel, ranks, model)
            runner.between = self._balancer.between
        self.planner = make_planner(
            config, runner, sizes.num_blocks, self.path, self.device.capability.name, self._largest
        )
        return runner, sizes

    def _start(self, executor: Executor) -> None:
        """Join scheduler and executor; nothing above the executor knows what runs the steps."""
        sizes, config = self.sizes, self.config
        limits = Limits(
            max_num_seqs=config.scheduling.max_num_seqs,
            max_num_batched_tokens=sizes.max_num_batched_tokens,
            max_model_len=sizes.max_model_len,
            chunk_tokens=sizes.chunk_tokens,
            eos_token_id=self.model_config.eos_token_id,
            fixed_chunks=config.numerics.batch_invariant,
            reserve=config.numerics.batch_invariant,
            vocab_size=self.model_config.vocab_size,
            keep_tokens=keep_tokens(self.config, self.model_config),
        )
        blocks = BlockPool(sizes.num_blocks)
        num_slots = sizes.num_slots - sizes.num_checkpoints
        tokens_per_block = config.cache.tokens_per_block
        prefix = None
        if config.cache.prefix:
            checkpoints = range(num_slots, sizes.num_slots)
            prefix = PrefixCache(blocks, tokens_per_block, checkpoints)
        scheduler = Scheduler(
            limits,
            blocks,
            SlotPool(num_slots),
            tokens_per_block,
            prefix,
            self.planner,
            fill_matchers,
            MaskBuffer(host_rows),
        )
        executor.start()
        if self._member is None:
            self._loop = EngineLoop(
                scheduler,
                executor,
                overlap=self.overlaps,
                log_interval_steps=config.log.interval_steps,
            )
        else:
            self._loop = GroupLoop(
                scheduler,
                executor,
                self._member,
                Hooks(enter=self._enter, snapshot=self._snapshot, experts=self._experts),
                num_drafts=config.speculation.num_drafts,
                placement=config.parallel.placement,
                overlap=self.overlaps,
                log_interval_steps=config.log.interval_steps if self.rank == 0 else 0,
            )
        self._driver = EngineDriver()

        def refuse_inside() -> None:
            if executor.runs_here:  # it would wait for itself
                raise UnsupportedError("a logits processor cannot call the engine that runs it")

        self._turn = Turn(refuse_inside)
        self._next_id = 0
        self._in_generate = False
        self._live: dict[int, SamplingParams] = {}
        self._outbox: list[Completion] = []

    @property
    def rank(self) -> int:
        """This process's place among the ranks of the engine."""
        return 0 if self._member is None else self._member.ranks.rank

    def serve(self) -> None:
        """On a rank that is not the first: step with rank 0 until it closes its engine."""
        loop = self._open_loop()
        if not isinstance(loop, GroupLoop) or self.rank == 0:
            raise UnsupportedError("serve is for the ranks above 0 of an engine of several ranks")
        while not loop.is_stopped:
            loop.serve()

    @property
    def overlaps(self) -> bool:
        """Whether a step is planned while the one before runs."""
        return overlaps(
            self.config, self.model_config, on_cpu=self.device.torch_device.type == "cpu"
        )

    @property
    def max_model_len(self) -> int:
        """Most positions of one sequence. Prompt and output together take one token more at most:
        the last one drawn is never fed, so it needs no position.
        """
        return self.sizes.max_model_len

    def generate(
        self,
        prompts: Prompts,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: Callable[[Progress], None] | None = None,
    ) -> list[Completion]:
        """Complete every prompt and return one Completion per input, in input order; with
        `SamplingParams(n=...)` above 1, n of them, one after the other (`sample_index` 0..n-1).

        prompts          a text, a run of token ids, or a list of these (lists or integer arrays)
        sampling_params  one for all, or one for each; one `seed` is kept for each, no seed draws a
                         fresh one for each
        progress         called after every step; what it raises is logged. It may submit and
                         cancel, as other threads may: what they submit runs along, for `step` to
                         return
        Prompts with a larger `max_tokens` enter first, equal ones in input order. A prompt that
        cannot run has a completion with `error` set, and the others run. Raises RequestError when
        the arguments as a whole do not fit together, and Interrupted on Ctrl-C.
        """
        following = self._follow()
        if following is not None:
            return following
        self._free_loop()
        entries = split_prompts(prompts)
        tasks = _samples(entries, match_params(sampling_params, len(entries)))
        done: dict[int, Completion] = {}
        interrupted = False
        with self._turn:
            loop = self._free_loop()
            ids = self._new_ids(len(tasks))
            start_tokens = loop.num_generated
            self._in_generate = True
        try:
            # The largest budgets enter first: nothing long is left to run alone at the end.
            queue = sorted(zip(ids, tasks, strict=True), key=lambda entry: -entry[1][2].max_tokens)
            for request_id, task in queue:
                self._submit(request_id, *task, streams=False)
            while len(done) < len(tasks):
                with interrupt_after():
                    with self._turn:
                        self._collect(loop.step(), ids, done)
                    num_tokens = loop.num_generated - start_tokens
                    if progress is not None:
                        failed = sum(result.error is not None for result in done.values())
                        finished = len(done) - failed
                        state = Progress(finished, len(tasks), num_tokens, failed)
                        self._tell(progress, state)
        except KeyboardInterrupt:
            interrupted = True
        finally:
            with self._turn:
                self._in_generate = False
                try:
                    loop.flush()
                except KeyboardInterrupt:  # not even this step is waited for
                    interrupted = True
                for request_id in ids:
                    loop.cancel(request_id)
                self._collect(loop.take_finished(), ids, done)
        results = [done.get(request_id) for request_id in ids]
        if interrupted:
            raise Interrupted(
                [
                    result or self._never_started(task[0], task[3])
                    for task, result in zip(tasks, results, strict=True)
                ]
            ) from None
        found = [result for result in results if result is not None]
        if isinstance(loop, GroupLoop) and not loop.member.children:
            loop.finish_call(found)
        return found

    def _follow(self) -> list[Completion] | None:
        """On a rank above 0: step with rank 0 until its call of `generate` ends, return the same.

        None on rank 0.
        """
        loop = self._open_loop()
        if self.rank == 0 or not isinstance(loop, GroupLoop):
            return None
        found = loop.serve()
        if not isinstance(found, list):
            raise UnsupportedError("rank 0 has closed its engine instead of making the same call")
        return found

    def stream(
        self,
        prompts: Prompts,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Iterator[Chunk]:
        """Complete every prompt, yielding what each step adds to each.

        The last chunk of a prompt carries its completion. Leaving the iterator early cancels what
        is unfinished. Arguments and errors as in `generate`.
        """
        self._open_loop()
        entries = split_prompts(prompts)
        return self._stream(_samples(entries, match_params(sampling_params, len(entries))))

    def _stream(self, tasks: list[_Task]) -> Generator[Chunk, None, None]:
        with self._turn:
            loop = self._open_loop()
            ids = self._new_ids(len(tasks))
        mine = set(ids)
        try:
            for request_id, task in zip(ids, tasks, strict=True):
                self._submit(request_id, *task, streams=True)
            while mine:
                with self._turn:
                    self._outbox += self._texts(self._free_loop().step())
                    chunks = loop.take_chunks(mine)
                for chunk in chunks:
                    if chunk.completion is not None:
                        mine.discard(chunk.request_id)
                    yield chunk
        finally:
            with self._turn:
                for request_id in mine:
                    loop.cancel(request_id)
                loop.take_chunks(mine)

    async def agenerate(
        self,
        prompts: Prompts,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> AsyncIterator[Chunk]:
        """Complete every prompt, yielding what each step adds to each, without blocking the event
        loop: `async for chunk in llm.agenerate(prompts): ...`, in a notebook too.

        Any number of coroutines may run at once and share the engine's steps; the other calls are
        refused meanwhile. The last chunk of a prompt carries its completion. Leaving early cancels
        what is unfinished. Arguments and errors as in `generate`.
        """
        self._open_loop()
        entries = split_prompts(prompts)
        tasks = _samples(entries, match_params(sampling_params, len(entries)))
        async with aclosing(self._driver.iterate(lambda: self._stream(tasks))) as chunks:
            async for chunk in chunks:
                yield chunk

    def stats(self) -> EngineStats:
        """Return what the engine has done and how it stands: queues, rates, times, caches."""
        with self._turn:
            return self._open_loop().report()

    def chat(
        self,
        messages: Sequence[MessageLike] | Sequence[Sequence[MessageLike]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Tool | Mapping[str, object]] = (),
        tool_choice: str = "auto",
        thinking: bool | None = None,
        effort: str | int | None = None,
        response_format: ResponseFormat | None = None,
        structured: Structured | Mapping[str, object] | None = None,
        progress: Callable[[Progress], None] | None = None,
    ) -> list[ChatCompletion]:
        """Answer a conversation, or several (a list of lists); one ChatCompletion each, in order.

        messages         Message objects or their protocol form, {"role": "user", "content": "Hi"}
        sampling_params  as in `generate`; None leaves the answer as much room as its mode needs
        thinking         whether the model thinks first; None does what it was trained for
        The other options are those of ChatOptions. A conversation that cannot be used has a result
        with `error` set. Raises RequestError when options or arguments do not fit together.
        """
        options = ChatOptions(
            thinking=self._thinks if thinking is None else thinking,
            effort=effort,
            tools=tools,
            tool_choice=tool_choice,
            response_format=response_format,
            structured=structured,
        )
        turns = make_turns(messages, sampling_params, options, self.tokenizer, self.max_model_len)
        return answer(turns, lambda ids, params: self.generate(ids, params, progress=progress))

    def stream_chat(
        self,
        messages: Sequence[MessageLike] | Sequence[Sequence[MessageLike]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        options: ChatOptions | None = None,
    ) -> Generator[ChatDelta]:
        """Answer as `chat` does, yielding what each step adds; the last delta carries the result.

        options  None does what the model was trained for

        Leaving the iterator early cancels what is unfinished.
        """
        options = options or ChatOptions(thinking=self._thinks)
        turns = make_turns(messages, sampling_params, options, self.tokenizer, self.max_model_len)
        return stream_answers(turns, self.stream)

    @property
    def _thinks(self) -> bool:
        return self.tokenizer is None or self.tokenizer.thinks

    def structured_report(self, structured: Structured | Mapping[str, object]) -> Report:
        """Say, keyword by keyword, what will be enforced of a shape before anything is generated.

        Raises RequestError when the shape cannot be used.
        """
        return self._shapes.report(Structured.of(structured))

    def submit(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> int:
        """Queue one prompt and return its request id.

        Its completion comes out of `step`, also when it cannot run.
        """
        self._open_loop()
        (params,) = match_params(sampling_params, 1)
        if params.n > 1:
            raise RequestError(
                f"submit takes one sample at a time, not n={params.n}: call it once for each, with "
                "a seed for each"
            )
        return self._submit(self._new_ids(1)[0], 0, prompt, params, streams=False)

    def snapshot(self, request_id: int) -> State:
        """Return a submitted request as it stands, to be saved or gone on with; it keeps running.

        What a step in flight brings is taken first. Raises RequestError when the request has ended,
        is unknown, or has logits processors.
        """
        with self._turn:
            return self._snapshot(request_id)

    def _snapshot(self, request_id: int) -> State:
        loop = self._open_loop()
        if isinstance(loop, GroupLoop) and (owner := loop.owner(request_id)) is not None:
            (state,) = loop.ask("snapshot", request_id, rank=owner)
            assert isinstance(state, State), state
            return state
        if self.rank == 0:
            self._free_loop()
        loop.flush()
        live = loop.scheduler.live(request_id)
        if live is None:
            raise RequestError(
                f"request {request_id} is not running: it has ended, or no call of submit or "
                "stream returned this id"
            )
        params = live.request.params
        if params.processor_factories:
            raise RequestError("a state cannot hold logits_processors: they are code, not data")
        num_computed, parts = 0, {}
        if live.saved is not None:
            num_computed, parts = live.saved.num_computed, dict(live.saved.parts)
        elif live.slot and live.num_computed:
            num_computed = live.num_computed
            parts = loop.executor.read_caches(live.slot, live.blocks, num_computed)
        return State(
            prompt_token_ids=live.request.prompt_token_ids,
            token_ids=tuple(live.token_ids[live.num_prompt_tokens :]),
            params=replace(params, n=1),
            seed=live.request.seed,
            num_computed=num_computed,
            logprobs=None if live.logprobs is None else tuple(live.logprobs),
            top_logprobs=None if live.top_logprobs is None else tuple(live.top_logprobs),
            prompt_logprobs=None if live.prompt_logprobs is None else tuple(live.prompt_logprobs),
            parts=parts,
            fingerprint=self.fingerprint,
        )

    def resume(self, state: State) -> int:
        """Go on with a request that `snapshot` took, here or elsewhere; return its request id.

        Its completion comes out of `step` and holds all tokens, those before the snapshot too. They
        are the ones that the uninterrupted request has. Raises StateError when weights, config or
        arithmetic differ, saying which, and RequestError when the state does not fit.
        """
        self._open_loop()
        if not isinstance(state, State):
            raise RequestError(f"resume takes a State, not {type(state).__name__}")
        problems = mismatches(state.fingerprint, self.fingerprint)
        if problems:
            raise StateError("the state does not belong to this engine", problems)
        problems = contradictions(state, self.model_config.vocab_size)
        if problems:
            raise StateError("the state contradicts itself", problems)
        shapes = live_shapes(self._layout, state.num_computed) if state.num_computed else {}
        found = {name: (str(part.dtype), part.shape) for name, part in state.parts.items()}
        fitting = {n: (str(kind).split(".")[-1], shape) for n, (kind, shape) in shapes.items()}
        if found != fitting:
            wrong = sorted(n for n in found.keys() | fitting if found.get(n) != fitting.get(n))
            raise StateError(
                f"the state's caches have not the shapes of this model: {', '.join(wrong)}"
            )
        if state.num_tokens > self.max_model_len:
            raise RequestError(
                f"the state has {state.num_tokens} tokens, the limit here is {self.max_model_len}: "
                "raise scheduling.max_model_len"
            )
        prompt = np.asarray(state.prompt_token_ids, dtype=np.int64)
        request_id = self._new_ids(1)[0]
        return self._submit(request_id, 0, prompt, state.params, streams=False, state=state)

    @cached_property
    def fingerprint(self) -> Mapping[str, str]:
        """What two engines must have in common to go on with each other's requests."""
        tokenizer = self.path / "tokenizer.json"
        return fingerprint(
            self.config,
            self.model_config,
            tokenizer=tokenizer.read_bytes() if tokenizer.is_file() else b"",
            weights=weights_digest(Checkpoint.open(self.path)),
            numerics=str(resolve_numerics(self.config.numerics, self.device.torch_device)),
            keep_tokens=keep_tokens(self.config, self.model_config),
        )

    def step(self) -> list[Completion]:
        """Run one step over everything submitted; return what has finished since the last call."""
        with self._turn:
            finished = self._texts(self._free_loop().step())
            finished, self._outbox = self._outbox + finished, []
            return finished

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to run or to return."""
        return self._loop is not None and (self._loop.has_work or bool(self._outbox))

    def cancel(self, request_id: int) -> bool:
        """End a submitted request with reason `abort`; return whether it was unfinished."""
        with self._turn:
            return self._open_loop().cancel(request_id)

    def close(self) -> None:
        """Drop unfinished requests, weights and caches; closing again does nothing."""
        if self._loop is None:
            return
        with self._turn:
            if self._loop is not None:
                self._free_loop()
            loop, self._loop = self._loop, None
        if loop is not None:
            self._driver.close()
            loop.stop()
            self._shapes.close()

    def __enter__(self) -> Self:
        """Return the engine itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the engine."""
        self.close()

    def _open_loop(self) -> EngineLoop:
        if self._loop is None:
            raise UnsupportedError("this LLM is closed: build a new one")
        return self._loop

    def _free_loop(self) -> EngineLoop:
        """Return the loop for a call that runs or ends it: not while `generate` waits on it."""
        loop = self._open_loop()
        if self._in_generate:
            raise UnsupportedError(
                "this LLM is inside generate: neither its progress callback nor another thread can "
                "run or close it; build a second LLM for that"
            )
        if self._driver.holds:
            raise UnsupportedError(
                "this LLM is serving agenerate: leave its iterators first, or build a second LLM"
            )
        return loop

    def _new_ids(self, count: int) -> range:
        with self._turn:
            self._next_id += count
            return range(self._next_id - count, self._next_id)

    def _submit(
        self,
        request_id: int,
        index: int,
        prompt: object,
        params: SamplingParams,
        sample_index: int = 0,
        *,
        streams: bool,
        state: State | None = None,
    ) -> int:
        loop = self._open_loop()
        encode = self.tokenizer.encode if self.tokenizer is not None else None
        ids = check_prompt(prompt, self.model_config.vocab_size, encode)
        problems = self._problems(params)
        if isinstance(ids, BadPrompt) or problems:
            errors = [ids.error, *problems] if isinstance(ids, BadPrompt) else problems
            completion = Completion(
                index=index,
                sample_index=sample_index,
                request_id=request_id,
                prompt_token_ids=ids.token_ids if isinstance(ids, BadPrompt) else ids,
                text=None if self.tokenizer is None else "",
                finish_reason=FinishReason.INVALID_REQUEST,
                error="; ".join(errors),
            )
            with self._turn:
                loop.reject(completion, streams)
            return request_id
        seed = secrets.randbits(64) if params.seed is None else params.seed
        request = Request(
            request_id=request_id,
            index=index,
            sample_index=sample_index,
            prompt_token_ids=ids,
            params=params,
            seed=seed if state is None else state.seed,
            streams=streams,
            arrival_s=loop.now_s(),
        )
        with self._turn:
            loop = self._open_loop()
            if not streams:
                self._live[request_id] = params
            if isinstance(loop, GroupLoop):
                loop.place(request, state)
            else:
                self._enter(request, state)
        return request_id

    def _enter(self, request: Request, state: State | None) -> None:
        """Hand a request to this rank's scheduler, with what follows its text and its shape."""
        params, text = request.params, None
        shape = self._shapes.resolve(params)
        follows = params.stop_strings or request.streams or shape is not None
        if self.tokenizer is not None and follows:
            text = TextStream(
                self.tokenizer.stream(), params.stop_strings, params.min_tokens, params.stop_after
            )
            for token_id in () if state is None else state.token_ids:
                text.push(token_id)
        gate: Gate | None = None if shape is None else self._shapes.gate(shape, params)
        if gate is not None and state is not None:
            gate = ResumedGate(gate, state.token_ids)
        self._open_loop().submit(request, text, gate, state)

    def _problems(self, params: SamplingParams) -> list[str]:
        """Return what this model cannot do of a request's parameters."""
        vocab_size = self.model_config.vocab_size
        problems = params.ids_out_of(vocab_size)
        try:
            self._shapes.resolve(params)
        except RequestError as error:
            problems.append(str(error))
        if params.prompt_logprobs and self.config.replay.mode != "off":
            problems.append(
                "prompt_logprobs cannot be had under bounded replay, which computes the last "
                "tokens of a prompt only: leave them away, or set replay.mode to off"
            )
        if params.stop_strings and self.tokenizer is None:
            problems.append("stop strings need the checkpoint's tokenizer.json: use stop_token_ids")
        never = set(self.config.sampling.banned_token_ids)
        if params.min_tokens:
            never |= {*params.stop_ids, self.model_config.eos_token_id}
        if len(never) >= vocab_size:
            problems.append("banned ids and stop ids leave no token that may be generated")
        return problems

    def _texts(self, completions: Sequence[Completion]) -> list[Completion]:
        """Decode the completions whose text was not followed while they ran."""
        told = []
        for completion in completions:
            params = self._live.pop(completion.request_id, None)
            if completion.text is None and self.tokenizer is not None:
                ids = completion.token_ids
                if completion.finish_reason is FinishReason.STOP and params is not None:
                    ids = ids[:-1]  # without a TextStream only an id can have ended it
                completion = replace(completion, text=self.tokenizer.decode(ids) if ids else "")
            told.append(completion)
        return told

    def _collect(
        self, completions: Sequence[Completion], ids: range, done: dict[int, Completion]
    ) -> None:
        """Keep what belongs to the call that named these ids; the rest waits for `step`."""
        for completion in self._texts(completions):
            if completion.request_id in ids:
                done[completion.request_id] = completion
            else:
                self._outbox.append(completion)

    def _tell(self, progress: Callable[[Progress], None], state: Progress) -> None:
        try:
            progress(state)
        except Exception:
            _log.exception("the progress callback failed")

    def _never_started(self, index: int, sample_index: int) -> Completion:
        return Completion(
            index=index,
            sample_index=sample_index,
            request_id=-1,
            prompt_token_ids=(),
            text=None if self.tokenizer is None else "",
            finish_reason=FinishReason.ABORT,
        )
