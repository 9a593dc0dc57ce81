"""The step loop of one rank among several: words, messages, an agreed kind, then a step.

Every rank runs the same calls in the same order. Rank 0's are driven by its caller; the others
`serve`, waiting in the all-gather of the next words. Whether a message is broadcast, a vote held or
a step run follows from words that all have seen, never from what one rank alone holds.

Source: parallelism specification, 1.1 to 1.4.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

import torch

from deepinfer.cluster.launch import Membership
from deepinfer.device.queue import no_wait
from deepinfer.engine.executor import Executor, StepFailed
from deepinfer.engine.loop import EngineLoop, interrupt_after
from deepinfer.engine.plan import StepKind, StepPlan, Together
from deepinfer.engine.request import Completion, Request
from deepinfer.engine.scheduler import Scheduler
from deepinfer.engine.snapshot import State
from deepinfer.engine.stats import EngineStats
from deepinfer.errors import RankError, UnsupportedError
from deepinfer.parallel.comm import GroupBroken
from deepinfer.parallel.place import Placer
from deepinfer.parallel.votes import Flag, Word, agree

__all__ = ["GroupLoop", "Hooks"]

_PAUSE_S: Final = 0.0005
_BLAME_S: Final = 5.0  # how long a broken collective waits to hear who broke it
_AHEAD: Final = 4  # a replica queues this share of its slots beyond those

Message = tuple[Any, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Hooks:
    """What the loop asks of the engine around it.

    enter     hand a placed request to this rank's own scheduler
    snapshot  a request of this rank as a State
    experts   what has moved on this rank
    """

    enter: Callable[[Request, State | None], None]
    snapshot: Callable[[int], State]
    experts: Callable[[], dict[str, object]]


@dataclass(slots=True)
class _Waiting:
    request: Request
    state: State | None


class GroupLoop(EngineLoop):
    """One rank's loop. See EngineLoop for what its callers see; rank 0 has all completions.

    num_drafts  a slot's most, and with it the rows of a decode step
    placement   `work` or `fixed`
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        member: Membership,
        hooks: Hooks,
        *,
        num_drafts: int = 0,
        placement: Literal["work", "fixed"] = "work",
        clock: Callable[[], float] = time.perf_counter,
        overlap: bool = False,
        log_interval_steps: int = 0,
    ) -> None:
        super().__init__(scheduler, executor, clock, overlap, log_interval_steps)
        self.member = member
        self.ranks = member.ranks
        self._hooks = hooks
        self._num_drafts = num_drafts
        self._step = 0
        self._stopped = False
        self._failed: RankError | None = None
        self._outbox: list[Message] = []
        self._answer: dict[str, list[Any]] = {}
        self._replies: dict[int, Any] = {}
        self._ended: list[object] = []
        self._words: list[Word] = []
        self._proposes = True
        mesh = self.ranks.mesh
        self._owners = [rank for rank in range(mesh.world) if mesh.context_rank(rank) == 0]
        self._placer = Placer(len(self._owners), placement == "fixed")
        self._waiting: dict[int, _Waiting] = {}
        self._remote: dict[int, int] = {}  # request -> its rank
        self._lost: set[int] = set()  # cancelled, their completions are under way
        self.member.watch.rest()

    @property
    def has_work(self) -> bool:
        """Whether a call of `step` would run or return anything."""
        return super().has_work or bool(self._waiting) or bool(self._remote)

    @property
    def num_generated(self) -> int:
        """Tokens generated so far, by all ranks as far as they have told."""
        others = sum(word.generated for word in self._words[1:])
        return self.scheduler.num_generated + others

    def place(self, request: Request, state: State | None = None) -> None:
        """Take a request of rank 0's caller, for whichever replica is to serve it."""
        self._check()
        if request.params.processor_factories and not _travels(request):
            self._hooks.enter(request, state)  # code that cannot travel stays here
            return
        self._waiting[request.request_id] = _Waiting(request, state)
        prompt = len(request.prompt_token_ids)
        self._placer.add(request.request_id, prompt, request.params.max_tokens)

    def cancel(self, request_id: int) -> bool:
        """End a request wherever it is; return whether it was live."""
        entry = self._waiting.pop(request_id, None)
        if entry is not None:
            self._placer.drop(request_id)
            self._hooks.enter(entry.request, entry.state)
            return super().cancel(request_id)
        if request_id in self._remote and request_id not in self._lost:
            if self._failed is None:
                self._outbox.append(("cancel", self._remote[request_id], request_id))
                self._lost.add(request_id)
            return True
        return super().cancel(request_id)

    def step(self) -> list[Completion]:
        """Run one step of all ranks and return every completion since the last call.

        Raises RankError when a rank is gone, hangs or has failed; nothing can run after that.
        """
        self._check()
        with interrupt_after():
            try:
                self._advance()
            except StepFailed as error:
                if self.ranks.in_step:
                    raise self._fail(error) from error
                self._give_up(error)
            except GroupBroken as error:
                raise self._fail(error) from error
            except BaseException as error:
                self._fail(error)
                raise
        return self.take_finished()

    def flush(self) -> None:
        """Apply this rank's steps in flight."""
        if self._failed is None:
            try:
                with interrupt_after():
                    while self._launched:
                        self._apply_first()
            except StepFailed as error:
                raise self._fail(error) from error

    def take_finished(self) -> list[Completion]:
        """Return the completions that no call of `step` has returned, also those of requests that
        were cancelled on other ranks.
        """
        if self._lost and self._failed is None:
            try:
                with interrupt_after():
                    for _ in range(2):
                        self._talk(Flag.TALK)
            except GroupBroken as error:
                raise self._fail(error) from error
        return super().take_finished()

    def report(self) -> EngineStats:
        """Return what all ranks together have done and how they stand."""
        own = super().report()
        if not self.ranks.leads or self._failed is not None or self._stopped:
            return own
        return _merge([own, *self.ask("report")])

    def ask(self, what: str, *args: Any, rank: int | None = None) -> list[Any]:
        """Ask all other ranks, or one, between two steps; return their replies in order."""
        self._check()
        self._replies.clear()
        self._outbox.append(("ask", rank, what, args))
        with interrupt_after():
            try:
                for _ in range(2):
                    self._talk(Flag.TALK)
            except GroupBroken as error:
                raise self._fail(error) from error
        found = [self._replies[r] for r in sorted(self._replies)]
        for reply in found:
            if isinstance(reply, Exception):
                raise reply
        return found

    def owner(self, request_id: int) -> int | None:
        """Return the rank that serves a request of another rank, None for those of this one."""
        return self._remote.get(request_id)

    def finish_call(self, payload: object) -> None:
        """Let the other ranks return from the call that all of them make, with its result."""
        self._check()
        self._outbox.append(("finish", payload))
        try:
            self._talk(Flag.TALK)
        except GroupBroken as error:
            raise self._fail(error) from error

    def serve(self) -> object | None:
        """Step with rank 0 until it ends a call (returns its result) or stops (returns None)."""
        assert not self.ranks.leads, "rank 0 is driven by its caller"
        self._check()
        try:
            while not self._stopped:
                self._advance()
                if self._ended:
                    return self._ended.pop(0)
            return None
        except (StepFailed, GroupBroken) as error:
            raise self._fail(error) from error
        except BaseException as error:
            self._fail(error)
            raise

    @property
    def is_stopped(self) -> bool:
        """Whether rank 0 has ended the engine."""
        return self._stopped

    def stop(self) -> None:
        """End all ranks, give up what is in flight, stop the executor."""
        orderly = self._failed is None
        if orderly and self.ranks.leads and not self._stopped:
            try:
                self._talk(Flag.STOP)
            except GroupBroken as error:
                self._fail(error)
                orderly = False
        elif orderly and not self._stopped:
            try:
                while not self._stopped:  # rank 0 may still need this rank
                    self.serve()
            except RankError:
                orderly = False
        super().stop()
        self.member.end(orderly)

    def _check(self) -> None:
        if self._failed is not None:
            raise self._failed
        if self._stopped:
            raise UnsupportedError("rank 0 has ended this engine: build a new one on every rank")

    def _fail(self, error: BaseException) -> RankError:
        """End everything; return what callers are told."""
        if self._failed is not None:
            return self._failed
        watch, rank, world = self.member.watch, self.ranks.rank, self.ranks.world.size
        broken = _broken(error)
        blamed = watch.failure if broken is None else watch.wait(_BLAME_S)
        if blamed is not None:
            told = blamed
        elif broken is not None:
            told = f"rank {rank} of {world} lost another in step {self._step}: {broken.message}"
        else:
            step = f"in step {self._step}" if self._step else "before its first step"
            told = f"rank {rank} of {world} failed {step}: {type(error).__name__}: {error}"
        self._failed = RankError(f"{told}; the engine has ended, and what has finished stands")
        for _, handle in self._launched:
            handle.give_up()
        self._launched.clear()
        watch.report(told)
        watch.take()
        self.ranks.abort()
        return self._failed

    def _advance(self) -> None:
        """Exchange words; run a step if they say so."""
        begin_s = self._clock()
        if self.ranks.leads:
            self._place()
        words = self._talk()
        told = words[0].flags
        if self._stopped or Flag.TALK in told:
            return
        if not self.ranks.in_step:
            self._step += 1
            self.member.watch.enter(self._step, "any")
            if self.scheduler.has_work or self._launched:
                super()._advance()
            else:
                time.sleep(_PAUSE_S)
            self.member.watch.rest()
            return
        self._step_together(words, begin_s)
        self.member.watch.rest()

    def _step_together(self, words: list[Word], begin_s: float) -> None:
        """Run the step that the words ask for."""
        kind = agree(words)
        self._step += kind is not None
        self.member.watch.enter(self._step, kind or "none")
        wanted = StepKind.PREFILL if kind == "prefill" else StepKind.DECODE
        plan = self.scheduler.schedule(begin_s, wanted)  # deadlines and gates pass here, always
        self._take(self.scheduler.take_completions())
        if kind is None:
            while self._launched:
                self._apply_first()
            time.sleep(_PAUSE_S)  # only requests that wait for their grammar are left
            return
        sequences = max(word.sequences for word in words)
        rows = sequences * (1 + self._num_drafts)
        if wanted is StepKind.PREFILL:
            most = self._vote(plan)
            if most is None:
                wanted = StepKind.DECODE
                plan = self.scheduler.schedule(begin_s, wanted)
                self._take(self.scheduler.take_completions())
            else:
                rows, sequences = most
                plan = self._share_plan(plan)
        proposes = any(Flag.PROPOSE in word.flags for word in words)
        if plan is not None:
            self._proposes = plan.propose
        together = Together(rows, sequences, proposes)
        plan = plan or StepPlan(-1, wanted, ())
        plan = replace(plan, together=together, propose=proposes)
        with no_wait():
            handle = self._executor.launch(plan)
        self._launched.append((plan, handle))
        if plan.rows and self.ranks.schedules:
            self.stats.launched(plan, self._clock() - begin_s)
        if self.overlap:
            while len(self._launched) > 1:
                self._apply_first()
        if plan.needs_masks:
            handle.provide_masks(self.scheduler.fill_masks(plan))
        if not self.overlap:
            self._apply_first()

    def _vote(self, plan: StepPlan | None) -> tuple[int, int] | None:
        """Return the most rows, and the most of them that draw, in a prefill step of any rank; None
        when no rank has a plan.
        """
        drawing = 0 if plan is None else sum(row.samples for row in plan.rows)
        rows = 0 if plan is None else plan.num_tokens
        own = torch.tensor([plan is not None, rows, drawing], dtype=torch.int64)
        found, most_rows, most_drawing = self.ranks.world.all_gather(own).amax(0).tolist()
        return (most_rows, most_drawing) if found else None

    def _share_plan(self, plan: StepPlan | None) -> StepPlan | None:
        """Return the prefill plan of this replica: of its first rank, which alone has requests."""
        group = self.ranks.context_control
        if group.size == 1:
            return plan
        data = pickle.dumps(_bare(plan)) if self.ranks.schedules else b""
        size = group.broadcast(torch.tensor([len(data)]))
        shared = group.share_bytes(data if self.ranks.schedules else None, int(size))
        if self.ranks.schedules:
            return plan
        followed: StepPlan | None = pickle.loads(shared)
        return followed

    def _apply_first(self) -> None:
        """Apply the oldest step in flight; those of other ranks bring nothing."""
        plan, handle = self._launched[0]
        if plan.rows and self.ranks.schedules:
            super()._apply_first()
            return
        handle.result()
        self._launched.popleft()

    def _talk(self, asked: Flag | None = None) -> list[Word]:
        """Exchange words, then the messages and answers that they announce."""
        world, leads = self.ranks.world, self.ranks.leads
        content: object = self._outbox if leads else self._answers()
        data = pickle.dumps(content) if content else b""
        word = self._word(len(data), asked)
        gathered = world.all_gather(torch.from_numpy(word.pack())).numpy()
        words = self._words = [Word.unpack(row) for row in gathered]
        if words[0].message:
            shared = world.share_bytes(data if leads else None, words[0].message)
            self._outbox = []
            if not leads:
                for message in pickle.loads(shared):
                    self._hear(message)
        for rank, other in enumerate(words):
            if rank == 0 or not other.message:
                continue
            if leads:
                buffer = torch.empty(other.message, dtype=torch.uint8)
                world.receive(buffer, rank).wait()
                self._collect(rank, pickle.loads(bytes(buffer.numpy().data)))
            elif rank == self.ranks.rank:
                world.send(torch.frombuffer(bytearray(data), dtype=torch.uint8), 0).wait()
        if Flag.STOP in words[0].flags:
            self._stopped = True
        return words

    def _word(self, message: int, asked: Flag | None) -> Word:
        scheduler = self.scheduler
        flags = asked or Flag(0)
        if self.ranks.schedules:
            flags |= Flag.PREFILL if scheduler.wants_prefill else Flag(0)
            flags |= Flag.DECODE if scheduler.can_decode else Flag(0)
        if self._num_drafts and self._proposes:
            flags |= Flag.PROPOSE
        most = scheduler.limits.max_num_seqs
        held = scheduler.num_running + scheduler.num_waiting
        return Word(
            flags=flags,
            waited=scheduler.prefill_wait_steps,
            sequences=scheduler.num_running,
            room=max(0, most + max(1, most // _AHEAD) - held),
            blocks=scheduler.num_blocks - scheduler.num_blocks_used,
            message=message,
            generated=scheduler.num_generated,
        )

    def _place(self) -> None:
        """Hand waiting requests to replicas with room."""
        if not self._waiting:
            return
        most = self.scheduler.limits.max_num_seqs
        most += max(1, most // _AHEAD)
        held = [0] * len(self._owners)
        for rank in self._remote.values():
            held[self._owners.index(rank)] += 1
        held[0] += self.scheduler.num_running + self.scheduler.num_waiting
        now_s = self._clock()
        for key, replica in self._placer.place([max(0, most - count) for count in held]):
            assert isinstance(key, int), key
            entry, rank = self._waiting.pop(key), self._owners[replica]
            if rank == self.ranks.rank:
                self._hooks.enter(entry.request, entry.state)
            else:
                self._remote[key] = rank
                self._outbox.append(("submit", rank, entry.request, entry.state, now_s))

    def _hear(self, message: Message) -> None:
        """Take a message of rank 0."""
        kind, rank = message[0], message[1]
        if kind == "finish":
            self._ended.append(message[1])
            return
        if rank is not None and rank != self.ranks.rank:
            return
        if kind == "submit":
            _, _, request, state, sent_s = message
            late_s = sent_s - request.arrival_s  # clocks of hosts differ
            request = replace(request, arrival_s=self._clock() - late_s)
            self._hooks.enter(request, state)
        elif kind == "cancel":
            super().cancel(message[2])
        else:
            self._answer.setdefault("replies", []).append(self._reply(message[2], message[3]))

    def _reply(self, what: str, args: tuple[Any, ...]) -> object:
        try:
            if what == "report":
                return super().report()
            if what == "snapshot":
                return self._hooks.snapshot(*args)
            if what == "collectives":
                return self.ranks.counts()
            if what == "experts":
                return self._hooks.experts()
        except Exception as error:
            return error
        return UnsupportedError(f"ranks know no question {what!r}")

    def _answers(self) -> dict[str, list[Any]]:
        """Return what rank 0 is to be told."""
        answer, self._answer = self._answer, {}
        finished = EngineLoop.take_finished(self)
        if finished:
            answer["finished"] = finished
        chunks, self._chunks = self._chunks + self.scheduler.take_chunks(), []
        if chunks:
            answer["chunks"] = chunks
        return answer

    def _collect(self, rank: int, answer: dict[str, list[Any]]) -> None:
        """Take another rank's answer."""
        for completion in answer.get("finished", ()):
            self._settle(completion)
            self._finished.append(completion)
        for chunk in answer.get("chunks", ()):
            if chunk.completion is not None:
                self._settle(chunk.completion)
            self._chunks.append(chunk)
        for reply in answer.get("replies", ()):
            self._replies[rank] = reply

    def _settle(self, completion: Completion) -> None:
        self._remote.pop(completion.request_id, None)
        self._lost.discard(completion.request_id)
        self._placer.finish(completion.request_id, len(completion.token_ids))

    def _take(self, completions: list[Completion]) -> None:
        super()._take(completions)
        for completion in completions:
            self._placer.finish(completion.request_id, len(completion.token_ids))


def _broken(error: BaseException | None) -> GroupBroken | None:
    """Return the broken collective behind an error."""
    while error is not None and not isinstance(error, GroupBroken):
        error = error.__cause__
    return error


def _bare(plan: StepPlan | None) -> StepPlan | None:
    """Return a plan as ranks without a draw need it: code of callers and masks stay here."""
    if plan is None:
        return None
    admissions = tuple(
        replace(each, params=replace(each.params, logits_processors=())) for each in plan.admissions
    )
    return replace(plan, admissions=admissions, needs_masks=False)


def _travels(request: Request) -> bool:
    try:
        pickle.dumps(request.params.processor_factories)
    except Exception:
        return False
    return True


def _merge(reports: list[EngineStats]) -> EngineStats:
    """Add what ranks have done; times and shares are means over those that ran."""
    first = reports[0]
    summed = (
        "num_waiting", "num_running", "num_prompt_tokens", "num_generated_tokens",
        "num_preemptions", "num_failed_steps", "blocks_used", "num_blocks", "tokens_per_s",
        "prompt_tokens_per_s", "rows_per_step", "num_proposed_drafts", "num_verified_drafts",
        "num_accepted_drafts",
    )  # fmt: skip
    values: dict[str, Any] = {name: sum(getattr(r, name) for r in reports) for name in summed}
    for name in ("num_steps", "num_prefill_steps", "num_decode_steps", "ttft_max_s"):
        values[name] = max(getattr(r, name) for r in reports)
    for name in ("host_s", "device_s", "device_busy", "ttft_mean_s"):
        ran = [getattr(r, name) for r in reports if r.num_steps]
        values[name] = sum(ran) / len(ran) if ran else 0.0
    reasons: dict[str, int] = {}
    for report in reports:
        for reason, count in report.num_finished.items():
            reasons[reason] = reasons.get(reason, 0) + count
    return replace(first, num_finished=reasons, **values)
