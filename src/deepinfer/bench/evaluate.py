"""What a checkpoint is worth: tasks over held-out text, each a function that yields figures.

A task is one entry of `TASKS`; it takes an `Evaluation` and shares with the others what costs time
(the scores of the held-out text, the drafted continuations).
"""

from __future__ import annotations

import json
import lzma
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Final

import numpy as np

from deepinfer.bench.eval_replay import replay
from deepinfer.bench.evaldata import (
    Document,
    generated_documents,
    held_out_documents,
    json_chat_parts,
    pick,
)
from deepinfer.bench.evalmodel import EvalModel, Scored, Selection
from deepinfer.bench.evalreport import Figure
from deepinfer.bench.measures import (
    Drafting,
    bits,
    calibration_error,
    fits_schema,
    reliability,
    repeated_share,
    shares_of_fair,
    sigmoid,
)
from deepinfer.bench.tasks import Case, copy_case, filler_of, needle_case
from deepinfer.chat.tokenizer import Tokenizer
from deepinfer.config.engine import EngineConfig
from deepinfer.engine.request import FinishReason, SamplingParams
from deepinfer.llm import LLM

__all__ = ["QUICK_LIMIT", "TASKS", "Evaluation", "Row", "Task", "cut", "run_tasks"]

QUICK_LIMIT: Final = 1
GLOSSES: Final = "wordnet"
DISTANCES: Final = (0, 128, 256, 512, 1024, 2048)

_SHORT: Final = 768
_PROMPT: Final = 256
_CONTINUED: Final = 96
_STREAMS: Final = 32
_PROMPTS_A_SOURCE: Final = 12
_JSON_PROMPTS: Final = 24
_ANSWER_TOKENS: Final = 320
# characters of filler, facts, cases
_NEEDLES: Final = ((300, 2, 24), (1000, 4, 12), (2400, 8, 12), (4300, 8, 16))
_COPIES: Final = ((16, 8), (48, 8), (96, 8), (192, 8))
_FIRST_EXAMPLE: Final = "Example 1:\n"
_EDGES: Final = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A run of a document: BOS, then at most as many tokens as the model has positions.

    data    the bytes of the tokens that count
    counted how many of the tokens behind BOS count: all but the document's EOS
    """

    source: str
    name: str
    token_ids: Sequence[int]
    data: bytes
    counted: int


def cut(document: Document, tokenizer: Tokenizer, length: int) -> Iterator[Row]:
    """Cut a document into rows of at most `length` tokens behind a BOS, none of them twice."""
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    text = document.text.removeprefix(_EDGES[0]).removesuffix(_EDGES[1])
    ids = [i for i in tokenizer.encode(text) if i not in (bos, eos)]
    for number, start in enumerate(range(0, len(ids), length)):
        part = ids[start : start + length]
        data = b"".join(map(tokenizer.piece, part))
        yield Row(
            source=document.source,
            name=f"{document.name}/{number}",
            token_ids=[bos, *part],
            data=data,
            counted=len(part),
        )


class Evaluation:
    """One checkpoint and what the tasks share.

    limit  at most so many rows, cases or prompts of each kind, chosen by hash; None = all
    tell   called with a line before each longer stretch
    """

    def __init__(
        self,
        folder: Path,
        engine: EngineConfig,
        limit: int | None = None,
        tell: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.model = EvalModel(folder, engine)
        self.limit = limit
        self.tell = tell

    @property
    def tokenizer(self) -> Tokenizer:
        """The checkpoint's tokenizer."""
        return self.model.tokenizer

    def capped(self, count: int) -> int:
        """Return a number of cases under the limit."""
        return count if self.limit is None else min(count, self.limit)

    def rows(self, documents: Sequence[Document], length: int | None = None) -> list[Row]:
        """Cut documents, and keep what the limit allows of each source."""
        length = length or self.model.max_tokens
        rows = [row for document in documents for row in cut(document, self.tokenizer, length)]
        kept: list[Row] = []
        for source in dict.fromkeys(row.source for row in rows):
            kept += self.picked([row for row in rows if row.source == source], self.limit)
        return kept

    def picked(self, rows: Sequence[Row], limit: int | None) -> Sequence[Row]:
        """Return rows chosen by the hash of source and name."""
        return pick(rows, limit, lambda row: f"{row.source}/{row.name}")

    def score(self, rows: Sequence[Row], what: str) -> list[tuple[Row, Scored]]:
        """Score rows, counting the experts' tokens."""
        self.tell(f"{what}: {sum(row.counted for row in rows):,} tokens")
        scored = self.model.score_all([row.token_ids for row in rows], loads=True)
        return list(zip(rows, scored, strict=True))

    @cached_property
    def natural(self) -> list[tuple[Row, Scored]]:
        """The held-out natural text, scored; under a limit in rows of at most 768 tokens."""
        length = None if self.limit is None else min(_SHORT, self.model.max_tokens)
        return self.score(self.rows(held_out_documents(), length), "held-out text")

    @cached_property
    def draft_prompts(self) -> list[tuple[str, list[int]]]:
        """Source and ids of what drafts are measured behind: natural sources, then `json`."""
        length = _PROMPT + 1
        rows = [
            row
            for document in held_out_documents()
            for row in cut(document, self.tokenizer, 2 * _PROMPT)
            if len(row.token_ids) > length
        ]
        prompts: list[tuple[str, list[int]]] = []
        for source in dict.fromkeys(row.source for row in rows):
            chosen = self.picked(
                [row for row in rows if row.source == source], self.capped(_PROMPTS_A_SOURCE)
            )
            prompts += [(source, list(row.token_ids[:length])) for row in chosen]
        return prompts + [("json", ids) for ids in self._json_prompts()]

    @cached_property
    def drafted(self) -> dict[str, list[tuple[Drafting, list[int]]]]:
        """Greedy continuations with drafts, by source, by the model alone."""
        prompts = self.draft_prompts
        self.tell(f"drafts: {len(prompts)} prompts, each continued by {_CONTINUED} tokens at most")
        found: dict[str, list[tuple[Drafting, list[int]]]] = {source: [] for source, _ in prompts}
        for first in range(0, len(prompts), _STREAMS):
            part = prompts[first : first + _STREAMS]
            pairs = draft_along(self.model, [ids for _, ids in part], _CONTINUED)
            for (source, _), pair in zip(part, pairs, strict=True):
                found[source].append(pair)
        return found

    def _json_prompts(self) -> list[list[int]]:
        """Return prompts that JSON follows: half are pages with a schema, half chats."""
        texts = []
        for kind in ("json", "json_chat"):
            documents = pick(
                generated_documents(kind), self.capped(_JSON_PROMPTS), lambda d: d.name
            )
            for document in documents:
                if kind == "json":
                    head, mark, _ = document.text.partition(_FIRST_EXAMPLE)
                    texts.append(head + mark)
                else:
                    texts.append(json_chat_parts(document.text)[0])
        return [self.tokenizer.encode(text) for text in texts]


