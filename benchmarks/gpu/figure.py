"""What a section says: figures and failures, written as it goes."""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

Fact = str | int | float | bool | None


@dataclass(frozen=True, slots=True)
class Figure:
    """One number that was measured, or computed from such by the section itself."""

    name: str  # dotted, unique in a run: decode.batch_32.tokens_per_s
    value: float
    unit: str
    facts: Mapping[str, Fact] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Failure:
    """What could not be measured, and why."""

    part: str
    reason: str


@dataclass(slots=True)
class SectionResult:
    """All that one section said."""

    section: str
    figures: list[Figure] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)  # parts that the budget had no room for
    seconds: float = 0.0


def write_json(path: Path, value: object) -> None:
    """Replace a file as a whole: whoever reads it sees the old one or the new one."""
    beside = path.with_name(path.name + ".new")
    beside.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    os.replace(beside, path)


def write_result(path: Path, result: SectionResult) -> None:
    """What a section has said so far."""
    write_json(path, asdict(result))


def read_result(path: Path) -> SectionResult:
    """What a section wrote. Errors: OSError, ValueError, KeyError, TypeError for a file that it did not write."""
    fields = json.loads(path.read_text(encoding="utf-8"))
    return SectionResult(
        section=fields["section"],
        figures=[Figure(**one) for one in fields["figures"]],
        failures=[Failure(**one) for one in fields["failures"]],
        left_out=list(fields["left_out"]),
        seconds=float(fields["seconds"]),
    )
