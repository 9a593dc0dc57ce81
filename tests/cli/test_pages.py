"""The pages: their commands are what the command line takes, links and names lead somewhere."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from deepinfer.cli.main import COMMANDS, build_parser

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *ROOT.glob("benchmarks/*.md")])
LINK = re.compile(r"(?<!`)!?\[[^\]\n]*\]\(([^)\s]+)\)")
MODULE = re.compile(r"python3? (?:-\w )*-m ((?:deepinfer|tests|demo)[\w.]*)")
TARGET = re.compile(r"(?:^|`)make ((?:[a-z][a-z-]*)(?: [a-z][a-z-]*)*)", re.M)
SOURCE = re.compile(r"`((?:src/deepinfer/|tests/|demo/|examples/|benchmarks/)[\w./-]+\.\w+)`")


def lines() -> Iterator[tuple[str, str]]:
    """Yield page and command; where a block shows output, commands begin with `$`."""
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))):
        for block in page.read_text(encoding="utf-8").split("```")[1::2]:
            prompt = "$ " if "\n$ " in block else ""
            for line in block.replace("\\\n", " ").splitlines():
                if line.startswith(f"{prompt}deepinfer "):
                    yield page.name, line.removeprefix(prompt)
        for line in re.findall(r"^    (deepinfer [^\n]*)", prose(page).replace("\\\n", " "), re.M):
            yield page.name, line


def test_command_lines_of_the_pages_are_taken() -> None:
    found = list(lines())
    assert len(found) > 20
    for page, text in found:
        words = shlex.split(text, comments=True)[1:]
        try:
            build_parser(words[0]).parse_args(words)
        except (Exception, SystemExit) as error:
            pytest.fail(f"{page}: {text}: {error}")


def test_the_page_of_commands_names_them_all() -> None:
    page = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    for command in COMMANDS:
        assert f"| `{command}" in page, command
        (groups,) = build_parser(command)._subparsers._group_actions  # type: ignore[union-attr]
        parts = groups.choices[command]._subparsers  # type: ignore[index]
        for form in parts._group_actions[0].choices if parts is not None else ():
            assert f"`{command} {form}" in page, (command, form)


def test_kept_figures_that_the_pages_show_are_there() -> None:
    for page, text in lines():
        words = shlex.split(text, comments=True)
        if words[1:3] == ["bench", "show"] and len(words) > 3 and not words[3].startswith("-"):
            assert (ROOT / words[3]).is_file(), (page, text)


def prose(page: Path) -> str:
    """Return a page without its code blocks."""
    return "".join(page.read_text(encoding="utf-8").split("```")[::2])


def anchors(page: Path) -> set[str]:
    """Return what links into a page may name: its headings, as forges write them."""
    titles = re.findall(r"^#+ (.+)$", prose(page), re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_links_lead_somewhere() -> None:
    broken, count = [], 0
    for page in PAGES:
        for link in LINK.findall(prose(page)):
            if link.startswith(("http://", "https://")):
                continue
            count += 1
            name, _, anchor = link.partition("#")
            target = (page.parent / name).resolve() if name else page
            if not target.exists() or not target.is_relative_to(ROOT):
                broken.append(f"{page.relative_to(ROOT)}: {link}")
            elif anchor and (target.suffix != ".md" or anchor not in anchors(target)):
                broken.append(f"{page.relative_to(ROOT)}: {link}: no such heading")
    assert not broken and count > 80, "\n".join([*broken, f"{count} links"])


def test_every_page_is_listed() -> None:
    listed = set(LINK.findall(prose(ROOT / "docs" / "README.md")))
    assert {page.name for page in (ROOT / "docs").glob("*.md")} - {"README.md"} <= listed


def test_modules_and_targets_and_files_that_the_pages_name_are_there() -> None:
    rules = (ROOT / "Makefile").read_text() + (ROOT / "demo" / "Makefile.inc").read_text()
    known = set(re.findall(r"^([a-z][a-z-]*):", rules, re.M))
    missing = []
    for page in PAGES:
        if page.name == "CHANGELOG.md":
            continue  # names what was there then
        text = page.read_text(encoding="utf-8")
        code = "\n".join([*text.split("```")[1::2], *re.findall(r"`[^`\n]+`", prose(page))])
        missing += [f"{page.name}: {m}" for m in MODULE.findall(text) if not has_module(m)]
        for words in TARGET.findall(code):
            missing += [f"{page.name}: make {w}" for w in words.split() if w not in known]
        missing += [f"{page.name}: {f}" for f in SOURCE.findall(text) if not (ROOT / f).exists()]
    assert not missing, "\n".join(missing)


def has_module(name: str) -> bool:
    """Whether a module can be found; nothing is imported but its packages."""
    path = ROOT / (f"src/{name}" if name.startswith("deepinfer") else name).replace(".", "/")
    return path.with_suffix(".py").is_file() or (path / "__main__.py").is_file()


def test_the_tour_names_what_is_there() -> None:
    """Files stand there, and names that follow one in the second column are defined in it."""
    package, missing, count = ROOT / "src" / "deepinfer", [], 0
    everything = "".join(file.read_text(encoding="utf-8") for file in package.rglob("*.py"))
    for line in (ROOT / "docs" / "tour.md").read_text(encoding="utf-8").splitlines():
        where = re.findall(r"`([^`]+)`", line.split("|")[2]) if line.startswith("|") else []
        source = ""
        for word in [*where, *re.findall(r"`([^`]+\.py)`", line)]:
            if word.endswith(".py"):
                found = [*package.glob(word), *package.glob(f"model/fast/{word}")]
                source = found[0].read_text(encoding="utf-8") if found else ""
                count += 1
                if not found:
                    missing.append(word)
            elif source and not re.search(rf"(def|class) {word.rpartition('.')[2]}\b", source):
                missing.append(f"{word} of {' '.join(where)}")
        for owner, name in re.findall(r"`([A-Z]\w+)\.(\w+)`", line):
            if not re.search(rf"class {owner}\b[\s\S]*?def {name}\b", everything):
                missing.append(f"{owner}.{name}")
    assert not missing and count > 20, "\n".join(missing)
