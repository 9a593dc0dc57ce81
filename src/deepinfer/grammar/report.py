"""Report: what will be enforced of a schema, keyword by keyword, before generation (pure)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

__all__ = ["Finding", "Report", "Status"]


class Status(StrEnum):
    """What becomes of a keyword.

    enforced      no output violates it
    approximated  the grammar lets some violations through; the finished output is checked, and the
                  request ends with an error when it fails
    refused       the schema cannot be used
    """

    ENFORCED = "enforced"
    APPROXIMATED = "approximated"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Finding:
    """One keyword of a schema.

    pointer  JSON pointer to the keyword; "" is the schema itself
    note     why, or what is left out; may be empty
    """

    pointer: str
    keyword: str
    status: Status
    note: str = ""

    def __str__(self) -> str:
        """Spell the finding in one line."""
        return f"{self.pointer or '/'}: {self.status}" + (f", {self.note}" if self.note else "")


@dataclass(frozen=True, slots=True)
class Report:
    """All findings of a schema, in its order."""

    findings: tuple[Finding, ...] = ()

    def of(self, status: Status) -> tuple[Finding, ...]:
        """Return the findings of one status."""
        return tuple(finding for finding in self.findings if finding.status is status)

    @property
    def is_exact(self) -> bool:
        """Whether everything is enforced."""
        return all(finding.status is Status.ENFORCED for finding in self.findings)

    def problems(self, strict: bool) -> list[str]:
        """Return what keeps the schema from being used, one line each."""
        bad = self.of(Status.REFUSED) + (self.of(Status.APPROXIMATED) if strict else ())
        return [str(finding) for finding in bad]

    def __str__(self) -> str:
        """Spell the report, one finding a line."""
        return "\n".join(map(str, self.findings))