def draft_along(
    model: EvalModel, prompts: Sequence[Sequence[int]], num_tokens: int
) -> list[tuple[Drafting, list[int]]]:
    """Continue prompts greedily, one token a step, drafting a block wherever a step of the engine
    would; returns for each its blocks and its tokens, which end with EOS or after `num_tokens`.
    """
    num, eos = len(prompts), model.tokenizer.eos_token_id
    streams = model.streams(num, max(map(len, prompts)) + num_tokens)
    found = [Drafting() for _ in prompts]
    tokens: list[list[int]] = []
    for stream, prompt in enumerate(prompts):
        tokens.append([int(streams.prefill(stream, prompt)[-1].argmax())])
    due = [stream for stream in range(num) if tokens[stream][-1] != eos]
    active = list(due)
    for _ in range(num_tokens - 1):
        if due:
            drafts, confidences = streams.draft(due, [tokens[stream][-1] for stream in due])
            for stream, block, confidence in zip(
                due, drafts.tolist(), confidences.tolist(), strict=True
            ):
                found[stream].offer(block, confidence)
        if not active:
            break
        logits = streams.decode(active, [tokens[stream][-1] for stream in active])
        due = []
        for stream, token in zip(active, logits.argmax(-1).tolist(), strict=True):
            tokens[stream].append(token)
            if found[stream].take(token) and token != eos:
                due.append(stream)
        active = [stream for stream in active if tokens[stream][-1] != eos]
    return list(zip(found, tokens, strict=True))


