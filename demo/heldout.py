"""Pack what `deepinfer eval` measures on: the whole held-out natural text and fresh generated JSON.

Both are checked against the training material first: no held-out document may equal a training document or share
64 bytes with one, no generated document may equal a generated training document. Nothing is chosen by hand: natural
text goes in whole, generated text is the first documents of a fixed seed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import lzma
import random
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from demo import synth
from demo.data import Document, read_jsonl, window_hashes
from demo.tokens import CATEGORIES

SEED = "deepinfer eval 1"
GENERATED = {"json": 64, "json_chat": 96}
_MAKERS = {"json": synth.json_document, "json_chat": synth.json_chat}


def overlap(train: list[Document], held: list[Document]) -> tuple[int, int]:
    """Return (held-out documents that equal a training document, their runs of 64 bytes that training shares)."""
    digests = {hashlib.sha256(d.text.encode()).digest() for d in train}
    equal = sum(hashlib.sha256(d.text.encode()).digest() in digests for d in held)
    wanted = np.concatenate([window_hashes(d.text.encode()) for d in held])
    order = np.unique(wanted)
    hits = np.zeros(order.size, bool)
    for document in train:
        hashes = window_hashes(document.text.encode())
        at = np.minimum(np.searchsorted(order, hashes), order.size - 1)
        hits[at[order[at] == hashes]] = True
    return equal, int(np.isin(wanted, order[hits]).sum())


def generated(known: set[bytes], tokenizer: Tokenizer) -> list[dict[str, str]]:
    """Return the first generated documents of each kind whose token ids are not among `known`."""
    found = []
    for kind, count in GENERATED.items():
        rng = random.Random(f"{SEED}/{kind}")
        kept = 0
        while kept < count:
            text = _MAKERS[kind](rng)
            if _key(tokenizer, text) not in known:
                found.append({"kind": kind, "text": text})
                kept += 1
    return found


def _key(tokenizer: Tokenizer, text: str) -> bytes:
    return np.array(tokenizer.encode(text, add_special_tokens=False).ids, np.uint16).tobytes()


def training_keys(file: Path) -> set[bytes]:
    """Return the token ids of every generated JSON document that a model was trained on."""
    data = np.load(file)
    ids, lengths, categories = data["ids"], data["lengths"], data["categories"]
    starts = np.cumsum(lengths) - lengths
    wanted = np.flatnonzero(np.isin(categories, [CATEGORIES.index(kind) for kind in GENERATED]))
    return {ids[starts[i] : starts[i] + lengths[i]].tobytes() for i in wanted}


def write(file: Path, rows: list[dict[str, str]]) -> None:
    """Write JSON lines, compressed."""
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    file.write_bytes(lzma.compress(text.encode(), preset=9 | lzma.PRESET_EXTREME))
    print(
        f"{file}: {len(rows)} documents, {len(text.encode())} bytes, {file.stat().st_size} packed"
    )


def main() -> None:
    """Check and pack."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, default=Path(".carry"))
    parser.add_argument("--out", type=Path, default=Path("src/deepinfer/data/eval"))
    args = parser.parse_args()
    held = sorted(read_jsonl(args.work / "heldout.jsonl"), key=lambda d: (d.source, d.name))
    equal, shared = overlap(read_jsonl(args.work / "train.jsonl"), held)
    print(
        f"{len(held)} held-out documents, {equal} equal a training document, {shared} shared runs of 64 bytes"
    )
    if equal or shared:
        raise SystemExit("held-out text occurs in the training text")
    tokenizer = Tokenizer.from_file(str(args.work / "tokens/tokenizer.json"))
    known = training_keys(args.work / "tokens/tokens.npz")
    args.out.mkdir(parents=True, exist_ok=True)
    write(
        args.out / "heldout.jsonl.xz",
        [{"source": d.source, "name": d.name, "text": d.text} for d in held],
    )
    write(args.out / "generated.jsonl.xz", generated(known, tokenizer))


if __name__ == "__main__":
    main()
