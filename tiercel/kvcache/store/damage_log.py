"""One line of the log for many damaged blocks: a counter alone tells no operator that a disk is failing."""

import logging
from dataclasses import dataclass

from tiercel.values.clock import Clock
from tiercel.values.tier import Route, Transfer

_FIRST_S = 1.0  # from the first damaged block to its line: damage seldom comes alone
_NEXT_S = 60.0  # between two lines

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Damage:
    """Damaged blocks of one route that no line has told yet."""

    count: int
    slot: int  # of the first
    key: str  # of the first, the beginning


class DamageLog:
    """Collects blocks whose bytes did not match their key, and logs their number and the first of them."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._found: dict[Route, _Damage] = {}
        self._due_s: float | None = None
        self._told_s: float | None = None

    def note(self, transfer: Transfer) -> None:
        """Count a transfer that ended with a miss, by its first block."""
        damage = self._found.get(transfer.route)
        if damage is not None:
            damage.count += 1
            return
        self._found[transfer.route] = _Damage(1, transfer.sources[0], transfer.keys[0].hex()[:16])
        if self._due_s is None:
            now_s = self._clock.now_s()
            self._due_s = now_s + _FIRST_S if self._told_s is None else max(now_s, self._told_s) + _NEXT_S

    def tell_due(self) -> None:
        """Log what was found, if its time has come. Cost: one comparison otherwise."""
        if self._due_s is not None and self._clock.now_s() >= self._due_s:
            self.tell()

    def tell(self) -> None:
        """Log what was found and was not told yet."""
        for route, damage in self._found.items():
            log.warning(
                "kv blocks damaged route=%s count=%d first_slot=%d first_key=%s",
                *(route.value, damage.count, damage.slot, damage.key),
            )
        if self._found:
            self._told_s = self._clock.now_s()
        self._found.clear()
        self._due_s = None
