"""The context of a section: its budget, its figures, and a guard for each part."""

import math
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.gpu.figure import Fact, Failure, Figure, SectionResult, read_result, write_result


class Bench:
    """A section in progress. Every figure is written to disk at once, so that a killed section loses none."""

    def __init__(
        self,
        section: str,
        budget_s: float,
        out: Path,
        *,
        is_quick: bool = False,
        peer: Path | None = None,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """`out`: the file of the section; its temporary files go to the same folder."""
        self.is_quick = is_quick
        self.peer = peer  # a folder to import a peer from
        self.folder = out.parent
        self.result = SectionResult(section)
        self._out = out
        self._now_s = now_s
        self._began_s = now_s()
        self._budget_s = budget_s

    @property
    def left_s(self) -> float:
        """Seconds left of the budget."""
        return self._budget_s - (self._now_s() - self._began_s)

    def has_time(self, part: str, needs_s: float = 0.0) -> bool:
        """Return whether the budget suffices for a part; a part that is left out is recorded."""
        if self.left_s > needs_s:
            return True
        self.result.left_out.append(part)
        print(f"  {part}: left out, {max(0.0, self.left_s):.0f} s of the budget are left", flush=True)
        self.save()
        return False

    def earlier(self, name: str) -> float | None:
        """Return a figure of an earlier section of the same run; None if there is none."""
        path = self.folder / f"{name.partition('.')[0]}.json"
        if not path.is_file():
            return None
        return next((one.value for one in read_result(path).figures if one.name == name), None)

    def record(self, name: str, value: float, unit: str, **facts: Fact) -> None:
        """Record a figure; the section is prepended to its name. A number that is not finite is a failure."""
        if not math.isfinite(value):
            self.fail(name, f"measured {value} {unit}")
            return
        figure = Figure(f"{self.result.section}.{name}", float(value), unit, facts)
        self.result.figures.append(figure)
        told = " ".join(f"{key}={fact}" for key, fact in facts.items())
        print(f"  {name}: {value:,.4g} {unit} {told}".rstrip(), flush=True)
        self.save()

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Record an exception of the block as a failure, and continue after it."""
        try:
            yield
        except Exception as exc:  # a failing part must not affect the other figures
            self.fail(name, f"{type(exc).__name__}: {exc}")
            traceback.print_exc(limit=-4)

    def fail(self, part: str, reason: str) -> None:
        """Record that a part could not be measured."""
        first = reason.strip().splitlines()[0][:400] if reason.strip() else "no reason given"
        self.result.failures.append(Failure(part, first))
        print(f"  {part}: FAILED: {first}", flush=True)
        self.save()

    def save(self) -> None:
        """Write the figures so far."""
        self.result.seconds = round(self._now_s() - self._began_s, 1)
        write_result(self._out, self.result)
