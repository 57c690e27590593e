"""What a check found, and how it is shown."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from relax.errors import ConfigError


class Level(StrEnum):
    """How bad it is: an error keeps the run from working, a warning is worth a look, ok is what was made sure of."""

    ERROR = "error"
    WARNING = "warning"
    OK = "ok"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at. `about`: the key or section; `text`: what is so, and what would be right."""

    level: Level
    about: str
    text: str


def error(about: str, text: str) -> Finding:
    """The run cannot work like this."""
    return Finding(Level.ERROR, about, text)


def warning(about: str, text: str) -> Finding:
    """The run may not do what was meant."""
    return Finding(Level.WARNING, about, text)


def ok(about: str, text: str) -> Finding:
    """This was looked at and is right."""
    return Finding(Level.OK, about, text)


@dataclass(frozen=True, slots=True)
class CheckReport:
    """All findings on one run, in the order in which they were looked for."""

    source: str
    findings: tuple[Finding, ...]

    @property
    def errors(self) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.level is Level.ERROR)

    @property
    def warnings(self) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.level is Level.WARNING)

    @property
    def exit_code(self) -> int:
        """0, or 1 when anything is an error."""
        return 1 if self.errors else 0

    def render(self) -> str:
        """For people: the errors first, a line each, then a closing line."""
        order = list(Level)
        shown = sorted(self.findings, key=lambda finding: order.index(finding.level))
        lines = [f"{finding.level:<8} {_indented(_line(finding))}" for finding in shown]
        return "\n".join([*lines, f"{self.source}: {len(self.errors)} error(s), {len(self.warnings)} warning(s)"])

    def raise_on_error(self) -> None:
        """Raises `ConfigError` with every error, if there is any."""
        if self.errors:
            raise ConfigError("\n  ".join([f"{self.source} cannot run:", *map(_line, self.errors)]))


def _line(finding: Finding) -> str:
    """The text alone where it names its key already, as the errors of other parts do."""
    return finding.text if finding.text.startswith(finding.about) else f"{finding.about}: {finding.text}"


def _indented(text: str) -> str:
    return text.replace("\n", f"\n{'':<9}")


def gather(source: str, *parts: Iterable[Finding]) -> CheckReport:
    """One report of the findings of several checks."""
    return CheckReport(source, tuple(finding for part in parts for finding in part))
