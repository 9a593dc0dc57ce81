"""What structured output costs: compilation, masks, steps of 64 rows, and what overlap hides.

The vocabulary is synthetic and as large as the released one's. Rows stand inside long texts, where
masks are dearest: ids of letters are taken wherever they are legal.
"""

from __future__ import annotations

import json
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from deepinfer.bench.machine import describe_machine, describe_versions
from deepinfer.bench.report import Figure, Record
from deepinfer.chat.tokenizer import Tokenizer
from deepinfer.config.engine import GrammarConfig
from deepinfer.config.load import load_model_config, resolve_model
from deepinfer.engine.masks import Constrained, build_masks
from deepinfer.engine.shapes import fill_matchers, make_vocabulary
from deepinfer.grammar.backend import Vocabulary, pack_bits
from deepinfer.grammar.compiler import GrammarService
from deepinfer.grammar.matcher import Matcher
from deepinfer.grammar.spec import Structured
from deepinfer.weights.synth_tokenizer import synthetic_tokenizer

__all__ = ["measure_grammar"]

_VOCAB: Final = 129_280
_ROWS: Final = 64
_STEPS: Final = 60
_WARM_STEPS: Final = 20
_DEVICE_S: Final = 0.010
_DRAFTS: Final = 3

_SCHEMA: Final[Mapping[str, object]] = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "maxLength": 200},
        "year": {"type": "integer", "minimum": 1900, "maximum": 2100},
        "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 8},
        "author": {
            "type": "object",
            "properties": {"name": {"type": "string"}, "mail": {"type": "string"}},
            "required": ["name"],
            "additionalProperties": False,
        },
        "text": {"type": "string"},
    },
    "required": ["title", "year", "author", "text"],
    "additionalProperties": False,
}
_GRAMMAR: Final = r"""
root ::= object
object ::= "{" (pair ("," pair)*)? "}"
pair ::= text ":" value
text ::= "\"" [^"\\\x00-\x1f]* "\""
value ::= object | text | [0-9]{1,3}
"""
_SHAPES: Final = {
    "schema": Structured(json=_SCHEMA),
    "any JSON": Structured(json=True),
    "regex": Structured(regex=r"[A-Za-z]+( [a-z]+)*\."),
    "grammar": Structured(ebnf=_GRAMMAR),
}


def _vocabulary(size: int) -> Vocabulary:
    """Return a synthetic vocabulary of the released size."""
    config = replace(
        load_model_config(resolve_model("golden")), vocab_size=size, engram_layer_ids=()
    )
    with tempfile.TemporaryDirectory() as name:
        for file, data in synthetic_tokenizer(config).items():
            (Path(name) / file).write_bytes(data)
        tokenizer = Tokenizer.load(Path(name), config)
        return make_vocabulary(tokenizer, size, config.eos_token_id)


class _Rows:
    """Sequences that stand in their grammars, and take ids that a random source chooses."""

    def __init__(self, service: GrammarService, rows: int, num_drafts: int = 0) -> None:
        self._rng = np.random.default_rng(20)
        self._vocabulary = service.vocabulary
        self._end = service.vocabulary.end_token_id
        letters = [piece.isalpha() and piece.isascii() for piece in service.vocabulary.pieces]
        self._letters = pack_bits(np.array(letters, np.bool_))
        self._num_drafts = num_drafts
        compiled = [service.compile(shape) for shape in _SHAPES.values()]
        self._make = [
            lambda pair=pair: Matcher(
                service.backend,
                pair[1],
                service.vocabulary,
                (self._end,),
                last_word=pair[0].last_word,
            )
            for pair in compiled
        ]
        self.matchers = [self._make[i % len(self._make)]() for i in range(rows)]
        self.bits: NDArray[np.uint32] | None = None

    def masks(self) -> None:
        """Fill the masks of a step, drafts included."""
        found = [
            Constrained(i, matcher, self._drafts(i)) for i, matcher in enumerate(self.matchers)
        ]
        self.bits = build_masks(found, len(self._vocabulary.pieces), fill_matchers).bits

    def take(self) -> list[int]:
        """Choose a legal id for every row."""
        assert self.bits is not None
        return [self._choose(self.bits[i]) for i in range(len(self.matchers))]

    def accept(self, token_ids: list[int]) -> None:
        """Move every row over its id; begin again where an output has ended."""
        for i, token_id in enumerate(token_ids):
            matcher = self.matchers[i]
            if token_id == self._end or not matcher.accept(token_id) or matcher.is_finished():
                self.matchers[i] = self._make[i % len(self._make)]()

    def _drafts(self, row: int) -> list[int]:
        return self._planned[row] if self._num_drafts else []

    def plan_drafts(self) -> None:
        """Draft legal ids for every row."""
        self._planned = []
        row = np.zeros(len(self._letters), np.uint32)
        for matcher in self.matchers:
            drafts: list[int] = []
            for _ in range(self._num_drafts):
                matcher.fill(row)
                chosen = self._choose(row)
                if not matcher.try_drafts([chosen]):
                    break
                drafts.append(chosen)
            matcher.rollback(len(drafts))
            self._planned.append(drafts)

    def _choose(self, row: NDArray[np.uint32]) -> int:
        wanted = row & self._letters
        if not wanted.any():
            wanted = row
        word = int(self._rng.choice(np.flatnonzero(wanted)))
        bits = int(wanted[word])
        places = [place for place in range(32) if bits >> place & 1]
        return word * 32 + places[int(self._rng.integers(len(places)))]


