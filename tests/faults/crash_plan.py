"""The plan of the crashes of a daemon's engines, in a folder that a test and the engines share.

Each engine that starts takes one crash from the plan: it kills itself when it reaches the named point for the n-th
time. Engines that start after the last crash run undisturbed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

POINTS = (
    "before-launch",  # a step is planned and sealed, the device has not heard of it
    "after-launch",  # the step runs
    "before-result",  # the loop is about to wait for the step
    "after-result",  # the tokens are known, the books have not changed
    "before-report",  # the step is committed, the HTTP process has not heard of it
    "torn-report",  # half of the report is in the socket
    "after-report",  # the report is in the socket
    "spill",  # copies from HBM to DDR are in progress
    "restore",  # copies from DDR to HBM are in progress
    "persist",  # writes to the SSD are in progress
    "prefetch",  # reads from the SSD are in progress
    "verify",  # copies that an earlier engine left are being compared with their checksums
)


@dataclass(frozen=True, slots=True)
class Crash:
    """A kill when a point is reached for the n-th time, counted from 1."""

    point: str
    count: int


class CrashPlan:
    """The crashes that are still to come and those that have happened, as lines of two files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._planned = folder / "crashes.planned"
        self._done = folder / "crashes.done"
        self._checks = folder / "integrity.checks"

    def write(self, crashes: Sequence[Crash]) -> None:
        """Set the crashes to come. Errors: ValueError for an unknown point."""
        unknown = {crash.point for crash in crashes} - set(POINTS)
        if unknown:
            raise ValueError(f"no such crash point: {', '.join(sorted(unknown))}")
        self._planned.write_text("".join(f"{crash.point} {crash.count}\n" for crash in crashes))

    def take(self) -> Crash | None:
        """Remove and return the next crash; None if none is left. Only one engine runs at a time."""
        lines = self._planned.read_text().splitlines() if self._planned.exists() else []
        if not lines:
            return None
        self._planned.write_text("".join(f"{line}\n" for line in lines[1:]))
        point, count = lines[0].split()
        return Crash(point, int(count))

    def left(self) -> int:
        """Return the number of crashes that no engine has taken yet."""
        return len(self._planned.read_text().splitlines()) if self._planned.exists() else 0

    def note_done(self, point: str) -> None:
        """Note that the engine is about to kill itself."""
        with self._done.open("a") as file:
            file.write(f"{point}\n")

    def done(self) -> list[str]:
        """Return the points at which engines have killed themselves, in order."""
        return self._done.read_text().splitlines() if self._done.exists() else []

    def note_check(self) -> None:
        """Note that the books of an idle engine were consistent."""
        with self._checks.open("a") as file:
            file.write("ok\n")

    def checks(self) -> int:
        """Return how often the books of an idle engine were found consistent."""
        return len(self._checks.read_text().splitlines()) if self._checks.exists() else 0
