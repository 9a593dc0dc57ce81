"""Seeded tasks that ask a model to find something far back: facts in text, lists to copy (pure).

They use the phrases of the training recipe (`demo/synth.py`), with names and codes drawn anew, and
held-out text between the facts.
"""

from __future__ import annotations

import random
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

__all__ = ["Answer", "Case", "copy_case", "filler_of", "needle_case"]

BOS: Final = "<｜begin▁of▁sentence｜>"
EOS: Final = "<｜end▁of▁sentence｜>"
USER: Final = "<｜User｜>"
ASSISTANT: Final = "<｜Assistant｜></think>"
_COLORS: Final = (
    "amber black blue bronze brown coral crimson gold green grey jade olive orange pink".split()
)
_ANIMALS: Final = (
    "badger bear beaver crane deer eagle falcon fox goose hawk heron lion moose otter".split()
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A run of the text that the model must predict from an earlier one.

    start, end  bytes of the answer
    source      byte at which the earlier one begins
    """

    start: int
    end: int
    source: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A text, special tokens spelled out, and the answers in it."""

    text: str
    answers: tuple[Answer, ...]


class _Writer:
    """Joins text and knows how many bytes there are."""

    def __init__(self) -> None:
        self._parts: list[str] = []
        self.size = 0

    def add(self, text: str) -> tuple[int, int]:
        """Append a text; returns its first byte and the one behind it."""
        start = self.size
        self._parts.append(text)
        self.size += len(text.encode())
        return start, self.size

    def text(self) -> str:
        return "".join(self._parts)


def filler_of(texts: Sequence[str]) -> Callable[[random.Random, int], str]:
    """Return a function that draws n characters from one of the texts, from a word's start."""

    def draw(rng: random.Random, characters: int) -> str:
        fitting = [text for text in texts if len(text) > characters + 40]
        text = rng.choice(fitting)
        start = rng.randrange(len(text) - characters - 20)
        start = text.find(" ", start) + 1
        return text[start : start + characters].strip()

    return draw


def needle_case(
    rng: random.Random, filler: Callable[[random.Random, int], str], characters: int, facts: int
) -> Case:
    """Return a chat: codes spread over about `characters` of text, then a question for each.

    Questions come in random order, so that the distances from fact to answer spread.
    """
    keys = rng.sample([f"{color} {animal}" for color in _COLORS for animal in _ANIMALS], facts)
    codes = {key: "".join(rng.choice(string.digits) for _ in range(4)) for key in keys}
    out = _Writer()
    out.add(BOS + USER + filler(rng, characters // (facts + 1)))
    places = {}
    for key in keys:
        out.add(f"\nThe secret code of the {key} is ")
        places[key], _ = out.add(codes[key])
        out.add(f".\n{filler(rng, characters // (facts + 1))}")
    answers = []
    for turn, key in enumerate(rng.sample(keys, facts)):
        out.add("\n\n" if turn == 0 else EOS + USER)
        out.add(f"What is the secret code of the {key}?{ASSISTANT}The secret code of the {key} is ")
        start, end = out.add(codes[key])
        answers.append(Answer(start=start, end=end, source=places[key]))
        out.add(".")
    return Case(text=out.text(), answers=tuple(answers))


def copy_case(rng: random.Random, words: int) -> Case:
    """Return a list of random words of 2 to 5 letters and digits, and its copy.

    An answer is one word with the space before it; the first word is not asked, for nothing says
    before it where the copy begins.
    """
    alphabet = string.ascii_lowercase + string.digits
    drawn = ["".join(rng.choice(alphabet) for _ in range(rng.randint(2, 5))) for _ in range(words)]
    out = _Writer()
    out.add(f"{BOS}Words:")
    places = [out.add(f" {word}")[0] for word in drawn]
    out.add("\nAgain:")
    answers = []
    for index, word in enumerate(drawn):
        start, end = out.add(f" {word}")
        if index:
            answers.append(Answer(start=start, end=end, source=places[index]))
    out.add("\n")
    return Case(text=out.text(), answers=tuple(answers))
