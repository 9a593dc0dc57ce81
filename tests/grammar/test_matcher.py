"""Triggers, bounds, ends, drafts and steps back, under both libraries."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.grammar.helpers import (
    BACKENDS,
    END,
    PIECES,
    legal,
    matcher,
    service,
    vocabulary,
    walk,
)

from deepinfer import Structured
from deepinfer.config.engine import GrammarConfig
from deepinfer.grammar.backend import DEAD_END, Vocabulary, bit_words
from deepinfer.grammar.compiler import GrammarService
from deepinfer.grammar.matcher import Matcher, fill_rows

A, B, C, ONE = ord("a"), ord("b"), ord("c"), ord("1")
NUM_IDS = len(vocabulary().pieces)
both = pytest.mark.parametrize("backend", BACKENDS)


def state(at: Matcher) -> tuple[list[int], bool, bool]:
    """Everything that can be seen of a matcher."""
    return legal(at), at.is_complete(), at.is_free


@both
def test_an_end_is_legal_exactly_where_the_shape_is_complete(backend: str) -> None:
    at = matcher(backend, Structured(regex="ab?"))
    assert END not in legal(at) and not at.is_complete()
    assert at.accept(A)
    assert legal(at) == [B, END] and at.is_complete() and not at.is_finished()
    assert at.accept(B)
    assert legal(at) == [END] and at.is_finished()
    assert at.check() is None


@both
def test_every_end_of_the_request_counts(backend: str) -> None:
    x, y, z = b"xyz"
    at = matcher(backend, Structured(regex="xy?z?"), ends=(END, z))
    assert legal(at) == [x]
    at.accept(x)
    assert legal(at) == [y, z, END]
    assert at.try_drafts([z]) == 0


@both
def test_ids_without_text_are_never_legal(backend: str) -> None:
    at = matcher(backend, Structured(regex="(?s:.*)"))
    options = legal(at)
    assert NUM_IDS - 1 not in options
    assert not at.accept(NUM_IDS - 1)
    assert not at.accept(NUM_IDS + 5) and not at.accept(-1)
    assert set(range(128)) <= set(options)


@both
def test_an_illegal_id_changes_nothing(backend: str) -> None:
    at = matcher(backend, Structured(ebnf='root ::= "(" root? ")"'))
    assert at.accept(ord("("))
    before = state(at)
    for wrong in (A, ord("]"), 257):
        assert not at.accept(wrong)
    assert state(at) == before and at.problem is None


@both
def test_half_characters_are_followed(backend: str) -> None:
    at = matcher(backend, Structured(regex="é!"))
    half = PIECES.index(b"hello") + len(PIECES) - 257 - 1  # the piece b"\xc3"
    assert vocabulary().pieces[half] == b"\xc3"
    assert half in legal(at) and at.accept(half)
    assert legal(at) == [0xA9]
    assert at.accept(0xA9) and at.accept(ord("!")) and at.check() is None


@both
def test_output_is_free_up_to_the_trigger(backend: str) -> None:
    at = matcher(backend, Structured(regex="1", trigger=[A, B]))
    free = [i for i in range(NUM_IDS) if i != END]
    for token_id, still_free in ((C, True), (A, True), (A, True), (NUM_IDS - 1, True), (A, True)):
        assert legal(at) == free and not at.is_complete()
        assert at.accept(token_id) and at.is_free is still_free
    assert not at.accept(END)
    assert at.accept(B) and not at.is_free
    assert legal(at) == [ONE]
    assert at.check() == "the output ended before it was complete"
    assert at.accept(ONE) and at.check() is None


@both
def test_a_bound_forces_the_trigger(backend: str) -> None:
    at = matcher(backend, Structured(regex="1", trigger=[A, B, A], bound=C))
    assert at.accept(ONE) and at.accept(C)
    for wanted in (A, B, A):
        assert legal(at) == [wanted]
        assert not at.accept(C)
        assert at.accept(wanted)
    assert legal(at) == [ONE]


@both
def test_a_bound_within_the_trigger_counts_as_its_beginning(backend: str) -> None:
    at = matcher(backend, Structured(regex="1", trigger=[A, B], bound=A))
    assert at.accept(A)
    assert legal(at) == [B]
    last = matcher(backend, Structured(regex="1", trigger=[A], bound=A))
    assert last.accept(A) and legal(last) == [ONE]


@both
def test_an_end_before_the_trigger_is_a_problem(backend: str) -> None:
    assert "before the trigger" in str(matcher(backend, Structured(regex="1", trigger=[A])).check())


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from([A, B]), min_size=1, max_size=4), st.text("ab", max_size=20))
def test_triggers_are_found_as_a_search_finds_them(trigger: list[int], text: str) -> None:
    at = matcher("llguidance", Structured(regex="[ab]*", trigger=trigger))
    for idx, char in enumerate(text):
        found = bytes(trigger) in text[:idx].encode()
        assert at.is_free is not found
        assert at.accept(ord(char))
    assert at.is_free is (bytes(trigger) not in text.encode())


SHAPES = [
    Structured(regex=r"[a-c]{2,6}(1|2)*"),
    Structured(ebnf='root ::= "(" root? ")" | "a" root'),
    Structured(json={"type": "object", "properties": {"a": {"type": "integer"}}}),
    Structured(choice=["hello", "he", "abc"], trigger=[A, B], bound=C),
]


@both
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.kind)
def test_stepping_back_undoes_any_run_of_steps(backend: str, shape: Structured) -> None:
    rng = random.Random(shape.kind)
    for _ in range(10):
        at = matcher(backend, shape)
        trail = [state(at)]
        for _ in range(12):
            options = [i for i in legal(at) if i != END]
            if options and rng.random() < 0.7:
                assert at.accept(rng.choice(options))
                trail.append(state(at))
            elif len(trail) > 1:
                count = rng.randrange(1, len(trail))
                at.rollback(count)
                del trail[-count:]
            assert state(at) == trail[-1]


@both
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.kind)
def test_drafts_are_taken_up_to_the_first_illegal_one(backend: str, shape: Structured) -> None:
    rng = random.Random(shape.kind)
    for _ in range(10):
        at, twin = matcher(backend, shape), matcher(backend, shape)
        before = state(at)
        drafts: list[int] = []
        for _ in range(rng.randrange(5)):
            options = [i for i in legal(twin) if i != END]
            if not options:
                break
            drafts.append(rng.choice(options))
            assert twin.accept(drafts[-1])
        wrong = [i for i in range(256) if i not in legal(twin)]
        taken = at.try_drafts([*drafts, wrong[0] if wrong else END, A, A])
        assert taken == len(drafts)
        assert state(at) == state(twin)
        at.rollback(taken)
        assert state(at) == before


@both
def test_the_switch_may_fall_inside_a_run_of_drafts(backend: str) -> None:
    at = matcher(backend, Structured(regex="12*", trigger=[A, B]))
    assert at.try_drafts([C, A, B, ONE, ord("2"), C]) == 5
    assert not at.is_free
    at.rollback(3)
    assert at.is_free and at.accept(B) and ONE in legal(at)


@both
def test_many_rows_are_filled_as_one(backend: str) -> None:
    rng = random.Random(3)
    found = [matcher(backend, rng.choice(SHAPES)) for _ in range(12)]
    for at in found:
        for _ in range(rng.randrange(6)):
            options = [i for i in legal(at) if i != END]
            if options:
                at.accept(rng.choice(options))
    bits = np.zeros((15, bit_words(NUM_IDS)), np.uint32)
    rows = rng.sample(range(15), 12)
    fill_rows(list(zip(found, rows, strict=True)), bits)
    for at, row in zip(found, rows, strict=True):
        alone = np.zeros(bit_words(NUM_IDS), np.uint32)
        at.fill(alone)
        assert (bits[row] == alone).all()
    untouched = [row for row in range(15) if row not in rows]
    assert not bits[untouched].any()


@both
def test_a_dead_end_is_a_problem_of_its_request_only(backend: str) -> None:
    """No id of the vocabulary spells the character that must come."""
    found = [matcher(backend, Structured(regex="[a-c]+")) for _ in range(2)]
    stuck = found[0]
    bits = np.zeros((2, bit_words(NUM_IDS)), np.uint32)
    fill_rows([(found[0], 0), (found[1], 1)], bits)
    stuck.give_up(bits[0], "nothing fits")
    assert bits[0].any() and stuck.problem == "nothing fits"
    assert not stuck.accept(END) and found[1].problem is None and found[1].accept(A)


def test_a_walk_ends_in_a_text_of_the_shape() -> None:
    assert walk(matcher("llguidance", Structured(choice=["abc"])), random.Random(1)) == "abc"


class Failing:
    """A position that fails in one of its methods."""

    def __init__(self, where: str) -> None:
        self.where = where

    def _do(self, name: str, value: bool) -> bool:
        if self.where == name:
            raise ValueError(f"broken in {name}")
        return value

    def accept(self, token_id: int) -> bool:
        return self._do("accept", True)

    def rollback(self, count: int) -> None:
        self._do("rollback", True)

    def is_complete(self) -> bool:
        return self._do("is_complete", True)

    def is_stopped(self) -> bool:
        return self._do("is_stopped", False)

    def start(self) -> Failing:
        return self

    num_bytes = 0


@pytest.mark.parametrize("where", ["accept", "rollback", "is_complete", "is_stopped"])
def test_whatever_a_library_throws_breaks_one_matcher_and_no_step(where: str) -> None:
    backend = service("llguidance").backend
    at = Matcher(backend, Failing(where), vocabulary(), (END,))
    taken = at.try_drafts([A, B])
    at.accept(A)
    at.is_finished()
    at.rollback(taken)
    assert taken == (0 if where == "accept" else 2)
    if where == "rollback":  # it has started anew
        assert at.problem is None and at.accept(A)
    else:
        assert at.problem == f"broken in {where}" and not at.accept(A)
    if where == "is_complete":
        assert at.check() == "the output could not be checked: ValueError: broken in is_complete"


def test_a_last_word_that_fails_is_an_error_of_the_output() -> None:
    def fail(text: str) -> str | None:
        raise RuntimeError("no word")

    backend = service("llguidance").backend
    at = Matcher(backend, Failing(""), vocabulary(), (END,), last_word=fail)
    assert at.check() == "the output could not be checked: RuntimeError: no word"


@both
def test_a_dead_end_behind_drafts_is_left_again(backend: str) -> None:
    few = Vocabulary((b"a", b"b", b"c", b""), 3)
    own = GrammarService(GrammarConfig(backend=backend, threads=1), lambda: few)
    prepared, compiled = own.compile(Structured(regex="c(a|bxc)"))
    at = Matcher(own.backend, compiled, few, (3,), last_word=prepared.last_word)
    assert at.accept(2)
    at.try_drafts([1])
    row = np.zeros(1, np.uint32)
    at.fill(row)
    assert at.problem == DEAD_END
    at.rollback(1)
    assert at.problem is None and at.accept(0) and at.is_finished() and at.check() is None


def test_states_that_run_out_end_one_request() -> None:
    """Also behind drafts, where the library cannot even step back."""
    own = GrammarService(GrammarConfig(threads=1, max_states=300), vocabulary)
    prepared, compiled = own.compile(Structured(regex="(a|b)*a(a|b){40}c"))
    rng = random.Random(1)
    at = Matcher(own.backend, compiled, vocabulary(), (END,), last_word=prepared.last_word)
    for _ in range(400):
        drafts = [rng.choice([A, B]) for _ in range(3)]
        taken = at.try_drafts(drafts)
        fill_rows([(at, 0)], np.zeros((1, bit_words(NUM_IDS)), np.uint32))
        at.rollback(taken)
        if at.problem or not at.accept(drafts[0]):
            break
    assert at.problem and "more states than grammar.max_states" in at.problem
    assert not at.accept(A)
