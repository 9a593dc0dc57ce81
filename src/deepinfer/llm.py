"""LLM: the public engine. Joins the parts that `assembly` builds and turns calls into requests.

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

from deepinfer.assembly import (
    Blueprint,
    build_parts,
    check_settings,
    make_scheduler,
    set_cpu_threads,
)
from deepinfer.cache.live import live_shapes
from deepinfer.chat.messages import MessageLike, ResponseFormat, Tool
from deepinfer.chat.tokenizer import Tokenizer
from deepinfer.cluster.launch import Membership, Started, join, rank_device
from deepinfer.cluster.loop import GroupLoop, Hooks
from deepinfer.config.engine import EngineConfig
from deepinfer.config.load import load_engine_config, load_model_config, resolve_model
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
from deepinfer.engine.commit import Gate
from deepinfer.engine.device_runner import DeviceRunner
from deepinfer.engine.driver import EngineDriver
from deepinfer.engine.effective import overlaps
from deepinfer.engine.executor import Executor, InProcessExecutor
from deepinfer.engine.loop import EngineLoop, interrupt_after
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
from deepinfer.engine.shapes import Shapes
from deepinfer.engine.snapshot import ResumedGate, State, contradictions, fingerprint, mismatches
from deepinfer.engine.stats import EngineStats
from deepinfer.engine.text import TextStream
from deepinfer.engine.turn import Turn
from deepinfer.errors import (
    ConfigError,
    RequestError,
    StateError,
    UnsupportedError,
)
from deepinfer.grammar.report import Report
from deepinfer.grammar.spec import Structured
from deepinfer.model.fast.model import resolve_numerics
from deepinfer.parallel.live import LiveBalancer
from deepinfer.sampling.noise import derive_seed
from deepinfer.weights.fingerprint import weights_digest
from deepinfer.weights.reader import Checkpoint

__all__ = ["LLM", "Interrupted", "Progress"]

_log = logging.getLogger(__name__)


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
        check_settings(self.config, self.model_config)
        if mesh.world > 1:
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
        member = self._member
        blueprint = Blueprint(self.config, self.model_config, self.path, self.device, member)
        parts = build_parts(blueprint)
        self.sizes, self.planner, self._layout = parts.sizes, parts.planner, parts.layout
        self._balancer, runner = parts.balancer, parts.runner
        queue = ThreadQueue() if self.overlaps else InlineQueue()
        queue.submit(self.device.bind_thread)
        if isinstance(runner, DeviceRunner) and member is None:
            queue.submit(runner.prepare).wait()
        self._start(InProcessExecutor(runner, queue))

    def _experts(self) -> dict[str, object]:
        """Return where experts are and what has moved, nothing where they stay."""
        return {} if self._balancer is None else self._balancer.summary()

    def _start(self, executor: Executor) -> None:
        """Join scheduler and executor; nothing above the executor knows what runs the steps."""
        config = self.config
        scheduler = make_scheduler(config, self.model_config, self.sizes, self.planner)
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
