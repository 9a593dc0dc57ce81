"""Command lines of the pages: what stands there is what the command takes."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from deepinfer.cli.main import build_parser

ROOT = Path(__file__).parents[2]


def lines() -> Iterator[tuple[str, str]]:
    """Yield page and command; where a block shows output, commands begin with `$`."""
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))):
        for block in page.read_text(encoding="utf-8").split("```")[1::2]:
            prompt = "$ " if "\n$ " in block else ""
            for line in block.splitlines():
                if line.startswith(f"{prompt}deepinfer "):
                    yield page.name, line.removeprefix(prompt)


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
