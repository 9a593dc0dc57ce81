"""Whether an output depends on anything but its own request: the same requests, run in many ways.

Every way must give the tokens and log-probabilities of the plain run, bit for bit. Behind
`deepinfer check determinism`; source: runtime specification, 6.
"""

from __future__ import annotations

import hashlib
import json
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from deepinfer.config.model import ModelConfig
from deepinfer.engine.costs import CostCurve
from deepinfer.engine.request import Completion, SamplingParams
from deepinfer.errors import ConfigError, DeepInferError
from deepinfer.llm import LLM

__all__ = ["Case", "Verdict", "Way", "cases_for", "check", "child", "compare", "ways_for"]

Outcome = tuple[object, ...]
"""Tokens, log-probabilities, alternatives and finish reason of one request."""

Settings = Mapping[str, object]

_BATCH: Final = 64
_PREEMPT_EVERY: Final = 3
# Made up so that the number of verified drafts changes all the time.
_COSTS: Final = CostCurve((1, 6, 24, 96, 400), (1.0, 1.05, 1.6, 4.0, 16.0), (1, 64), (0.01, 0.1))


@dataclass(frozen=True, slots=True)
class Case:
    """One request whose output must not change."""

    prompt: tuple[int, ...]
    params: SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One way to run all requests.

    settings    engine settings that differ from the plain run
    group       requests in flight at once; None = all
    companions  other requests, with other seeds, beside them
    order       which request is submitted when; None = as they are
    stagger     steps between two submissions
    preempt     put a running request back every few steps
    twice       run two times in one engine and look at the second (prefixes are then cached)
    made_costs  choose verified rows by made-up costs
    processes   run in so many new processes instead
    """

    name: str
    settings: Settings = field(default_factory=dict)
    group: int | None = None
    companions: int = 0
    order: tuple[int, ...] | None = None
    stagger: int = 0
    preempt: bool = False
    twice: bool = False
    made_costs: bool = False
    processes: int = 0


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one way gave; `difference` is None when all was equal."""

    name: str
    difference: str | None
    seconds: float
    note: str = ""


