"""Rows of tokens for training and evaluation.

A row holds `length + 1` ids. Natural text is cut anywhere (every piece starts with BOS, as a prompt would); generated
documents stay whole, because a retrieval task without its facts teaches the wrong thing.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from queue import Queue

import numpy as np

from demo.tokens import CATEGORIES

BOS_ID, EOS_ID, PAD_ID = 0, 1, 2
_CUT_ANYWHERE = (0, 1)  # natural, wordnet


def repeats(ids: np.ndarray) -> np.ndarray:
    """Return how far back this token after the three before it came first, of every uint16 id, int64, 0 = they are the first."""
    distance = np.zeros(ids.size, np.int64)
    if ids.size > 3:
        runs = np.ascontiguousarray(np.lib.stride_tricks.sliding_window_view(ids, 4))
        _, first, which = np.unique(
            runs.view(np.uint64)[:, 0], return_index=True, return_inverse=True
        )
        distance[3:] = np.arange(which.size) - first[which]
    return distance


class Corpus:
    """The token ids of every document, opened once."""

    def __init__(self, path: Path) -> None:
        data = np.load(path)
        self.ids: np.ndarray = data["ids"]
        self.lengths: np.ndarray = data["lengths"]
        self.bytes: np.ndarray = data["bytes"]
        self.categories: np.ndarray = data["categories"]
        self.starts = np.cumsum(self.lengths) - self.lengths
        self.marks = np.ones(self.ids.size, np.uint8)
        self.digits: np.ndarray | None = None
        self.needles = {int(s) for s in self.starts[self.categories == CATEGORIES.index("needle")]}
        self.lists: dict[int, np.ndarray] = {}

    def mark(
        self,
        digits: set[int],
        weight: int,
        copied: int = 0,
        pieces: Sequence[Sequence[int]] = (),
    ) -> None:
        """Fill `marks`: the loss weight of every token, +128 in natural text and glosses, +64 in glosses.

        The digits of a repeated code weigh `weight`. In copies, with `copied` > 0, what is copied weighs that much, the end 1
        and the list before it, which nothing predicts, 0; `pieces` are sets of tokens that may take each other's place there.
        """
        self.pieces = [np.array(p, np.uint16) for p in pieces if len(p)]
        for index in np.flatnonzero(self.categories == CATEGORIES.index("copy")) if copied else ():
            first, size = int(self.starts[index]), int(self.lengths[index])
            back = repeats(self.ids[first : first + size])
            later = np.flatnonzero(back)
            marks = np.zeros(size, np.uint8)
            marks[later] = copied
            marks[-2:] = np.maximum(marks[-2:], 1)
            self.marks[first : first + size] = marks
            inside = np.zeros(size, bool)
            inside[later] = inside[later - back[later]] = True
            self.lists[first] = inside
        self.digits = np.array(sorted(digits), np.uint16)
        is_digit = np.isin(self.ids, self.digits)
        for index in np.flatnonzero(self.categories == CATEGORIES.index("needle")):
            first, last = int(self.starts[index]), int(self.starts[index] + self.lengths[index])
            flags = is_digit[first:last].astype(np.int8)
            edges = np.diff(np.concatenate([[0], flags, [0]]))
            seen: set[bytes] = set()
            for a, b in zip(np.flatnonzero(edges == 1), np.flatnonzero(edges == -1), strict=True):
                if b - a == 4:
                    code = self.ids[first + a : first + b].tobytes()
                    if code in seen:
                        self.marks[first + a : first + b] = weight
                    seen.add(code)
        for index in np.flatnonzero(np.isin(self.categories, _CUT_ANYWHERE)):
            first = int(self.starts[index])
            gloss = self.categories[index] == CATEGORIES.index("wordnet")
            self.marks[first : first + int(self.lengths[index])] += 192 if gloss else 128

    def take(self, start: int, count: int, rng: np.random.Generator) -> np.ndarray:
        """Return `count` ids from `start`; the digits of a retrieval task and the pieces of a copied list change places, so that
        none can be known by heart."""
        ids: np.ndarray = self.ids[start : start + count]
        inside = self.lists.get(start)
        if self.digits is None or (inside is None and start not in self.needles):
            return ids
        table = np.arange(1 << 16, dtype=np.uint16)
        for these in (self.digits, *(self.pieces if inside is not None else ())):
            table[these] = rng.permutation(these)
        moved: np.ndarray = table[ids]
        return moved if inside is None else np.where(inside, moved, ids)

    def document(self, index: int) -> np.ndarray:
        """Return the ids of one document, BOS and EOS included."""
        return self.ids[self.starts[index] : self.starts[index] + self.lengths[index]]


def _empty(width: int) -> np.ndarray:
    return np.stack([np.full(width, PAD_ID, np.uint16), np.zeros(width, np.uint16)])


def epoch(
    corpus: Corpus,
    length: int,
    generated_share: float,
    favoured: float,
    seed: int,
    copies: float = 0.0,
) -> np.ndarray:
    """Return one pass over the natural text, mixed with generated documents: uint16 [R, 2, length + 1], ids and marks.

    `favoured` is the share of needle and copy documents among the generated tokens, `copies` the share of copies alone (they come
    again and again where there are too few); 0 = as they come.
    """
    rng = np.random.default_rng(seed)
    width = length + 1
    pieces: list[tuple[bool, int, int, bool]] = []  # splittable, start, count, wants BOS
    natural = 0
    for index in np.flatnonzero(np.isin(corpus.categories, _CUT_ANYWHERE)):
        start, count = int(corpus.starts[index]), int(corpus.lengths[index])
        natural += count
        cut = int(rng.integers(1, length))
        edges = [0, *range(cut, count, length), count] if count > cut else [0, count]
        pieces += [(True, start + a, b - a, a > 0) for a, b in itertools.pairwise(edges)]
    wanted = natural * generated_share / (1 - generated_share)
    others = np.flatnonzero(~np.isin(corpus.categories, _CUT_ANYWHERE) & (corpus.lengths <= length))
    rng.shuffle(others)
    special = np.isin(
        corpus.categories[others], [CATEGORIES.index("needle"), CATEGORIES.index("copy")]
    )
    parts = [(others, wanted)]
    if favoured:
        parts = [(others[special], wanted * favoured), (others[~special], wanted * (1 - favoured))]
    if copies:
        copying = corpus.categories[others] == CATEGORIES.index("copy")
        lists = others[copying]
        lists = np.tile(lists, 1 + int(wanted * copies / corpus.lengths[lists].sum()))
        parts = [
            (others[special & ~copying], wanted * (favoured - copies)),
            (lists, wanted * copies),
            (others[~special], wanted * (1 - favoured)),
        ]
    for part, amount in parts:
        for index in part[: int(np.searchsorted(np.cumsum(corpus.lengths[part]), amount)) + 1]:
            pieces.append((False, int(corpus.starts[index]), int(corpus.lengths[index]), False))
    order = rng.permutation(len(pieces))
    queue = deque(pieces[i] for i in order)
    aside: deque[tuple[bool, int, int, bool]] = deque()
    rows: list[np.ndarray] = []
    row = _empty(width)
    used = 0
    while queue or aside:
        piece = aside.popleft() if aside and (used == 0 or not queue) else queue.popleft()
        splittable, start, count, bos = piece
        size = count + bos
        if size > width - used:
            if not splittable and used:
                if not queue and used:
                    rows.append(row)
                    row, used = _empty(width), 0
                    aside.appendleft(piece)
                else:
                    aside.append(piece)
                continue
            take = width - used - bos
            if take > 1:
                if count - take > 8:
                    queue.append((True, start + take, count - take, True))
                count = take
                size = count + bos
            else:
                queue.append(piece)
                size = 0
        if size:
            if bos:
                row[0, used] = BOS_ID
            row[0, used + bos : used + size] = corpus.take(start, count, rng)
            row[1, used + bos : used + size] = corpus.marks[start : start + count]
            used += size
        if used >= width - 8 or size == 0:
            rows.append(row)
            row, used = _empty(width), 0
    out = np.stack(rows)
    return out[rng.permutation(len(out))]


def batches(
    corpus: Corpus,
    length: int,
    rows: int,
    generated_share: float,
    favoured: float,
    seed: int,
    skip: int,
    copies: float = 0.0,
) -> Iterator[np.ndarray]:
    """Yield endless batches [rows, 2, length + 1], the first `skip` left out; epochs are made in a thread."""
    queue: Queue[np.ndarray] = Queue(maxsize=2)

    def produce() -> None:
        number = 0
        while True:
            queue.put(epoch(corpus, length, generated_share, favoured, seed + number, copies))
            number += 1

    threading.Thread(target=produce, daemon=True).start()
    while True:
        everything = queue.get()
        for first in range(0, len(everything) - rows + 1, rows):
            if skip > 0:
                skip -= 1
                continue
            yield everything[first : first + rows]


def evaluation_rows(
    corpus: Corpus, category: str, length: int
) -> tuple[np.ndarray, np.ndarray, int]:
    """Return (ids [R, length + 1], counted targets [R, length] bool, bytes of text).

    Documents are cut into runs of at most `length` tokens, each after a BOS; EOS is fed but not counted.
    """
    rows, counted, size = [], [], 0
    for index in np.flatnonzero(corpus.categories == CATEGORIES.index(category)):
        ids = corpus.document(int(index))[1:]
        size += int(corpus.bytes[index])
        for first in range(0, len(ids), length):
            part = ids[first : first + length]
            row = np.full(length + 1, PAD_ID, np.uint16)
            row[0] = BOS_ID
            row[1 : 1 + len(part)] = part
            rows.append(row)
            counted.append((np.arange(length) < len(part)) & (row[1:] != EOS_ID))
    return np.stack(rows), np.stack(counted), size