def _steps(rows: _Rows, steps: int) -> tuple[list[float], list[float], list[float]]:
    """Return, per step, milliseconds of masks by the clock and by CPU time, and of accepting."""
    clock, cpu, accepting = [], [], []
    for step in range(_WARM_STEPS + steps):
        if rows._num_drafts:
            rows.plan_drafts()
        start, start_cpu = time.perf_counter(), time.process_time()
        rows.masks()
        took, took_cpu = time.perf_counter() - start, time.process_time() - start_cpu
        token_ids = rows.take()
        start = time.thread_time()
        rows.accept(token_ids)
        if step >= _WARM_STEPS:
            clock.append(1e3 * took)
            cpu.append(1e3 * took_cpu)
            accepting.append(1e3 * (time.thread_time() - start))
    return clock, cpu, accepting


def _exposed(rows: _Rows, steps: int, device_s: float) -> list[float]:
    """Return, per step, the milliseconds that a device waits for masks after its forward.

    The device is a sleeping thread; meanwhile the host accepts the last ids and fills the masks, as
    the overlapped loop does.
    """
    found = []
    token_ids: list[int] = []
    for step in range(_WARM_STEPS + steps):
        done: list[float] = []

        def device() -> None:
            time.sleep(device_s)
            done.append(time.perf_counter())  # noqa: B023  # joined below

        thread = threading.Thread(target=device)
        thread.start()
        if token_ids:
            rows.accept(token_ids)
        rows.masks()
        ready = time.perf_counter()
        thread.join()
        if step >= _WARM_STEPS:
            found.append(1e3 * max(0.0, ready - done[0]))
        token_ids = rows.take()
    return found


def measure_grammar(
    config: GrammarConfig,
    repeat: int,
    *,
    rows: int = _ROWS,
    steps: int = _STEPS,
    vocab_size: int = _VOCAB,
    device_s: float = _DEVICE_S,
    tell: Callable[[str], None] = lambda text: None,
) -> list[Record]:
    """Measure every figure and return one Record each.

    config  which library, with how many threads
    repeat  runs of every figure
    """
    figures: list[Figure] = []

    def add(name: str, unit: Literal["ms", "s"], values: list[float], how: str) -> None:
        tell(f"{name}: {sorted(values)[len(values) // 2]:.3g} {unit}")
        rounded = tuple(float(f"{value:.5g}") for value in values)
        figures.append(
            Figure(name=name, unit=unit, better="lower", values=rounded, warmup=0, how=how)
        )

    vocabulary = _vocabulary(vocab_size)
    start = time.process_time()
    service = GrammarService(config, lambda: vocabulary)
    assert service.backend is not None
    add("start of the library", "s", [time.process_time() - start], "CPU time, once")
    for name, shape in _SHAPES.items():
        took = []
        for run in range(repeat):
            start = time.process_time()
            # Another text each time, so that nothing the library keeps is of use.
            service.compile(_varied(shape, run))
            took.append(1e3 * (time.process_time() - start))
        add(f"compile {name}", "ms", took, "CPU time of one compilation, report included")
    percentiles: dict[str, list[float]] = {}
    for _ in range(repeat):
        for key, count, drafts in (
            ("1 row", 1, 0),
            (f"{rows} rows", rows, 0),
            (f"{rows} rows, {_DRAFTS} drafts", rows, _DRAFTS),
        ):
            clock, cpu, accepting = _steps(_Rows(service, count, drafts), steps)
            for label, values in (("", clock), (" CPU", cpu)):
                for share in (50, 99):
                    name = f"masks of {key}{label} p{share}"
                    percentiles.setdefault(name, []).append(float(np.percentile(values, share)))
            name = f"accept {key} CPU p50"
            percentiles.setdefault(name, []).append(float(np.percentile(accepting, 50)))
        waits = _exposed(_Rows(service, rows), steps, device_s)
        for share in (50, 99):
            name = f"left behind {1e3 * device_s:g} ms p{share}"
            percentiles.setdefault(name, []).append(float(np.percentile(waits, share)))
    for name, values in percentiles.items():
        how = "CPU time of all threads" if "CPU" in name else "by the clock"
        add(name, "ms", values, f"{how}, {steps} steps")
    when = datetime.now(UTC).isoformat(timespec="seconds")
    machine, versions = describe_machine(), describe_versions()
    default = GrammarConfig()
    changed = {
        f"grammar.{name}": getattr(config, name)
        for name in ("backend", "threads")
        if getattr(config, name) != getattr(default, name)
    }
    return [
        Record(
            suite="grammar",
            figure=figure,
            model=f"synthetic vocabulary of {vocab_size}",
            when=when,
            threads=1,
            machine=machine,
            versions=versions,
            settings=changed,
        )
        for figure in figures
    ]


def _varied(shape: Structured, run: int) -> Structured:
    """Return a shape as dear as another, but not equal to it."""
    if shape.kind == "json" and shape.text != "true":
        return Structured(json=json.loads(shape.text) | {"title": f"run {run}"})
    if shape.ebnf is not None:
        return Structured(ebnf=f"# run {run}\n{shape.ebnf}")
    return shape
