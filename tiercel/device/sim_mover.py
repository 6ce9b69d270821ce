"""Simulated copies between tiers, with speeds in virtual time. Every misuse of a slot is detected.

The source of a copy must not change while the copy is in progress. The bytes that arrive are those at its start, so a
slot that was reused too early is detected when a step reads it.
"""

import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

from tiercel.values.clock import ManualClock
from tiercel.values.errors import InvariantError
from tiercel.values.outcome import RouteGauges
from tiercel.values.tier import Landing, Purpose, Route, Tier, Transfer, Verdict

_ORDER = {purpose: rank for rank, purpose in enumerate(Purpose)}


@dataclass(frozen=True, slots=True, kw_only=True)
class SimRates:
    """Speeds of the simulated machine. The defaults are published figures of an H200."""

    block_bytes: int = 2 * 1024 * 1024
    spill_bytes_per_s: float = 50e9
    restore_bytes_per_s: float = 50e9
    disk_write_bytes_per_s: float = 3e9
    disk_read_bytes_per_s: float = 6e9
    copy_s: float = 10e-6  # cost of dispatching one copy
    merges: bool = True  # whether neighbouring blocks are one copy
    is_async: bool = True  # whether steps run while copies are in progress
    late_s: float = 0.25  # deadline of a read


Fate = Callable[[Transfer], Verdict]


class SimArena(Protocol):
    """The slots of the device tier."""

    def block(self, slot: int) -> tuple[int, ...]: ...
    def put_block(self, slot: int, rows: tuple[int, ...]) -> None: ...


class _Lane:
    def __init__(self) -> None:
        self.busy_until_s = 0.0
        self.queue: list[tuple[int, int, float, Transfer]] = []  # heap: purpose, id, submitted


