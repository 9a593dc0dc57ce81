"""The flags of structured output: `--json-schema`, `--regex`, `--ebnf`, `--choice` and theirs."""

from __future__ import annotations

import argparse
from pathlib import Path

from deepinfer.cli.common import UsageError
from deepinfer.errors import RequestError, json_problem
from deepinfer.grammar.report import Report, Status
from deepinfer.grammar.spec import Structured

__all__ = ["add_shape_flags", "approximations", "shape_of"]


def add_shape_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags; at most one shape can be given."""
    group = parser.add_argument_group("structured output, one of the first four")
    shapes = group.add_mutually_exclusive_group()
    shapes.add_argument("--json-schema", metavar="FILE", help="JSON that satisfies a schema")
    shapes.add_argument("--regex", metavar="PATTERN", help="a text that matches, as a whole")
    shapes.add_argument("--ebnf", metavar="FILE", help="a text of a GBNF grammar")
    shapes.add_argument("--choice", metavar="A,B", help="one of some texts")
    group.add_argument("--trigger", metavar="TEXT", help="output is free up to this text")
    group.add_argument("--bound", metavar="TEXT", help="one token that forces the trigger")
    group.add_argument(
        "--strict", action="store_true", help="refuse a schema that can only be approximated"
    )


def shape_of(args: argparse.Namespace) -> Structured | None:
    """Return the shape that the flags gave, or None.

    Raises UsageError for flags that do not fit together, RequestError for a file that cannot be
    used.
    """
    given: dict[str, str | list[str]] = {}
    for name, flag in (("json", "json_schema"), ("ebnf", "ebnf")):
        if getattr(args, flag) is not None:
            given[name] = _read(f"--{flag.replace('_', '-')}", getattr(args, flag))
    if args.regex is not None:
        given["regex"] = args.regex
    if args.choice is not None:
        given["choice"] = args.choice.split(",")
        if "" in given["choice"]:
            raise UsageError(
                f"--choice {args.choice!r} holds an empty text, expected texts with commas between "
                "them, as in yes,no; an empty answer or a comma in a text needs --regex or --ebnf"
            )
    for name in ("trigger", "bound"):
        if getattr(args, name) == "":
            raise UsageError(f"--{name} is empty: give the text, or leave the flag out")
    if not given:
        lone = [f"--{name}" for name in ("trigger", "bound", "strict") if getattr(args, name)]
        if lone:
            raise UsageError(f"{lone[0]} needs one of --json-schema, --regex, --ebnf and --choice")
        return None
    try:
        return Structured(
            **given,  # type: ignore[arg-type]  # texts and a list, by their names
            trigger=args.trigger or (),
            bound=args.bound,
            strict=args.strict,
        )
    except RequestError as error:
        raise UsageError(str(error)) from error


def approximations(report: Report) -> list[str]:
    """Return one line for each keyword that is only approximated."""
    return [str(finding) for finding in report.of(Status.APPROXIMATED)]


def _read(flag: str, name: str) -> str:
    try:
        return Path(name).expanduser().read_text("utf-8")
    except OSError as error:
        raise RequestError(f"cannot read {flag} {name}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise RequestError(f"cannot read {flag} {name}: {json_problem(error)}") from error
