"""Run the JSON-Schema test suite through the front: `python -m tests.grammar.json_suite FOLDER`.

FOLDER is `json/tests` of the source distribution of the package `jsonschema`. Every schema is
compiled; every document, in several spellings, is offered to the grammar alone and then to the
validator that has the last word. Recorded is, per file and back end, how many schemas were refused,
how many documents were wrongly accepted by the grammar alone and by both, and which keywords were
enforced, approximated or refused.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice, permutations
from pathlib import Path

from deepinfer.config.engine import GrammarConfig
from deepinfer.errors import RequestError
from deepinfer.grammar.backend import Compiled, Vocabulary
from deepinfer.grammar.compiler import GrammarService
from deepinfer.grammar.report import Report, Status
from deepinfer.grammar.spec import Structured

DRAFT = "draft2020-12"


@dataclass
class Outcome:
    """What became of one file of the suite."""

    file: str
    schemas: int = 0
    refused: int = 0
    exact: int = 0
    documents: int = 0
    valid: int = 0
    valid_accepted: int = 0
    grammar_wrong: int = 0
    grammar_wrong_though_exact: int = 0
    wrong: int = 0
    keywords: Counter[str] = field(default_factory=Counter)
    wrongly: list[str] = field(default_factory=list)


def byte_vocabulary() -> Vocabulary:
    """Return a vocabulary of the 256 bytes and an end."""
    return Vocabulary((*(bytes([i]) for i in range(256)), b""), 256)


def spellings(value: object) -> Iterator[str]:
    """Yield texts of a JSON value: compact and spaced, and with other orders of its properties."""
    for ordered in islice(orders(value), 24):
        yield json.dumps(ordered, ensure_ascii=False, separators=(",", ":"))
        yield json.dumps(ordered, ensure_ascii=False)


def orders(value: object) -> Iterator[object]:
    """Yield a value with the properties of its outermost object in other orders."""
    if isinstance(value, dict) and 1 < len(value) <= 4:
        for keys in permutations(value):
            yield {key: value[key] for key in keys}
    else:
        yield value


def accepts(compiled: Compiled, text: str) -> bool:
    """Tell whether the grammar alone accepts a text."""
    try:
        data = text.encode()
    except UnicodeEncodeError:  # lone surrogates of the suite
        return False
    position = compiled.start()
    return all(position.accept(byte) for byte in data) and position.is_complete()


def run_file(path: Path, service: GrammarService) -> Outcome:
    """Run one file."""
    outcome = Outcome(path.stem)
    for group in json.loads(path.read_text("utf-8")):
        outcome.schemas += 1
        try:
            prepared, compiled = service.compile(Structured(json=group["schema"]))
        except RequestError as error:
            outcome.refused += 1
            outcome.keywords.update(refused_keywords(group["schema"], error))
            continue
        outcome.exact += prepared.report.is_exact
        outcome.keywords.update(found_keywords(prepared.report))
        for case in group["tests"]:
            outcome.documents += 1
            outcome.valid += case["valid"]
            texts = [text for text in spellings(case["data"]) if accepts(compiled, text)]
            if case["valid"]:
                outcome.valid_accepted += bool(texts)
                for text in texts:
                    told = prepared.last_word(text)
                    assert told is None, (group["schema"], text, told)
                continue
            outcome.grammar_wrong += bool(texts)
            through = [text for text in texts if prepared.last_word(text) is None]
            outcome.wrong += bool(through)
            if texts and (prepared.report.is_exact or through):
                outcome.grammar_wrong_though_exact += prepared.report.is_exact
                outcome.wrongly.append(f"{json.dumps(group['schema'])} <- {texts[0]}")
    return outcome


def found_keywords(report: Report) -> Iterator[str]:
    """Yield `keyword status` of a report."""
    for finding in report.findings:
        yield f"{finding.keyword} {finding.status}"


def refused_keywords(schema: object, error: RequestError) -> Iterator[str]:
    """Yield `keyword refused` for what an error names."""
    for problem in error.problems or (error.message,):
        pointer, _, _ = problem.partition(": ")
        keyword = pointer.rpartition("/")[2] if pointer.startswith("/") else "(whole schema)"
        yield f"{keyword} {Status.REFUSED}"


def main() -> int:
    """Run the suite and print a JSON line a file, then a summary line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path, help="json/tests of the source distribution")
    parser.add_argument("--backend", default="llguidance")
    parser.add_argument("--file", default="*", help="only files of this name")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    config = GrammarConfig(backend=args.backend)
    service = GrammarService(config, byte_vocabulary)
    lines = []
    total = Outcome("(all)")
    for path in sorted((args.folder / DRAFT).rglob(f"{args.file}.json")):
        outcome = run_file(path, service)
        optional = "optional" in path.relative_to(args.folder / DRAFT).parts
        if optional:
            outcome.file = path.relative_to(args.folder / DRAFT).with_suffix("").as_posix()
        for wrongly in outcome.wrongly:
            print(f"{outcome.file}: {wrongly}", file=sys.stderr)
        record = {k: v for k, v in vars(outcome).items() if k != "wrongly"}
        record["keywords"] = dict(sorted(outcome.keywords.items()))
        lines.append(json.dumps({"backend": args.backend, **record}))
        if not optional:
            for name, value in vars(outcome).items():
                if isinstance(value, int):
                    setattr(total, name, getattr(total, name) + value)
            total.keywords.update(outcome.keywords)
    record = {k: v for k, v in vars(total).items() if k != "wrongly"}
    record["keywords"] = dict(sorted(total.keywords.items()))
    lines.append(json.dumps({"backend": args.backend, **record}))
    text = "\n".join(lines) + "\n"
    if args.out is None:
        print(text, end="")
    else:
        args.out.write_text(text, "utf-8")
    print(lines[-1], file=sys.stderr)
    return 1 if total.wrong or total.grammar_wrong_though_exact else 0


if __name__ == "__main__":
    sys.exit(main())
