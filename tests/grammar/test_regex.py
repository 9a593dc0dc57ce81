"""Patterns mean what Python's `re` says they mean, in linear time."""

from __future__ import annotations

import importlib
import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.grammar.helpers import BACKENDS, error_of, matcher, vocabulary

from deepinfer import Structured
from deepinfer.grammar.nodes import ALL, Automaton, Chars, complement, merge, rust_regex, size
from deepinfer.grammar.regex import PatternError, parse_regex


def python_cases() -> list[tuple[str, str]]:
    """Pattern and text of the cases that come with Python's own tests, where they are installed."""
    try:
        found = importlib.import_module("test.re_tests")
    except ImportError:
        return []
    return [(case[0], case[1]) for case in found.tests]


def test_python_s_own_cases() -> None:
    compared = 0
    for pattern, text in python_cases():
        try:
            expected = re.compile(pattern)
        except re.error:
            with pytest.raises(PatternError):
                parse_regex(pattern)
            continue
        for whole in (True, False):
            try:
                node = parse_regex(pattern, whole=whole)
            except PatternError:
                continue  # references, look-around, word boundaries: each is tested below
            found = expected.fullmatch(text) if whole else expected.search(text)
            assert Automaton(node).matches(text) == (found is not None), (pattern, text, whole)
            compared += 1
    assert compared > 600 or not python_cases()


@pytest.mark.parametrize("backend", BACKENDS)
def test_python_s_own_cases_under_each_library(backend: str) -> None:
    for pattern, text in python_cases()[::4]:
        try:
            expected = re.compile(pattern)
            at = matcher(backend, Structured(regex=pattern))
        except (re.error, AssertionError):
            continue
        taken = all(at.accept(byte) for byte in text.encode())
        assert (taken and at.is_complete()) == (expected.fullmatch(text) is not None), (
            pattern,
            text,
        )


ATOMS = st.sampled_from(
    ["a", "b", "ab", ".", r"\d", r"[ab]", r"[^a]", r"\s", "é", r"(?i:k)", r"\."]
)
PATTERNS = st.recursive(
    ATOMS,
    lambda inner: st.one_of(
        st.tuples(inner, inner).map("".join),
        st.tuples(inner, inner).map(lambda two: f"({two[0]}|{two[1]})"),
        st.tuples(inner, st.sampled_from(["*", "+", "?", "{2}", "{1,2}", "{0,1}?", "*?"])).map(
            lambda two: f"(?:{two[0]}){two[1]}"
        ),
    ),
    max_leaves=6,
)


@settings(max_examples=200, deadline=None)
@given(PATTERNS, st.text("ab1é K\nx.", max_size=6))
def test_random_patterns_match_as_in_python(pattern: str, text: str) -> None:
    assert Automaton(parse_regex(pattern)).matches(text) == bool(re.fullmatch(pattern, text))
    searched = Automaton(parse_regex(pattern, whole=False)).matches(text)
    assert searched == bool(re.search(pattern, text))


@settings(max_examples=40, deadline=None)
@given(PATTERNS, st.text("ab1é K\nx.", max_size=6))
def test_both_libraries_agree_with_python(pattern: str, text: str) -> None:
    expected = bool(re.fullmatch(pattern, text))
    for backend in BACKENDS:
        at = matcher(backend, Structured(regex=pattern))
        taken = all(at.accept(byte) for byte in text.encode())
        assert (taken and at.is_complete()) == expected, backend


@pytest.mark.parametrize(
    ("pattern", "told"),
    [
        ("(a", "at character 0"),
        ("a**", "multiple repeat at character 2"),
        (r"(a)\1", "reference to a group"),
        ("a(?=b)", "look-around"),
        ("(?<!a)b", "look-around"),
        (r"\ba", "word boundary"),
        ("(?>a)b", "atomic group"),
        ("a*+b", "possessive"),
        ("(?m)^a", "lines"),
        ("a^b", "anchor inside"),
        ("(^a)*", "anchor inside a repetition"),
        ("(" * 5000 + ")" * 5000, "nested too deeply"),
    ],
)
def test_what_is_no_regular_language_is_refused(pattern: str, told: str) -> None:
    with pytest.raises(PatternError, match=re.escape(told)):
        parse_regex(pattern)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("pattern", ["(a{1,1000}){1,1000}", "((a{100}){100}){100}"])
def test_a_pattern_beyond_the_budget_fails_at_once(backend: str, pattern: str) -> None:
    start = time.process_time()
    assert "grammar.max_states" in error_of(backend, Structured(regex=pattern))
    assert time.process_time() - start < 1


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("pattern", ["(a+)+b", "(a|a)*b", "(a*)*b", "([a-z]+)*x"])
def test_a_catastrophic_pattern_costs_nothing(backend: str, pattern: str) -> None:
    """Backtracking would take 2^60 steps; the output is checked without it."""
    at = matcher(backend, Structured(regex=pattern))
    start = time.process_time()
    assert all(at.accept(ord("a")) for _ in range(60))
    assert not Automaton(parse_regex(pattern)).matches("a" * 60)
    assert not at.is_complete()
    assert time.process_time() - start < 1


def test_a_class_under_ecma_is_what_both_dialects_agree_on() -> None:
    digits = parse_regex(r"\d", ecma=True)
    assert Automaton(digits).matches("7") and not Automaton(digits).matches("٣")
    others = parse_regex(r"\D", ecma=True)
    assert Automaton(others).matches("x") and not Automaton(others).matches("٣")
    assert not Automaton(parse_regex(r"\S", ecma=True)).matches("\ufeff")


def test_ranges_are_kept_without_surrogates() -> None:
    assert merge([(5, 9), (1, 5), (10, 11)]) == ((1, 11),)
    assert merge([(0xD000, 0xE100)]) == ((0xD000, 0xD7FF), (0xE000, 0xE100))
    assert complement(()) == ALL and complement(ALL) == ()
    assert complement(complement(((65, 90),))) == ((65, 90),)


def test_sizes_count_what_repetitions_write_out() -> None:
    assert size(parse_regex("a{3,7}")) == 7
    assert size(parse_regex("(?:ab){100}")) >= 200
    assert rust_regex(Chars(((47, 47),))) == r"\x{2F}"
    assert vocabulary().text([104, 105]) == b"hi"
