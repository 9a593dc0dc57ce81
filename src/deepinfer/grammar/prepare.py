"""From a Structured to a program for a library, a report, and the last word on output (pure)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Final

from deepinfer.config.engine import GrammarConfig
from deepinfer.errors import RequestError
from deepinfer.grammar.backend import Backend, BackendError, Compiled, Program
from deepinfer.grammar.ebnf import ROOT, GrammarError, completes, parse_ebnf, prune
from deepinfer.grammar.jsonrules import Loss, json_rules
from deepinfer.grammar.nodes import Automaton, Node, Rules, alt, inline, literal, size
from deepinfer.grammar.regex import PatternError, parse_regex
from deepinfer.grammar.report import Finding, Report, Status
from deepinfer.grammar.schema import Loosened, escape, rewrite
from deepinfer.grammar.spec import Structured
from deepinfer.grammar.verdict import make_check, make_test

__all__ = ["Prepared", "compile_shape", "prepare"]

_BYTES_PER_STATE: Final = 500  # of an automaton and the nodes behind it
_BYTES_PER_CHARACTER: Final = 20  # of a schema, parsed


@dataclass(frozen=True)
class Prepared:
    """A shape ready to be compiled.

    last_word  given a finished output, returns what is wrong with it, or None
    num_bytes  what it costs to keep the last word, estimated
    """

    program: Program
    report: Report
    last_word: Callable[[str], str | None]
    num_bytes: int


def compile_shape(
    shape: Structured, config: GrammarConfig, backend: Backend
) -> tuple[Prepared, Compiled]:
    """Prepare and compile, leaving out of a schema what the library turns out not to express.

    Raises RequestError, or BackendError when the library refuses for another reason.
    """
    loosened = backend.limits
    while True:
        prepared = prepare(shape, config, loosened, backend.wants_rules)
        try:
            return prepared, backend.compile(prepared.program)
        except BackendError as error:
            more = backend.loosen(error, loosened) if shape.kind == "json" else None
            if more is None or more == loosened:
                raise
            loosened = more


def prepare(
    shape: Structured,
    config: GrammarConfig,
    loosened: Loosened | None = None,
    as_rules: bool = False,
) -> Prepared:
    """Check a shape and reduce it; raises RequestError that says where it is wrong.

    loosened  what is left out of a schema
    as_rules  whether a schema is turned into rules
    """
    source_bytes = len(shape.text.encode())
    if source_bytes > config.max_source_bytes:
        raise RequestError(
            f"structured {shape.kind} has {source_bytes} bytes, at most {config.max_source_bytes} "
            "are accepted: shorten it, or raise grammar.max_source_bytes"
        )
    if shape.kind == "json":
        try:
            return _json(shape, config, loosened, as_rules)
        except RecursionError:
            raise RequestError("structured json cannot be used: nested too deeply") from None
    rules = _rules(shape)
    _check_size(shape, rules, config)
    whole = inline(rules, ROOT, config.max_states)
    if not completes(rules, ROOT):
        raise RequestError(f"structured {shape.kind} matches no text at all")
    program = Program(rules=rules, max_states=config.max_states)
    check = _one_of(shape.choices) if shape.choices else _membership(whole, shape.kind)
    kept = source_bytes if shape.choices or whole is None else size(whole) * _BYTES_PER_STATE
    return Prepared(program, Report(), check, kept)


def _rules(shape: Structured) -> Rules:
    try:
        if shape.regex is not None:
            return {ROOT: parse_regex(shape.regex)}
        if shape.ebnf is not None:
            return parse_ebnf(shape.ebnf)
    except PatternError as error:
        raise RequestError(f"structured regex cannot be used: {error}") from None
    except GrammarError as error:
        raise RequestError(f"structured ebnf cannot be used: {error}") from None
    return {ROOT: alt(*map(literal, shape.choices))}


def _check_size(shape: Structured, rules: Rules, config: GrammarConfig) -> None:
    total = sum(size(node) for node in rules.values())
    if total > config.max_states:
        raise RequestError(
            f"structured {shape.kind} has {_about(total)} characters with its repetitions written "
            f"out, at most {config.max_states} are accepted: repeat less, or raise "
            "grammar.max_states"
        )


def _about(count: int) -> str:
    return str(count) if count < 10**9 else "more than 10^9"


def _one_of(choices: tuple[str, ...]) -> Callable[[str], str | None]:
    known = frozenset(choices)
    return lambda text: None if text in known else "the output is none of the choices"


def _membership(whole: Node | None, kind: str) -> Callable[[str], str | None]:
    """Return the check of a regular shape; a recursive one is the library's alone."""
    if whole is None:
        return lambda text: None
    node = whole

    @cache
    def automaton() -> Automaton:
        return Automaton(node)

    def check(text: str) -> str | None:
        return None if automaton().matches(text) else f"the output does not match the {kind}"

    return check


def _json(
    shape: Structured, config: GrammarConfig, loosened: Loosened | None, as_rules: bool
) -> Prepared:
    found = rewrite(
        shape.text, closed=shape.closed, max_states=config.max_states, loosened=loosened
    )
    report, rules = found.report, None
    if as_rules and not report.problems(False):
        rules, losses = json_rules(found.schema, config.max_whitespace, make_test(found.schema))
        report = _with_losses(report, losses)
        if not completes(rules, ROOT):
            raise RequestError("structured json cannot be used: no value satisfies it")
        rules = prune(rules, ROOT)
    problems = report.problems(shape.strict)
    if problems:
        how = "strictly " if shape.strict and not report.problems(False) else ""
        raise RequestError(f"structured json cannot be {how}enforced", problems)
    program = Program(
        rules=rules,
        schema=found.schema if rules is None else None,
        max_whitespace=config.max_whitespace,
        max_states=config.max_states,
    )
    kept = len(shape.text) * _BYTES_PER_CHARACTER + found.num_states * _BYTES_PER_STATE
    return Prepared(program, report, make_check(found.original, found.draft), kept)


def _with_losses(report: Report, losses: list[Loss]) -> Report:
    """Return a report in which what rules do not say in full is approximated."""
    lost = {(loss.pointer, loss.keyword): loss.note for loss in losses}
    findings = []
    for finding in report.findings:
        parent = finding.pointer.removesuffix(f"/{escape(finding.keyword)}")
        note = lost.pop((parent, finding.keyword), None)
        if note is not None:
            finding = replace(finding, status=Status.APPROXIMATED, note=note)
        findings.append(finding)
    for (pointer, keyword), note in lost.items():
        place = f"{pointer}/{escape(keyword)}"
        findings.append(Finding(place, keyword, Status.APPROXIMATED, note))
    return Report(tuple(findings))