def bits_per_byte(run: Evaluation) -> Iterator[Figure]:
    """Yield bits per byte of each source and of all natural text, beside two compressors.

    Counts are bytes. The compressors see the same bytes, all rows of a group joined.
    """
    natural = run.natural
    sources = list(dict.fromkeys(row.source for row, _ in natural))
    groups: dict[str, set[str]] = {"natural": set(sources)}
    if len(sources) > 1 and GLOSSES in sources:
        groups["natural without glosses"] = set(sources) - {GLOSSES}
    groups |= {source: {source} for source in sources}
    for name, members in groups.items():
        part = [(row, scored) for row, scored in natural if row.source in members]
        yield _bits(name, part)
        data = b"".join(row.data for row, _ in part)
        for compressor, size in _compressed(data).items():
            yield Figure(
                task="bpb",
                name=compressor,
                unit="bits/byte",
                value=8 * size / len(data),
                count=len(data),
                labels={"source": name},
            )
    for kind in ("json", "json_chat"):
        yield _bits(kind, run.score(run.rows(generated_documents(kind)), f"generated {kind}"))


def _bits(name: str, part: Sequence[tuple[Row, Scored]]) -> Figure:
    count = sum(len(row.data) for row, _ in part)
    return Figure(
        task="bpb",
        name="model",
        unit="bits/byte",
        value=sum(bits(scored.log_probs) for _, scored in part) / count,
        count=count,
        labels={"source": name},
    )


def _compressed(data: bytes) -> dict[str, int]:
    """Return the packed bytes by compressor; PPMd at its best order, where `pyppmd` is present."""
    found = {"xz -9": len(lzma.compress(data, preset=9))}
    try:
        import pyppmd
    except ImportError:
        return found
    sizes = [
        len(pyppmd.compress(data, max_order=order, mem_size=1 << 26)) for order in (4, 6, 8, 12, 16)
    ]
    return found | {"PPMd": min(sizes)}


def retrieval(run: Evaluation) -> Iterator[Figure]:
    """Yield how often a code or a word far back is found, by distance and by selection.

    Counts are answers. An answer is right when each of its tokens is the likeliest after the true
    ones before it, which is when greedy decoding would write it.
    """
    cases = _cases(run)
    everything: Selection = "all"
    for selection in ("indexer", "random", everything):
        part = {k: c[::2] if selection == everything else c for k, c in cases.items()}
        run.tell(f"retrieval, {selection}: {sum(map(len, part.values()))} texts")
        right: Counter[tuple[str, int]] = Counter()
        asked: Counter[tuple[str, int]] = Counter()
        with run.model.selecting(selection):
            for kind, texts in part.items():
                # All visible entries of a row are gathered at once: short chunks bound that.
                chunk = 128 if selection == everything else 512
                scored = run.model.score_all([ids for ids, _ in texts], chunk=chunk)
                for (_, answers), found in zip(texts, scored, strict=True):
                    correct = found.correct
                    for first, last, distance in answers:
                        place = (kind, bucket(distance))
                        asked[place] += 1
                        right[place] += bool(correct[first - 1 : last - 1].all())
        for (kind, low), count in sorted(asked.items()):
            yield Figure(
                task="retrieval",
                name=kind,
                unit="share",
                value=right[kind, low] / count,
                count=count,
                labels={"selection": selection, "distance": low},
            )


def bucket(distance: int) -> int:
    """Return the lower end of the range of distances that one falls into."""
    return max(low for low in DISTANCES if low <= distance)


Asked = tuple[list[int], list[tuple[int, int, int]]]
"""A text's ids, and for each answer its first token, the one behind it, its distance."""


def _cases(run: Evaluation) -> dict[str, list[Asked]]:
    texts = [d.text for d in held_out_documents() if d.source != GLOSSES]
    filler = filler_of(texts)
    found: dict[str, list[Asked]] = {"needle": [], "copy": []}
    for characters, facts, count in _NEEDLES:
        for i in range(run.capped(count)):
            rng = random.Random(f"needle/{characters}/{i}")
            size = characters
            while True:
                asked = locate(needle_case(rng, filler, size, facts), run.tokenizer)
                if len(asked[0]) <= run.model.max_tokens:
                    break
                size = size * 9 // 10  # more tokens a character than most text has
            found["needle"].append(asked)
    for words, count in _COPIES:
        for i in range(run.capped(count)):
            case = copy_case(random.Random(f"copy/{words}/{i}"), words)
            found["copy"].append(locate(case, run.tokenizer))
    return found


