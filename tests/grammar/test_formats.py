"""Formats: their patterns against Python's own readers, and under both libraries."""

from __future__ import annotations

import random
import re
from datetime import date, datetime, time
from ipaddress import IPv4Address, IPv6Address
from uuid import UUID

import pytest
from tests.grammar.helpers import BACKENDS, matcher, service, walk

from deepinfer import Structured
from deepinfer.grammar.formats import PATTERNS
from deepinfer.grammar.verdict import make_check

READERS = {
    "date": date.fromisoformat,
    "time": time.fromisoformat,
    "date-time": datetime.fromisoformat,
    "ipv4": IPv4Address,
    "ipv6": IPv6Address,
    "uuid": UUID,
}
DRAFT = "https://json-schema.org/draft/2020-12/schema"


def is_date(year: int, month: int, day: int) -> bool:
    try:
        date(year, month, day)
    except ValueError:
        return False
    return True


def test_dates_are_exactly_those_of_the_calendar() -> None:
    pattern = re.compile(PATTERNS["date"])
    for year in (*range(12), *range(0, 10000, 100), *range(1995, 2030), 9996, 9999):
        for month in range(14):
            for day in (0, 1, 9, 10, 19, 20, 27, 28, 29, 30, 31, 32):
                text = f"{year:04}-{month:02}-{day:02}"
                assert bool(pattern.fullmatch(text)) == is_date(year, month, day), text


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("time", "00:00:00Z 23:59:59.5+23:59", "24:00:00Z 12:60:00Z 12:00:60Z 12:00:00 12:00Z"),
        ("date-time", "2024-02-29T12:00:00Z", "2023-02-29T12:00:00Z 2024-02-29 12:00:00Z"),
        ("duration", "P1D P1Y2M3D PT1H2M3S P2W P1DT5S", "P P1DT P1Y2D PT1H3S P1W2D 1D PT P1S"),
        ("ipv4", "0.0.0.0 255.10.99.1", "256.1.1.1 01.1.1.1 1.1.1 1.1.1.1.1"),
        ("ipv6", ":: ::1 1:: 1:2:3:4:5:6:7:8 1::8", "1:2:3:4:5:6:7 1::2::3 12345:: : 1:2"),
        ("uuid", "12345678-9abc-DEF0-1234-56789abcdef0", "12345678-9abc-DEF0-1234-56789abcdef"),
    ],
)
def test_what_formats_let_through(name: str, good: str, bad: str) -> None:
    pattern = re.compile(PATTERNS[name])
    for text in good.split():
        assert pattern.fullmatch(text), text
    for text in (*bad.split(), ""):
        assert not pattern.fullmatch(text), text
    check = make_check({"not": {"format": name}}, DRAFT)  # the last word sees them everywhere
    assert check(f'"{good.split()[0]}"') and not check(f'"{bad.split()[0]}"')


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", PATTERNS)
def test_walks_of_a_format_are_read_by_python(backend: str, name: str) -> None:
    shape = Structured(json={"type": "string", "format": name}, strict=True)
    assert service(backend).report(shape).is_exact
    rng = random.Random(name)
    for _ in range(12):
        text = walk(matcher(backend, shape), rng)
        assert text is not None
        assert text[0] == text[-1] == '"'
        if name in READERS:
            READERS[name](text[1:-1])


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_format_beside_a_pattern_holds_in_the_end(backend: str) -> None:
    shape = Structured(json={"type": "string", "format": "date", "pattern": "^2024-02-[23]"})
    exact = service(backend).report(shape).is_exact
    at = matcher(backend, shape)
    legal = [at.accept(byte) for byte in b'"2024-02-30"']
    assert not all(legal) or (not exact and "is no date" in str(at.check()))
