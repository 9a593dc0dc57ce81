"""Command lines of the pages: what stands there is what the command takes."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from deepinfer.cli.main import build_parser

ROOT = Path(__file__).parents[2]


def lines() -> Iterator[tuple[str, str]]:
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))):
        is_code = False
        for line in page.read_text(encoding="utf-8").splitlines():
            if line.startswith("```"):
                is_code = not is_code
            text = line.strip().removeprefix("$ ")
            if is_code and text.startswith("deepinfer "):
                yield page.name, text


def test_command_lines_of_the_pages_are_taken() -> None:
    found = list(lines())
    assert len(found) > 20
    for page, text in found:
        words = shlex.split(text, comments=True)[1:]
        try:
            build_parser(words[0]).parse_args(words)
        except (Exception, SystemExit) as error:
            pytest.fail(f"{page}: {text}: {error}")


def test_kept_figures_that_the_pages_show_are_there() -> None:
    for page, text in lines():
        words = shlex.split(text, comments=True)
        if words[1:3] == ["bench", "show"] and len(words) > 3 and not words[3].startswith("-"):
            assert (ROOT / words[3]).is_file(), (page, text)
