"""Results of `deepinfer eval` as JSON lines and as the tables that people read (pure)."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final

from deepinfer.bench.report import read_lines
from deepinfer.config.fields import show
from deepinfer.config.load import DEMO_MODEL
from deepinfer.errors import ConfigError

__all__ = [
    "MARKS",
    "EvalRecord",
    "Figure",
    "between_marks",
    "last_run",
    "markdown",
    "summary",
    "verdicts",
]

_FORMAT: Final = 1
_BEYOND: Final = 256
MARKS: Final = ("<!-- figures -->", "<!-- end of figures -->")


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One result.

    count   what it rests on: bytes, answers, blocks, trials or tokens, as the task says
    labels  what it belongs to, such as source, distance, place or layer
    """

    task: str
    name: str
    unit: str
    value: float
    count: int
    labels: Mapping[str, str | int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalRecord:
    """A figure with everything that it depends on.

    checkpoint  digest of the weights, "" where they are too large to read for that
    data        digest of the packaged texts
    limit       of `--limit`, None = everything
    """

    figure: Figure
    model: str
    checkpoint: str
    data: str
    limit: int | None
    when: str
    versions: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> str:
        """Return the record as one line."""
        rest = asdict(self)
        figure = rest.pop("figure")
        return json.dumps({"format": _FORMAT, "suite": "eval", **figure, **rest})

    @classmethod
    def from_json(cls, line: str) -> EvalRecord:
        """Read what `to_json` wrote; raises ValueError when the line is no record."""
        found = json.loads(line)
        if not isinstance(found, dict) or found.get("format") != _FORMAT:
            raise ValueError(f"expected an object of format {_FORMAT}, found {show(found)}")
        if found.get("suite") != "eval":
            raise ValueError(f"expected a record of suite eval, found {show(found.get('suite'))}")
        try:
            figure = {name: found.pop(name) for name in Figure.__dataclass_fields__}
            rest = {k: v for k, v in found.items() if k not in ("format", "suite")}
            return cls(figure=Figure(**figure), **rest)
        except (KeyError, TypeError) as error:
            raise ValueError(f"not a record: {error}") from error


def last_run(file: Path) -> list[EvalRecord]:
    """Read the records of the last run in a file; raises ConfigError when there is none."""
    records = read_lines(file, EvalRecord.from_json)
    if not records:
        raise ConfigError(f"{file} holds no records")
    return [record for record in records if record.when == records[-1].when]


def find(figures: Sequence[Figure], task: str, name: str, **labels: str | int) -> Figure | None:
    """Return the figure with these labels, and perhaps more; None when there is none."""
    for figure in figures:
        if (figure.task, figure.name) == (task, name) and labels.items() <= figure.labels.items():
            return figure
    return None


def markdown(figures: Sequence[Figure]) -> str:
    """Lay figures out as one Markdown table for each task."""
    blocks = []
    for task, lay in _TABLES.items():
        part = [figure for figure in figures if figure.task == task]
        if part:
            blocks.append("\n".join(lay(part)))
    return "\n\n".join(blocks)


def summary(records: Sequence[EvalRecord]) -> str:
    """Return the tables of a run; the demonstration model's begin with what it should reach."""
    figures = [record.figure for record in records]
    found = list(verdicts(figures)) if records and records[0].model == DEMO_MODEL else []
    if not found:
        return markdown(figures)
    rows = [[v.what, v.wanted, v.found, "yes" if v.met else "**no**"] for v in found]
    head = ["what the demonstration model should reach", "wanted", "found", "met"]
    return "\n".join(_table(head, rows)) + "\n\n" + markdown(figures)


def between_marks(page: str, tables: str) -> str:
    """Return a page with new tables between its marks; raises ConfigError when it has none."""
    head, begin, rest = page.partition(MARKS[0] + "\n")
    _, end, tail = rest.partition("\n" + MARKS[1])
    if not begin or not end:
        raise ConfigError(f"the page has no lines {MARKS[0]} and {MARKS[1]}, one after the other")
    return f"{head}{begin}{tables}{end}{tail}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [head, ["---"] * len(head), *rows]
    return ["| " + " | ".join(line) + " |" for line in lines]


def _sources(figures: Sequence[Figure]) -> list[str]:
    return [str(s) for s in dict.fromkeys(figure.labels["source"] for figure in figures)]


def _cell(figure: Figure | None, spec: str = ".3f") -> str:
    return "-" if figure is None else format(figure.value, spec)


def _bpb(figures: Sequence[Figure]) -> list[str]:
    names = ["model", *(n for n in ("xz -9", "PPMd") if any(f.name == n for f in figures))]
    rows = []
    for source in _sources(figures):
        found = [find(figures, "bpb", name, source=source) for name in names]
        size = next(figure.count for figure in figures if figure.labels["source"] == source)
        rows.append([source, f"{size:,}", *map(_cell, found)])
    return _table(["bits per byte", "bytes", *names], rows)


def _experts(figures: Sequence[Figure]) -> list[str]:
    rows = [
        [
            source,
            *(
                _cell(find(figures, "experts", name, source=source, layer="all"), ".2f")
                for name in ("least load", "most load")
            ),
        ]
        for source in _sources(figures)
    ]
    return _table(["load of an expert, worst of all layers", "least", "most"], rows)


def _retrieval(figures: Sequence[Figure]) -> list[str]:
    selections = list(dict.fromkeys(str(figure.labels["selection"]) for figure in figures))
    places = sorted({(figure.name, int(figure.labels["distance"])) for figure in figures})
    rows = []
    for name, distance in sorted(places, key=lambda place: (place[0] != "needle", place)):
        found = [
            find(figures, "retrieval", name, selection=selection, distance=distance)
            for selection in selections
        ]
        count = next((figure.count for figure in found if figure is not None), 0)
        rows.append([name, f"{distance} or more", str(count), *(_cell(f) for f in found)])
    return _table(["found again", "tokens back", "answers", *selections], rows)


def _places(figures: Sequence[Figure]) -> list[int]:
    return sorted({p for f in figures if isinstance(p := f.labels.get("place"), int)})


def _drafts(figures: Sequence[Figure]) -> list[str]:
    places = _places(figures)
    rows = []
    for source in _sources(figures):
        length = find(figures, "drafts", "mean accepted length", source=source)
        kept = [
            find(figures, "drafts", "acceptance", source=source, place=place) for place in places
        ]
        repeated = find(figures, "drafts", "repeated 8-grams", source=source)
        count = 0 if length is None else length.count
        rows.append([source, str(count), _cell(length, ".2f"), *(_cell(f, ".2f") for f in kept)])
        engine = [
            find(figures, "drafts", f"{name}, engine", source=source)
            for name in ("mean accepted length", "same tokens")
        ]
        rows[-1] += [_cell(repeated, ".2f"), *(_cell(f, ".2f") for f in engine)]
    head = ["drafts", "blocks", "mean accepted length", *(f"draft {p}" for p in places)]
    return _table([*head, "repeated 8-grams", "length in the engine", "same tokens"], rows)


def _calibration(figures: Sequence[Figure]) -> list[str]:
    name = "expected calibration error"
    places = _places(figures)
    rows = []
    for source in _sources(figures):
        found = [find(figures, "calibration", name, source=source, place=p) for p in places]
        whole = find(figures, "calibration", name, source=source, place="all")
        count = 0 if whole is None else whole.count
        rows.append([source, str(count), _cell(whole), *map(_cell, found)])
    head = ["calibration error", "trials", "all drafts", *(f"draft {p}" for p in places)]
    return _table(head, rows)


def _json(figures: Sequence[Figure]) -> list[str]:
    rows = [[figure.name, str(figure.count), _cell(figure)] for figure in figures]
    return _table(["JSON without a grammar", "answers", "share"], rows)


def _replay(figures: Sequence[Figure]) -> list[str]:
    names = list(dict.fromkeys(figure.name for figure in figures))
    keeps = sorted({int(figure.labels["keep"]) for figure in figures})
    spec = {"decoder rows": ".0f", "model": ".4f"}
    rows = [
        [
            str(keep) if keep else "off",
            *(_cell(find(figures, "replay", n, keep=keep), spec.get(n, ".3f")) for n in names),
        ]
        for keep in keeps
    ]
    units = {figure.name: figure.unit for figure in figures}
    return _table(["kept tokens", *(f"{name}, {units[name]}" for name in names)], rows)


_TABLES: Final[Mapping[str, Callable[[Sequence[Figure]], list[str]]]] = {
    "bpb": _bpb,
    "experts": _experts,
    "retrieval": _retrieval,
    "drafts": _drafts,
    "calibration": _calibration,
    "json": _json,
    "replay": _replay,
}


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the demonstration model should reach, what it does, and whether that is enough."""

    what: str
    wanted: str
    found: str
    met: bool


def verdicts(figures: Sequence[Figure]) -> Iterator[Verdict]:
    """Hold figures against what the demonstration model should reach, as far as they are there."""
    model = find(figures, "bpb", "model", source="natural")
    if model is not None:
        wanted, bound = "<= 1.75", 1.75
        for name in ("xz -9", "PPMd"):
            other = find(figures, "bpb", name, source="natural")
            if other is not None:
                wanted += f", below {name} {other.value:.3f}"
                bound = min(bound, other.value)
        met = model.value <= bound
        yield Verdict("bits per byte, natural text", wanted, f"{model.value:.3f}", met)
    least = find(figures, "experts", "least load", source="natural", layer="all")
    most = find(figures, "experts", "most load", source="natural", layer="all")
    if least is not None and most is not None:
        yield Verdict(
            "load of every expert, natural text",
            "0.2x to 4x",
            f"{least.value:.2f}x to {most.value:.2f}x",
            least.value >= 0.2 and most.value <= 4,
        )
    for name in ("needle", "copy"):
        own = _beyond(figures, name, "indexer")
        noise = _beyond(figures, name, "random")
        if own is not None and noise is not None:
            yield Verdict(
                f"{name}, {_BEYOND} tokens back and more",
                ">= 0.90, and clearly less at random",
                f"{own:.3f}, at random {noise:.3f}",
                own >= 0.9 and noise <= own - 0.2,
            )
    for source, at_least in (("natural", 2.6), ("json", 3.5)):
        length = find(figures, "drafts", "mean accepted length", source=source)
        if length is not None:
            yield Verdict(
                f"mean accepted length, {source}",
                f">= {at_least}",
                f"{length.value:.2f}",
                length.value >= at_least,
            )
    error = find(figures, "calibration", "expected calibration error", source="all", place="all")
    if error is not None:
        found = f"{error.value:.3f}"
        yield Verdict("calibration error, all drafts", "<= 0.05", found, error.value <= 0.05)


def _beyond(figures: Sequence[Figure], name: str, selection: str) -> float | None:
    """Return the share found at distances that window and selection together do not cover."""
    part = [
        figure
        for figure in figures
        if (figure.task, figure.name, figure.labels.get("selection"))
        == ("retrieval", name, selection)
        and int(figure.labels["distance"]) >= _BEYOND
    ]
    count = sum(figure.count for figure in part)
    return sum(figure.value * figure.count for figure in part) / count if count else None