def cases_for(model: ModelConfig, most_len: int, quick: bool) -> list[Case]:
    """Return requests of many lengths and parameters, the same for the same model.

    most_len  positions that a request may take
    """
    rng = random.Random(20)
    tokens = 10 if quick else 32
    window = model.sliding_window
    lengths = [1, window // 2, 7, window + 33, 3, window - 1]
    if not quick:
        lengths += [window, 2 * window + 5, window + 1]
        lengths += [rng.randrange(1, 3 * window) for _ in range(_BATCH - len(lengths))]
    first = max(3, model.pad_token_id + 1) % model.vocab_size
    shared = [rng.randrange(first, model.vocab_size) for _ in range(3 * window)]
    kinds = (
        SamplingParams(temperature=0.0, top_logprobs=3),
        SamplingParams(temperature=1.0, seed=11, logprobs=True),
        SamplingParams(temperature=0.7, seed=12, top_p=0.9, top_k=40, top_logprobs=2),
        SamplingParams(temperature=1.3, seed=13, min_tokens=5, logprobs=True),
    )
    cases = []
    for idx, wanted in enumerate(lengths):
        length = max(1, min(wanted, most_len - tokens))
        # Every other prompt begins like the others, so that there are prefixes to share.
        begin = shared[: length // 2 * (idx % 2)]
        rest = [rng.randrange(first, model.vocab_size) for _ in range(length - len(begin))]
        kind = kinds[idx % len(kinds)]
        seed = None if kind.is_greedy else 1000 + idx
        cases.append(
            Case((*begin, *rest), replace(kind, max_tokens=tokens, seed=seed, ignore_eos=True))
        )
    return cases


def ways_for(model: ModelConfig, num_cases: int, quick: bool) -> list[Way]:
    """Return the ways to run them, each with a name that a report can print."""
    rng = random.Random(21)
    shuffled = list(range(num_cases))
    rng.shuffle(shuffled)
    ways = [Way(name="again")]
    sizes = (1, 4) if quick else (1, 2, 3, 4, 7, 8, 15, 16, 31, 32, 33, 63)
    ways += [Way(name=f"batches of {size}", group=size) for size in sizes]
    ways += [
        Way(
            name=f"a batch of {_BATCH} with others", companions=_BATCH - min(num_cases, _BATCH // 2)
        ),
        Way(name="submitted backwards", order=tuple(reversed(range(num_cases)))),
        Way(name="submitted in another order", order=tuple(shuffled)),
        Way(name="arriving one after the other", stagger=2),
        Way(name="put back by force", preempt=True),
        Way(name="overlap on", settings={"scheduling.overlap": True}),
        Way(name="overlap off", settings={"scheduling.overlap": False}),
        Way(name="prefix cache, second run", settings={"cache.prefix": True}, twice=True),
    ]
    for chunk in (32, 96) if quick else (16, 32, 48, 96, 160, 256):
        settings = {"scheduling.chunk_size": chunk}
        ways.append(Way(name=f"chunks of {chunk}", settings=settings, companions=2))
    for threads in (1, 2):
        settings = {"parallel.cpu_threads": threads}
        ways.append(Way(name=f"{threads} threads", settings=settings))
    most = model.dspark_block_size if model.num_nextn_predict_layers else 0
    for count in sorted({1, 3, most} if quick else set(range(1, most + 1))):
        if 0 < count <= most:
            ways += _draft_ways(count, quick and count < most)
    ways.append(Way(name="a new process", processes=1 if quick else 3))
    if most:
        settings = {"speculation.num_drafts": most}
        ways.append(Way(name=f"a new process, {most} drafts", settings=settings, processes=1))
    return ways


def _draft_ways(count: int, few: bool) -> Iterator[Way]:
    fixed: dict[str, object] = {"speculation.num_drafts": count}
    variable = {**fixed, "speculation.variable": True}
    yield Way(name=f"{count} drafts", settings=fixed)
    if few:
        return
    name = f"{count} drafts, chosen by confidence"
    yield Way(name=name, settings=variable, made_costs=True)
    yield Way(name=f"{name}, with others", settings=variable, made_costs=True, companions=24)
    for on in (True, False):
        yield Way(
            name=f"{name}, overlap {'on' if on else 'off'}",
            settings={**variable, "scheduling.overlap": on},
            made_costs=True,
        )
    yield Way(name=f"{name}, put back", settings=variable, made_costs=True, preempt=True)
    yield Way(
        name=f"{count} drafts, chunks of 32, prefix cache",
        settings={**fixed, "scheduling.chunk_size": 32, "cache.prefix": True},
        twice=True,
    )


def compare(expected: Sequence[Outcome], got: Sequence[Outcome]) -> str | None:
    """Say where two runs first differ, None when they do not."""
    names = ("tokens", "log-probabilities", "alternatives", "finish reason")
    for idx, (one, two) in enumerate(zip(expected, got, strict=True)):
        for name, a, b in zip(names, one, two, strict=True):
            if a == b:
                continue
            if isinstance(a, Sequence) and isinstance(b, Sequence) and not isinstance(a, str):
                pairs = enumerate(zip(a, b, strict=False))
                place = next((p for p, (x, y) in pairs if x != y), min(len(a), len(b)))
                found = [v[place] if place < len(v) else "nothing" for v in (a, b)]
                return f"request {idx}, output {place}: {name} {found[0]} became {found[1]}"
            return f"request {idx}: {name} {a} became {b}"
    return None


def check(
    model: str,
    device: str,
    settings: Settings,
    quick: bool,
    told: Callable[[Verdict], None] = lambda _: None,
) -> list[Verdict]:
    """Run every way and compare it with the plain run.

    settings  engine settings of all runs, as dotted keys
    told      called with each verdict as soon as it is known
    Raises what LLM raises for settings that cannot run at all.
    """
    base: dict[str, object] = {"scheduling.max_num_seqs": _BATCH, **settings}
    begin = time.perf_counter()
    with LLM(model, device, base) as llm:
        config = llm.model_config
        cases = cases_for(config, llm.max_model_len, quick)
        expected = _run(llm, cases, Way(name="plain"))
    problem = next((str(o[3]) for o in expected if not o[0]), None)
    verdicts = [Verdict("the plain run", problem, time.perf_counter() - begin)]
    told(verdicts[0])
    for way in ways_for(config, len(cases), quick):
        begin = time.perf_counter()
        note = ""
        try:
            if way.processes:
                difference = _in_processes(model, device, base, quick, way, expected)
            else:
                with LLM(model, device, {**base, **way.settings}) as llm:
                    difference = compare(expected, _run(llm, cases, way))
                    note = _effect(llm)
        except DeepInferError as error:  # one way that cannot run does not hide the others
            difference = f"cannot run: {error}"
        verdicts.append(Verdict(way.name, difference, time.perf_counter() - begin, note))
        told(verdicts[-1])
    return verdicts


def child() -> None:
    """Run the requests as stdin says and print a digest of what came out: the other processes."""
    order = json.load(sys.stdin)
    with LLM(order["model"], order["device"], order["settings"]) as llm:
        cases = cases_for(llm.model_config, llm.max_model_len, order["quick"])
        print(json.dumps([_digest(outcome) for outcome in _run(llm, cases, Way(name="child"))]))


def _digest(outcome: Outcome) -> str:
    """Return a short name of one outcome; floats are spelled exactly."""
    return hashlib.blake2b(repr(outcome).encode(), digest_size=12).hexdigest()


def _in_processes(
    model: str,
    device: str,
    base: Settings,
    quick: bool,
    way: Way,
    expected: Sequence[Outcome],
) -> str | None:
    order = {"model": model, "device": device, "settings": {**base, **way.settings}, "quick": quick}
    code = "from deepinfer.bench.determinism import child; child()"
    for _ in range(way.processes):  # each has its own hash seed
        done = subprocess.run(
            [sys.executable, "-c", code],
            input=json.dumps(order),
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise ConfigError(f"the other process failed: {done.stderr.strip()[-500:]}")
        found = json.loads(done.stdout)
        for idx, outcome in enumerate(expected):
            if found[idx] != _digest(outcome):
                return f"request {idx} is different in another process"
    return None


def _effect(llm: LLM) -> str:
    """Say what shows that a way did what its name says."""
    stats = llm.stats()
    parts = []
    if stats.num_preemptions:
        parts.append(f"{stats.num_preemptions} put back")
    if stats.num_verified_drafts:
        parts.append(f"{stats.num_accepted_drafts} of {stats.num_verified_drafts} drafts accepted")
    return ", ".join(parts)


def _run(llm: LLM, cases: Sequence[Case], way: Way) -> list[Outcome]:
    """Run all requests one way; outcomes come in the order of the cases."""
    planner = llm.planner
    if way.made_costs and planner is not None:
        planner.curve = _COSTS
    for _ in range(2 if way.twice else 1):
        order = list(way.order or range(len(cases)))
        size = way.group or len(order)
        found: dict[int, Completion] = {}
        for begin in range(0, len(order), size):
            found |= _run_together(llm, cases, order[begin : begin + size], way)
    return [
        (r.token_ids, r.logprobs, r.top_logprobs, r.error or str(r.finish_reason))
        for _, r in sorted(found.items())
    ]


def _run_together(
    llm: LLM, cases: Sequence[Case], order: Sequence[int], way: Way
) -> dict[int, Completion]:
    """Run some of the requests and their companions; return case -> completion."""
    rng = random.Random(22)
    loop = llm._open_loop()  # the hook that puts requests back is no part of the interface
    vocab_size = llm.model_config.vocab_size
    for number in range(way.companions):
        prompt = [rng.randrange(vocab_size) for _ in range(rng.randrange(1, 24))]
        seed = 5000 + number
        llm.submit(prompt, SamplingParams(max_tokens=rng.randrange(2, 14), seed=seed))
    left = list(order)
    running: dict[int, int] = {}
    done: dict[int, Completion] = {}
    step = 0
    while left or llm.has_work:
        while left and (not way.stagger or step % way.stagger == 0):
            case = left.pop(0)
            running[llm.submit(list(cases[case].prompt), cases[case].params)] = case
            if way.stagger:
                break
        for result in llm.step():
            if result.request_id in running:
                done[running.pop(result.request_id)] = result
        step += 1
        if way.preempt and running and step % _PREEMPT_EVERY == 0 and step < 60:
            loop.scheduler.preempt(rng.choice(list(running)))
    return done
