"""Copies between the tiers: starts them and reports their landings. Never blocks the loop."""

import hmac
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import xxhash

from tiercel.device.base import CopyLane, Pending
from tiercel.kvcache.store.arena import Arena
from tiercel.kvcache.store.copy_run import CopyRun, check_slots, cut_runs, extents_of, merge_runs
from tiercel.kvcache.store.damage_log import DamageLog
from tiercel.kvcache.store.disk import DiskResult, DiskVerdict
from tiercel.kvcache.store.priority_worker import PriorityWorker
from tiercel.values.clock import Clock
from tiercel.values.errors import DeviceLostError, InvariantError
from tiercel.values.ids import BlockKey, SlotId
from tiercel.values.outcome import RouteGauges
from tiercel.values.tier import Landing, Purpose, Route, Transfer, Verdict

_PRIORITY = {Purpose.RESTORE: 0, Purpose.SPILL: 1, Purpose.PREFETCH: 2, Purpose.BACKGROUND: 3}
_LOWEST_PRIORITY = 4  # of the signatures of landed copies
_PIECE_S = 1e-3  # of copying: an urgent transfer waits for as many pieces as the lane keeps queued
_FIRST_PACE = 1 / 4e9  # s per byte, until the first copy was measured
_PACE_WEIGHT = 0.2
_HICCUP = 2.0  # a slow piece counts as at most this many times the pace


class Disk(Protocol):
    """Reads and writes blocks of the SSD tier on threads of its own. Slots count from 0."""

    def read(self, ticket: int, slot: int, key: BlockKey, into: memoryview) -> None: ...
    def write(self, ticket: int, slot: int, key: BlockKey, payload: memoryview) -> None: ...
    def poll(self) -> Sequence[DiskResult]: ...
    def next_deadline_s(self) -> float | None: ...


@dataclass(frozen=True, slots=True)
class CopyLanes:
    """The copy lanes between the device and host memory."""

    down: CopyLane  # device to host
    up: CopyLane  # host to device
    slab_slots: int = 0  # of the host arena: no copy crosses a multiple of it; 0: no limit


@dataclass(slots=True)
class _RouteTotals:
    """Sums of one route since the start; `poll` alone writes them."""

    transfers: int = 0
    blocks: int = 0
    bytes: int = 0
    seconds: float = 0.0
    copies: int = 0
    failures: int = 0
    late: int = 0
    misses: int = 0


@dataclass(slots=True)
class _CopyPiece:
    """Runs that were queued on the lane together."""

    pending: Pending[None]
    bytes: int
    queued_s: float


@dataclass(slots=True)
class _CopyJob:
    """A transfer between two arenas, on the worker of its direction."""

    transfer: Transfer
    runs: deque[CopyRun]
    merged: int
    flying: deque[_CopyPiece] = field(default_factory=deque[_CopyPiece])
    seconds: float = 0.0
    has_failed: bool = False


@dataclass(slots=True)
class _HashJob:
    """Blocks to hash, on the signing worker."""

    transfer: Transfer
    left: deque[tuple[BlockKey, SlotId]]
    seconds: float = 0.0
    wrong: int = 0


@dataclass(slots=True)
class _Direction:
    """The lane, worker and arenas of the copies in one direction, and their measured pace."""

    lane: CopyLane
    worker: PriorityWorker
    source: Arena
    target: Arena
    source_slab: int = 0  # slots
    target_slab: int = 0
    pace: float = _FIRST_PACE  # s per byte
    landed_s: float = 0.0  # when the last piece landed


