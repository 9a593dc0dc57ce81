"""The packaged texts that `deepinfer eval` measures on: held out, and generated JSON (pure)."""

from __future__ import annotations

import hashlib
import json
import lzma
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Final, TypeVar

__all__ = [
    "Document",
    "data_sha256",
    "generated_documents",
    "held_out_documents",
    "json_chat_parts",
    "pick",
]

_FILES: Final = ("heldout.jsonl.xz", "generated.jsonl.xz")
_SCHEMA_MARK: Final = "adhere to the following schema to reply:\n"
_ASK_MARK: Final = "<｜User｜>"
_ANSWER_MARK: Final = "</think>"
_END_MARK: Final = "<｜end▁of▁sentence｜>"
_Item = TypeVar("_Item")


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """One document; generated ones spell their special tokens out."""

    source: str
    name: str
    text: str


def _read(name: str) -> bytes:
    return (files("deepinfer") / "data" / "eval" / name).read_bytes()


def _lines(name: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in lzma.decompress(_read(name)).decode().splitlines()]


def data_sha256() -> str:
    """Return a digest of the packaged texts, which every figure names."""
    digest = hashlib.sha256()
    for name in _FILES:
        digest.update(_read(name))
    return digest.hexdigest()[:16]


def held_out_documents() -> list[Document]:
    """Return every held-out document of natural text, by source and name."""
    return [Document(**row) for row in _lines(_FILES[0])]


def generated_documents(kind: str) -> list[Document]:
    """Return the generated documents of a kind, `json` or `json_chat`."""
    rows = [row for row in _lines(_FILES[1]) if row["kind"] == kind]
    return [
        Document(source=kind, name=f"{kind}-{i}", text=row["text"]) for i, row in enumerate(rows)
    ]


def json_chat_parts(text: str) -> tuple[str, dict[str, object], str]:
    """Split a generated chat into the prompt, the schema of its answer, and the answer."""
    prompt, answer = text.rsplit(_ANSWER_MARK, 1)
    schema = prompt.split(_SCHEMA_MARK, 1)[1].split(_ASK_MARK, 1)[0]
    return prompt + _ANSWER_MARK, json.loads(schema), answer.removesuffix(_END_MARK)


def pick(
    items: Iterable[_Item], limit: int | None, name: Callable[[_Item], str]
) -> Sequence[_Item]:
    """Return `limit` items (None = all) in order, those whose names have the smallest hashes."""
    found = list(items)
    if limit is None or len(found) <= limit:
        return found
    order = sorted(
        range(len(found)), key=lambda i: hashlib.sha256(name(found[i]).encode()).digest()
    )
    return [found[i] for i in sorted(order[:limit])]