def locate(case: Case, tokenizer: Tokenizer) -> Asked:
    """Turn the bytes of a case into tokens.

    An answer takes every token that has one of its bytes; its distance is counted from the first
    token of its source.
    """
    ids = tokenizer.encode(case.text)
    ends = np.cumsum([len(tokenizer.piece(i)) for i in ids])
    assert int(ends[-1]) == len(case.text.encode()), "tokens spell the text"
    answers = []
    for answer in case.answers:
        first = int(np.searchsorted(ends, answer.start, side="right"))
        last = int(np.searchsorted(ends, answer.end, side="left")) + 1
        source = int(np.searchsorted(ends, answer.source, side="right"))
        answers.append((first, last, first - source))
    return ids, answers


def _by_part(run: Evaluation) -> dict[str, list[tuple[Drafting, list[int]]]]:
    """Return drafted continuations of natural text as a whole, of each source, of JSON."""
    drafted = run.drafted
    natural = [pair for source, pairs in drafted.items() if source != "json" for pair in pairs]
    return {"natural": natural, **drafted}


def drafts(run: Evaluation) -> Iterator[Figure]:
    """Yield mean accepted lengths (counts are blocks), acceptance of each place given that all
    before it held (counts are trials), how much of the continuations repeats itself, and the mean
    accepted lengths of the engine itself (counts are steps).
    """
    for source, pairs in _by_part(run).items():
        lengths = [length for drafting, _ in pairs for length in drafting.lengths]
        trials = [trial for drafting, _ in pairs for trial in drafting.trials]
        if not lengths:
            continue
        labels = {"source": source}
        yield Figure(
            task="drafts",
            name="mean accepted length",
            unit="tokens/block",
            value=float(np.mean(lengths)),
            count=len(lengths),
            labels=labels,
        )
        for place in range(run.model.config.dspark_block_size):
            matched = [trial.matched for trial in trials if trial.place == place]
            if matched:
                yield Figure(
                    task="drafts",
                    name="acceptance",
                    unit="share",
                    value=float(np.mean(matched)),
                    count=len(matched),
                    labels=labels | {"place": place + 1},
                )
        yield Figure(
            task="drafts",
            name="repeated 8-grams",
            unit="share",
            value=float(np.mean([repeated_share(tokens) for _, tokens in pairs])),
            count=len(pairs),
            labels=labels,
        )

    yield from _engine_drafts(run)


def _engine_drafts(run: Evaluation) -> Iterator[Figure]:
    """Draft behind the same prompts through the engine; its tokens must be those without drafts."""
    size = run.model.config.dspark_block_size
    settings = {"speculation.num_drafts": size, "speculation.variable": False}
    config = run.model.engine.with_dotted(settings)
    run.tell(f"drafts in the engine: {len(run.draft_prompts)} prompts")
    params = SamplingParams(temperature=0, max_tokens=_CONTINUED)
    with LLM(run.model.folder, device="cpu", config=config) as llm:
        results = llm.generate([ids for _, ids in run.draft_prompts], params)
    alone = {source: iter(pairs) for source, pairs in run.drafted.items()}
    steps: Counter[str] = Counter()
    tokens: Counter[str] = Counter()
    equal: Counter[str] = Counter()
    for (source, _), result in zip(run.draft_prompts, results, strict=True):
        assert result.error is None, result.error
        _, wanted = next(alone[source])
        for group in {source, "json" if source == "json" else "natural"}:
            steps[group] += result.num_steps - 1  # the first token is the prompt's step
            tokens[group] += len(result.token_ids) - 1
            equal[group] += list(result.token_ids) == wanted
    counts = Counter(source for source, _ in run.draft_prompts)
    counts["natural"] = counts.total() - counts["json"]
    for source in _by_part(run):
        labels = {"source": source}
        if steps[source]:
            yield Figure(
                task="drafts",
                name="mean accepted length, engine",
                unit="tokens/step",
                value=tokens[source] / steps[source],
                count=steps[source],
                labels=labels,
            )
        yield Figure(
            task="drafts",
            name="same tokens, engine",
            unit="share",
            value=equal[source] / max(counts[source], 1),
            count=counts[source],
            labels=labels,
        )


