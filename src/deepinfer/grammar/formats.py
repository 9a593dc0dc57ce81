"""Formats of JSON Schema that are regular languages, as patterns (pure).

They are exact, leap years included, and stay within what RFC 3339, RFC 4122 and RFC 4291 allow:
capital T and Z, no leap second, no year 0, at most nine digits of a fraction or a number of a
duration, no dotted tail of an IPv6 address.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

__all__ = ["PATTERNS"]

_YEAR: Final = "(?:[1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])"
_FOURTH: Final = "(?:0[48]|[2468][048]|[13579][26])"  # 04, 08 and so on to 96
_LEAP_YEAR: Final = f"(?:[0-9]{{2}}{_FOURTH}|{_FOURTH}00)"
_DAY: Final = "(?:0[1-9]|1[0-9]|2[0-8])"
_DATE: Final = (
    f"(?:{_YEAR}-(?:(?:0[1-9]|1[0-2])-{_DAY}|(?:0[13-9]|1[0-2])-(?:29|30)"
    f"|(?:0[13578]|1[02])-31)|{_LEAP_YEAR}-02-29)"
)
_CLOCK: Final = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_TIME: Final = f"{_CLOCK}:[0-5][0-9](?:\\.[0-9]{{1,9}})?(?:Z|[+-]{_CLOCK})"
_BYTE: Final = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_HEX: Final = "[0-9a-fA-F]"
_GROUP: Final = f"{_HEX}{{1,4}}"
_GAPS: Final = "|".join(
    f"(?:{_GROUP}:){{1,{before}}}(?::{_GROUP}){{1,{7 - before}}}" for before in range(1, 7)
)
_N: Final = "[0-9]{1,9}"
_HOURS: Final = f"T(?:{_N}H(?:{_N}M(?:{_N}S)?)?|{_N}M(?:{_N}S)?|{_N}S)"
_DAYS: Final = f"(?:{_N}Y(?:{_N}M(?:{_N}D)?)?|{_N}M(?:{_N}D)?|{_N}D)"

PATTERNS: Final[Mapping[str, str]] = {
    "date": f"^{_DATE}$",
    "time": f"^{_TIME}$",
    "date-time": f"^{_DATE}T{_TIME}$",
    "duration": f"^P(?:{_N}W|{_DAYS}(?:{_HOURS})?|{_HOURS})$",
    "ipv4": f"^{_BYTE}(?:\\.{_BYTE}){{3}}$",
    "ipv6": (
        f"^(?:(?:{_GROUP}:){{7}}{_GROUP}|(?:{_GROUP}:){{1,7}}:|{_GAPS}|:(?::{_GROUP}){{1,7}}|::)$"
    ),
    "uuid": f"^{_HEX}{{8}}(?:-{_HEX}{{4}}){{3}}-{_HEX}{{12}}$",
}
"""A pattern for each, to be searched for as the keyword `pattern` is."""
