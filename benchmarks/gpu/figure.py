"""The result of a section: figures and failures, written as they occur."""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

Fact = str | int | float | bool | None


@dataclass(frozen=True, slots=True)
class Figure:
    """One number that a section has measured or computed."""

    name: str  # dotted, unique in a run: decode.batch_32.tokens_per_s
    value: float
    unit: str
    facts: Mapping[str, Fact] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Failure:
    """A part that could not be measured, and the reason."""

    part: str
    reason: str


@dataclass(slots=True)
class SectionResult:
    """The figures and failures of one section."""

    section: str
    figures: list[Figure] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)  # parts for which the budget did not suffice
    seconds: float = 0.0


def write_json(path: Path, value: object) -> None:
    """Replace a file atomically."""
    beside = path.with_name(path.name + ".new")
    beside.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    os.replace(beside, path)


def write_result(path: Path, result: SectionResult) -> None:
    """Write the result of a section so far."""
    write_json(path, asdict(result))


def read_result(path: Path) -> SectionResult:
    """Read the result of a section. Errors: OSError, ValueError, KeyError, TypeError if it is not such a file."""
    fields = json.loads(path.read_text(encoding="utf-8"))
    return SectionResult(
        section=fields["section"],
        figures=[Figure(**one) for one in fields["figures"]],
        failures=[Failure(**one) for one in fields["failures"]],
        left_out=list(fields["left_out"]),
        seconds=float(fields["seconds"]),
    )