def calibration(run: Evaluation) -> Iterator[Figure]:
    """Yield calibration errors and reliability tables of the confidences; counts are trials.

    Confidences are taken at the config's temperatures. `all` is natural text and JSON together.
    """
    size = run.model.config.dspark_block_size
    temperatures = run.model.config.dspark_confidence_temperatures or (1.0,) * size
    parts = _by_part(run)
    parts = {"all": parts["natural"] + parts["json"], **{k: parts[k] for k in ("natural", "json")}}
    for source, pairs in parts.items():
        trials = [trial for drafting, _ in pairs for trial in drafting.trials]
        told = [(t, sigmoid(t.confidence, temperatures[t.place]), t.matched) for t in trials]
        places: list[int | None] = [None, *range(size)]
        for place in places:
            part = [(p, matched) for t, p, matched in told if place in (None, t.place)]
            if not part:
                continue
            labels = {"source": source, "place": "all" if place is None else place + 1}
            yield Figure(
                task="calibration",
                name="expected calibration error",
                unit="share",
                value=calibration_error(part),
                count=len(part),
                labels=labels,
            )
            for found in reliability(part):
                yield Figure(
                    task="calibration",
                    name="accuracy",
                    unit="share",
                    value=found.accuracy,
                    count=found.count,
                    labels=labels | {"confidence": f"{found.confidence:.4f}"},
                )


def experts(run: Evaluation) -> Iterator[Figure]:
    """Yield the least and the most loaded expert of each layer and source, as multiples of a fair
    share; counts are tokens. Layer `all` is the worst of all layers.
    """
    natural = run.natural
    groups = {"natural": [row.source for row, _ in natural]}
    groups |= {source: [source] for source in dict.fromkeys(groups["natural"])}
    for name, members in groups.items():
        part = [(row, scored) for row, scored in natural if row.source in set(members)]
        loads = [scored.loads for _, scored in part if scored.loads is not None]
        shares = shares_of_fair(np.sum(loads, axis=0))
        count = sum(row.counted for row, _ in part)
        layers: list[tuple[str | int, float, float]] = [
            ("all", float(shares.min()), float(shares.max()))
        ]
        layers += [(i, float(row.min()), float(row.max())) for i, row in enumerate(shares)]
        for layer, least, most in layers:
            for kind, value in (("least load", least), ("most load", most)):
                yield Figure(
                    task="experts",
                    name=kind,
                    unit="of fair share",
                    value=value,
                    count=count,
                    labels={"source": name, "layer": layer},
                )


def json_validity(run: Evaluation) -> Iterator[Figure]:
    """Yield how many greedy answers end, are JSON and follow the asked schema; counts are answers.

    The engine runs without a grammar: nothing but the model keeps the answers in form.
    """
    documents = generated_documents("json_chat")
    chosen = pick(documents, run.limit, lambda d: d.name)
    cases = [json_chat_parts(document.text) for document in chosen]
    run.tell(f"JSON answers: {len(cases)} chats")
    ids = [run.tokenizer.encode(prompt) for prompt, _, _ in cases]
    with LLM(run.model.folder, device="cpu", config=run.model.engine) as llm:
        room = [min(_ANSWER_TOKENS, llm.max_model_len - len(prompt)) for prompt in ids]
        params = [SamplingParams(temperature=0, max_tokens=tokens) for tokens in room]
        results = llm.generate(ids, params)
    good: Counter[str] = Counter()
    for (_, schema, _), result in zip(cases, results, strict=True):
        assert result.error is None, result.error
        good["ended"] += result.finish_reason is FinishReason.STOP
        try:
            value = json.loads(result.text or "")
        except ValueError:
            continue
        good["valid"] += 1
        good["follows schema"] += fits_schema(value, schema)
    for name in ("ended", "valid", "follows schema"):
        yield Figure(
            task="json", name=name, unit="share", value=good[name] / len(cases), count=len(cases)
        )


@dataclass(frozen=True, slots=True)
class Task:
    """What a task measures, in a line, and how."""

    line: str
    run: Callable[[Evaluation], Iterator[Figure]]


TASKS: Final[Mapping[str, Task]] = {
    "bpb": Task("bits per byte of held-out text, beside xz and PPMd", bits_per_byte),
    "experts": Task("load of the routed experts", experts),
    "retrieval": Task("facts and lists found again, by distance and selection", retrieval),
    "drafts": Task("drafts accepted by greedy continuations", drafts),
    "calibration": Task("whether the drafts' confidences come true", calibration),
    "json": Task("answers that are JSON, without a grammar", json_validity),
    "replay": Task("quality and time of bounded replay against the exact prefill", replay),
}


def run_tasks(run: Evaluation, names: Sequence[str]) -> list[Figure]:
    """Run tasks in the order of `TASKS`."""
    return [figure for name in TASKS if name in names for figure in TASKS[name].run(run)]