class StoreMover:
    """Carries out transfers. The engine's loop calls it; workers and the disk's threads do the work.

    If `host` is None, the device arena is the host tier too (one RAM arena on the CPU), and there is nothing to copy
    between them. Copies that land in a host arena with a journal are signed a little later, beside the loop. Until
    then a crash of the engine loses these copies, and nothing else.

    `wake` is called from other threads whenever `poll` has news.
    """

    def __init__(
        self,
        device: Arena,
        host: Arena | None,
        lanes: CopyLanes | None,
        disk: Disk | None,
        clock: Clock,
        wake: Callable[[], None],
    ) -> None:
        self._ram = host or device
        self._journal = self._ram.journal
        self._disk = disk
        self._clock = clock
        self._wake = wake
        self._block_bytes = device.spec.block_bytes
        self._directions: dict[Route, _Direction] = {}
        if host is not None and lanes is not None:
            self._directions = {
                Route.SPILL: _Direction(
                    lanes.down, PriorityWorker("copy-down"), device, host, target_slab=lanes.slab_slots
                ),
                Route.RESTORE: _Direction(
                    lanes.up, PriorityWorker("copy-up"), host, device, source_slab=lanes.slab_slots
                ),
            }
        self._signer = PriorityWorker("sign", is_background=True)
        self._signing = threading.Lock()
        self._unsigned: dict[
            SlotId, object
        ] = {}  # landed, to be signed; the token is removed when the slot is overwritten
        self._landed: deque[tuple[Transfer, Landing]] = deque()
        self._has_landed = threading.Event()  # since the last poll
        self._at_disk: dict[int, Transfer] = {}
        routes = [*self._directions]
        routes += [Route.PERSIST, Route.PREFETCH] if disk is not None else []
        routes += [Route.VERIFY, Route.SIGN] if self._journal is not None else []
        self._totals_by_route = {route: _RouteTotals() for route in routes}
        self._damage = DamageLog(clock)
        self._flying_bytes = dict.fromkeys(Route, 0)
        self._lost: DeviceLostError | None = None

    def start(self, transfers: Iterable[Transfer]) -> None:
        """Begin these transfers. The caller holds their source and target slots until they land.

        Cost: bookkeeping; every copy, hash and call to the disk runs on other threads.
        """
        for transfer in transfers:
            self._flying_bytes[transfer.route] += self._bytes(transfer)
            match transfer.route:
                case Route.SPILL | Route.RESTORE:
                    self._start_copy(transfer)
                case Route.SIGN | Route.VERIFY:
                    self._start_check(transfer)
                case Route.PERSIST | Route.PREFETCH:
                    self._start_disk(transfer)

    def poll(self) -> list[Landing]:
        """Return the landings since the last call. Errors: DeviceLostError if no copy will succeed any more."""
        if self._lost is not None:
            raise self._lost
        landings: list[Landing] = []
        self._has_landed.clear()  # before looking: what lands meanwhile is either seen now or set again
        while self._landed:
            transfer, landing = self._landed.popleft()
            landings.append(self._settle(transfer, landing))
        if self._disk is not None:
            landings += [self._disk_landing(result) for result in self._disk.poll()]
        self._damage.tell_due()
        return landings

    def wait_landing(self, seconds: float) -> None:
        """Sleep, with the GIL released, until a copy between memory tiers has landed, but not longer than this."""
        self._has_landed.wait(seconds)

    def next_deadline_s(self) -> float | None:
        """Return when the oldest read from the disk will be late. Poll by then: `wake` is not called for it."""
        return self._disk.next_deadline_s() if self._disk is not None else None

    def forget(self, slots: Iterable[SlotId]) -> None:
        """Clear the journal records of host slots that are about to be overwritten. Cost: one word for each."""
        if self._journal is None:
            return
        with self._signing:
            for slot in slots:
                self._unsigned.pop(slot, None)
                self._journal.clear(slot)

    def bytes_in_flight(self, route: Route) -> int:
        """Return the bytes that are queued or flying on a route; a late call counts until it returns."""
        return self._flying_bytes[route]

    @property
    def num_unsigned(self) -> int:
        """Landed copies whose signature is still to come."""
        return len(self._unsigned)

    def gauges(self) -> tuple[RouteGauges, ...]:
        """Return the sums of every route that exists, since the start, over what has been polled."""
        return tuple(
            RouteGauges(
                route=route,
                transfers=totals.transfers,
                blocks=totals.blocks,
                bytes=totals.bytes,
                seconds=totals.seconds,
                copies=totals.copies,
                failures=totals.failures,
                late=totals.late,
                misses=totals.misses,
            )
            for route, totals in self._totals_by_route.items()
        )

    def close(self) -> None:
        """Stop the workers and the lanes; queued transfers never land. The caller closes the disk."""
        for direction in self._directions.values():
            direction.worker.close()
            direction.lane.close()
        self._signer.close()
        self._damage.tell()

    # ---- between arenas

    def _start_copy(self, transfer: Transfer) -> None:
        direction = self._directions.get(transfer.route)
        if direction is None:
            raise InvariantError("mover.no_route", route=transfer.route.value)
        if direction.target is self._ram:
            self.forget(transfer.targets)
        check_slots(direction.source, transfer.sources)
        check_slots(direction.target, transfer.targets)
        runs = merge_runs(transfer.sources, transfer.targets, direction.source_slab, direction.target_slab)
        copy = _CopyJob(transfer, runs, len(runs))
        direction.worker.push(_PRIORITY[transfer.purpose], partial(self._copy_piece, direction, copy))

    def _copy_piece(self, direction: _Direction, copy: _CopyJob) -> bool:
        """Queue a piece, or wait for one, on the worker. Return True if the transfer has more to copy or to wait for.

        On a lane with a depth of more than one, a piece is queued while another one of the same transfer flies, so that
        the copy engine never waits for this thread within a transfer. Between two transfers it does, until the last
        piece of the first has landed. A spill reads slots whose writers have committed, and a restore writes slots that
        no launched step uses: a lane need not wait for the compute lane.
        """
        try:
            if copy.runs:
                copy.flying.append(self._queue_piece(direction, copy))
                if copy.runs and len(copy.flying) < direction.lane.depth:
                    return True
            self._end_piece(direction, copy)
        except Exception as exc:  # an I/O thread body: an error of the device fails this transfer alone
            if direction.lane.is_lost(exc):
                self._lost = DeviceLostError("device.copy_lost", f"{type(exc).__name__}: {exc}")
            copy.has_failed = True
            copy.runs.clear()
        if copy.runs or copy.flying:  # even if it has failed: until all its pieces have ended, its slots are written
            return True
        if copy.has_failed:
            self._land(copy.transfer, Verdict.FAILED, copy.seconds, copy.merged)
            return False
        if direction.target is self._ram:
            self._sign_later(copy.transfer)
        self._land(copy.transfer, Verdict.LANDED, copy.seconds, copy.merged)
        return False

    def _queue_piece(self, direction: _Direction, copy: _CopyJob) -> _CopyPiece:
        """Queue the next piece with one call of the lane."""
        maximum = max(1, int(_PIECE_S / direction.pace) // self._block_bytes)
        runs = cut_runs(copy.runs, maximum)
        queued_s = self._clock.now_s()
        pending = direction.lane.copy(extents_of(direction.source, direction.target, runs))
        return _CopyPiece(pending, sum(blocks for _, _, blocks in runs) * self._block_bytes, queued_s)

    def _end_piece(self, direction: _Direction, copy: _CopyJob) -> None:
        """Wait for the piece that was queued first, and adjust the pace by the time since the piece before it."""
        piece = copy.flying.popleft()
        piece.pending.result()
        now_s = self._clock.now_s()
        took_s = now_s - max(piece.queued_s, direction.landed_s)
        direction.landed_s = now_s
        copy.seconds += took_s
        # Times are averaged, not speeds: after a piece whose landing was noticed late, the next seems to take no time.
        if took_s > 0:
            pace = min(took_s / piece.bytes, _HICCUP * direction.pace)
            direction.pace += _PACE_WEIGHT * (pace - direction.pace)

    # ---- checksums

    def _start_check(self, transfer: Transfer) -> None:
        if self._journal is None:
            raise InvariantError("mover.no_journal", route=transfer.route.value)
        pairs = deque(zip(transfer.keys, transfer.sources, strict=True))
        if transfer.route is Route.SIGN:
            self.forget(transfer.sources)
        check = _HashJob(transfer, pairs)
        self._signer.push(_PRIORITY[transfer.purpose], partial(self._check_block, check))

    def _check_block(self, check: _HashJob) -> bool:
        """Hash one block of a SIGN or a VERIFY, on the signing worker. Return True if more are left."""
        key, slot = check.left.popleft()
        started_s = self._clock.now_s()
        digest = self._hash(slot)
        assert self._journal is not None
        if check.transfer.route is Route.SIGN:
            with self._signing:
                self._journal.sign(slot, key, digest)
        else:
            record = self._journal.record(slot)
            if record is None or record[0] != key or not hmac.compare_digest(record[1], digest):
                check.wrong += 1
                self.forget((slot,))
        check.seconds += self._clock.now_s() - started_s
        if check.left:
            return True
        verdict = Verdict.MISS if check.wrong else Verdict.LANDED
        self._land(check.transfer, verdict, check.seconds, len(check.transfer.sources))
        return False

    def _sign_later(self, transfer: Transfer) -> None:
        """Sign the copies of a transfer that has landed, when the signing worker has nothing more urgent to do."""
        if self._journal is None:
            return
        for key, slot in zip(transfer.keys, transfer.targets, strict=True):
            token = object()
            with self._signing:
                self._unsigned[slot] = token
            self._signer.push(_LOWEST_PRIORITY, partial(self._sign, slot, key, token))

    def _sign(self, slot: SlotId, key: BlockKey, token: object) -> bool:
        if self._unsigned.get(slot) is token:
            digest = self._hash(slot)
            with self._signing:
                # Unless the slot was reused meanwhile: the digest would be of a mixture.
                if self._unsigned.get(slot) is token and self._journal is not None:
                    self._journal.sign(slot, key, digest)
                    del self._unsigned[slot]
        return False

    def _hash(self, slot: SlotId) -> bytes:
        return xxhash.xxh3_128_digest(self._ram.slot_bytes(slot))  # the GIL is free meanwhile

    # ---- to and from the disk

    def _start_disk(self, transfer: Transfer) -> None:
        if self._disk is None or len(transfer.keys) != 1:
            raise InvariantError("mover.disk_shape", route=transfer.route.value, blocks=len(transfer.keys))
        (key,), (source,), (target,) = transfer.keys, transfer.sources, transfer.targets
        self._at_disk[transfer.id] = transfer
        if transfer.route is Route.PERSIST:
            self._disk.write(transfer.id, target - 1, key, self._ram.slot_bytes(source))
        else:
            self.forget(transfer.targets)
            self._disk.read(transfer.id, source - 1, key, self._ram.slot_bytes(target))

    def _disk_landing(self, result: DiskResult) -> Landing:
        verdict = _VERDICTS[result.verdict]
        transfer = self._at_disk[result.ticket]
        if verdict is not Verdict.LATE:
            del self._at_disk[result.ticket]
        if verdict is Verdict.LANDED and transfer.route is Route.PREFETCH and self._directions:
            # If the arena is the device tier too, a step may write the slot before it is signed: there only a SIGN,
            # which holds the slot, signs.
            self._sign_later(transfer)
        return self._settle(transfer, Landing(transfer.id, verdict, result.seconds))

    # ---- the end of a transfer

    def _land(self, transfer: Transfer, verdict: Verdict, seconds: float, runs: int) -> None:
        """Report a landing with the next poll. Called on a worker."""
        self._landed.append((transfer, Landing(transfer.id, verdict, seconds, runs)))
        self._has_landed.set()
        self._wake()

    def _settle(self, transfer: Transfer, landing: Landing) -> Landing:
        """Add a landing to the sums of its route."""
        totals = self._totals_by_route[transfer.route]
        if landing.verdict is Verdict.LATE:
            totals.late += 1
            return landing
        self._flying_bytes[transfer.route] -= self._bytes(transfer)
        totals.transfers += 1
        totals.seconds += landing.seconds
        match landing.verdict:
            case Verdict.LANDED:
                totals.blocks += len(transfer.keys)
                totals.bytes += self._bytes(transfer)
                totals.copies += landing.runs
            case Verdict.MISS:
                totals.misses += 1
                self._damage.note(transfer)
            case Verdict.FAILED:
                totals.failures += 1
            case Verdict.RETURNED:  # counted when it was late
                pass
        return landing

    def _bytes(self, transfer: Transfer) -> int:
        return len(transfer.keys) * self._block_bytes


_VERDICTS = {
    DiskVerdict.OK: Verdict.LANDED,
    DiskVerdict.MISS: Verdict.MISS,
    DiskVerdict.FAILED: Verdict.FAILED,
    DiskVerdict.LATE: Verdict.LATE,
    DiskVerdict.RETURNED: Verdict.RETURNED,
}