class SimMover:
    """A `Mover` of `engine.loop` in virtual time."""

    def __init__(
        self, machine: SimArena, clock: ManualClock, *, has_host: bool, rates: SimRates, fate: Fate | None = None
    ) -> None:
        self.bytes_by_route: dict[Route, int] = dict.fromkeys(Route, 0)
        self.copies_by_route: dict[Route, int] = dict.fromkeys(Route, 0)
        self.stalled_s = 0.0  # waiting time without a running step, because copies were synchronous
        self.lower: dict[tuple[Tier, int], tuple[int, ...]] = {}  # the KV in DDR and SSD slots
        self._machine = machine
        self._clock = clock
        self._gateway = Tier.DDR if has_host else Tier.HBM
        self._rates = rates
        self._fate = fate or (lambda _: Verdict.LANDED)
        self._lanes = {route: _Lane() for route in Route}
        self._carried: dict[int, list[tuple[int, ...]]] = {}
        self._late: dict[int, Transfer] = {}
        self._block_size = 0  # rows of a block, known from the first copy
        self._returning: list[tuple[float, int]] = []
        self._done: list[Landing] = []

    def start(self, transfers: Iterable[Transfer]) -> None:
        """Queue copies. Errors: InvariantError if a source is empty."""
        for transfer in transfers:
            above, _ = self._ends(transfer.route)
            self._carried[transfer.id] = [self._read(above, slot) for slot in transfer.sources]
            entry = (_ORDER[transfer.purpose], transfer.id, self._clock.now_s(), transfer)
            heapq.heappush(self._lanes[transfer.route].queue, entry)
            is_exposed = transfer.route in (Route.SPILL, Route.RESTORE)
            if is_exposed and not self._rates.is_async:
                before_s = self._clock.now_s()
                while (landing_s := self._next(self._lanes[transfer.route])) is not None:
                    self._clock.advance(max(0.0, landing_s - self._clock.now_s()))
                    self._run(self._lanes[transfer.route])
                self.stalled_s += self._clock.now_s() - before_s

    def poll(self) -> list[Landing]:
        """Return the transfers that have landed."""
        for lane in self._lanes.values():
            self._run(lane)
        now_s = self._clock.now_s()
        for due_s, late in self._returning:
            if due_s <= now_s:
                transfer = self._late.pop(late)
                _, below = self._ends(transfer.route)
                for target in transfer.targets:  # the late call may have written until now
                    self._write(below, target, (-1,) * self._block_size)
                self._done.append(Landing(late, Verdict.RETURNED))
        self._returning = [(due_s, late) for due_s, late in self._returning if due_s > now_s]
        landings, self._done = self._done, []
        return landings

    def gauges(self) -> tuple[RouteGauges, ...]:
        """Return the bytes and copies of each route so far."""
        return tuple(
            RouteGauges(route=route, bytes=self.bytes_by_route[route], copies=self.copies_by_route[route])
            for route in Route
        )

    @property
    def next_landing_s(self) -> float | None:
        """The time of the next landing; None if no transfer is in progress."""
        if self._done:
            return self._clock.now_s()
        times = [due_s for lane in self._lanes.values() if (due_s := self._next(lane)) is not None]
        return min([*times, *(due_s for due_s, _ in self._returning)], default=None)

    def wait_landing(self, seconds: float) -> None:
        """Advance the clock to the next landing, but by this time at most."""
        now_s, due_s = self._clock.now_s(), self.next_landing_s
        self._clock.advance(seconds if due_s is None else max(0.0, min(seconds, due_s - now_s)))

    def _ends(self, route: Route) -> tuple[Tier, Tier]:
        gateway = self._gateway
        return {
            Route.SPILL: (Tier.HBM, Tier.DDR),
            Route.RESTORE: (Tier.DDR, Tier.HBM),
            Route.PERSIST: (gateway, Tier.SSD),
            Route.PREFETCH: (Tier.SSD, gateway),
            Route.VERIFY: (gateway, gateway),
            Route.SIGN: (gateway, gateway),
        }[route]

    def _read(self, tier: Tier, slot: int) -> tuple[int, ...]:
        if tier is Tier.HBM:
            return self._machine.block(slot)
        try:
            return self.lower[tier, slot]
        except KeyError:
            raise InvariantError("sim.empty_source", tier=tier.value, slot=slot) from None

    def _write(self, tier: Tier, slot: int, rows: tuple[int, ...]) -> None:
        if tier is Tier.HBM:
            self._machine.put_block(slot, rows)
        else:
            self.lower[tier, slot] = rows

    def _runs(self, transfer: Transfer) -> int:
        if not self._rates.merges or not transfer.targets:
            return len(transfer.sources)
        pairs = list(zip(transfer.sources, transfer.targets, strict=True))
        return 1 + sum(
            (source - before, target - under) != (1, 1) for (before, under), (source, target) in pairwise(pairs)
        )

    def _seconds(self, transfer: Transfer) -> float:
        rates = self._rates
        speed = {
            Route.SPILL: rates.spill_bytes_per_s,
            Route.RESTORE: rates.restore_bytes_per_s,
            Route.PERSIST: rates.disk_write_bytes_per_s,
            Route.PREFETCH: rates.disk_read_bytes_per_s,
        }.get(transfer.route, rates.spill_bytes_per_s)
        return self._runs(transfer) * rates.copy_s + len(transfer.sources) * rates.block_bytes / speed

    def _head(self, lane: _Lane) -> tuple[float, Transfer] | None:
        """Return the start time of the next transfer and the transfer; None if none is queued."""
        if not lane.queue:
            return None
        begin_s = max(lane.busy_until_s, min(submitted_s for _, _, submitted_s, _ in lane.queue))
        _, _, _, transfer = min(entry for entry in lane.queue if entry[2] <= begin_s)
        return begin_s, transfer

    def _next(self, lane: _Lane) -> float | None:
        head = self._head(lane)
        return None if head is None else head[0] + self._seconds(head[1])

    def _run(self, lane: _Lane) -> None:
        while (head := self._head(lane)) is not None:
            begin_s, transfer = head
            end_s = begin_s + self._seconds(transfer)
            if end_s > self._clock.now_s():
                return
            lane.queue = [entry for entry in lane.queue if entry[3].id != transfer.id]
            heapq.heapify(lane.queue)
            lane.busy_until_s = end_s
            self._land(transfer, end_s - begin_s)

    def _land(self, transfer: Transfer, seconds: float) -> None:
        above, below = self._ends(transfer.route)
        verdict = self._fate(transfer)
        carried = self._carried.pop(transfer.id)
        self._block_size = len(carried[0])
        if carried != [self._read(above, slot) for slot in transfer.sources]:
            raise InvariantError("sim.source_changed", transfer=transfer.id, route=transfer.route.value)
        if verdict is Verdict.LATE:
            self._late[transfer.id] = transfer
            self._returning.append((self._clock.now_s() + 20 * self._rates.late_s, transfer.id))
        for target, rows in zip(transfer.targets, carried, strict=False):
            # A failed or late call may have written any bytes.
            self._write(below, target, rows if verdict is Verdict.LANDED else (-1,) * len(rows))
        runs = self._runs(transfer)
        self.bytes_by_route[transfer.route] += len(transfer.keys) * self._rates.block_bytes
        self.copies_by_route[transfer.route] += runs
        self._done.append(Landing(transfer.id, verdict, seconds, runs))
