"""The queue of waiting sequences in the order of the policy: heaps per account, never a sort of all."""

from collections.abc import Container, Iterator, KeysView
from heapq import heapify, heappop, heappush
from typing import NamedTuple, Protocol

from tiercel.scheduler.account import Account
from tiercel.scheduler.queue_order import Order, WaitingSequence
from tiercel.values.errors import InvariantError
from tiercel.values.ids import SeqId, TenantId

_REBUILD_FROM = 64  # changed accounts from which rebuilding the heaps is faster than moving single heads


class Gate(Protocol):
    """Decides which accounts of a band go first. `TenantBook` is one."""

    def is_eligible(self, account: Account) -> bool: ...
    def may_admit(self, account: Account, now_s: float) -> bool: ...
    def may_age(self, account: Account) -> bool: ...
    def wait(self, account: Account, num_waiting: int, num_ready: int, now_s: float) -> None: ...
    def take_changed(self) -> set[Account]: ...


_Item = tuple[float, SeqId, int]  # key, sequence, stamp; stale if the sequence has another stamp now


class _Entry:
    """One waiting sequence."""

    __slots__ = ("is_deferred", "line", "since_s", "stamp", "waiting")

    def __init__(self, waiting: WaitingSequence, line: "_Line", stamp: int) -> None:
        self.waiting = waiting
        self.line = line
        self.stamp = stamp
        self.is_deferred = False


class _Line:
    """The waiting sequences of one account, in a heap by key and a heap by age.

    A stale item is removed when it reaches the top of its heap. When more than half of a heap is stale, the heap is
    rebuilt without its stale items.
    """

    __slots__ = ("account", "by_age", "by_key", "head", "is_stalled", "num_deferred", "num_waiting", "oldest")

    def __init__(self, account: Account) -> None:
        self.account = account
        self.by_key: list[_Item] = []
        self.by_age: list[_Item] = []
        self.num_waiting = 0
        self.num_deferred = 0
        self.is_stalled = False  # none of its sequences is dispatchable
        self.head: _Head | None = None  # its first item by key, in the heap of its band
        self.oldest: _Head | None = None  # its first item by age, in the heap of all lines

    @property
    def num_live(self) -> int:
        """The items in each of its heaps that are not stale."""
        return self.num_waiting - self.num_deferred

    @property
    def num_ready(self) -> int:
        return 0 if self.is_stalled else self.num_live


class _Head(NamedTuple):
    """The first item of a line, to compare lines. Stale if it is no longer the line's `head` or `oldest`."""

    key: float  # or the time since when the sequence has waited
    seq: SeqId
    stamp: int
    line: _Line


class _BandLines:
    """The lines of one band, and two heaps of their heads."""

    __slots__ = ("heads", "lines")

    def __init__(self) -> None:
        self.lines: dict[Account, _Line] = {}
        self.heads: tuple[list[_Head], list[_Head]] = ([], [])  # of eligible accounts, of the others


class WaitingQueue:
    """All waiting sequences: heaps per account, and heaps of their heads per band.

    Cost: logarithmic for adding, removing, updating and iterating, whatever the number of waiting sequences.
    Iterating changes nothing.
    """

    def __init__(self, order: Order, gate: Gate) -> None:
        self._order = order
        self._gate = gate
        self._entries: dict[SeqId, _Entry] = {}
        self._bands: dict[int, _BandLines] = {}
        self._oldest: list[_Head] = []  # a heap of the lines' `oldest`
        self._num_lines = 0
        self._stamp = 0
        self._version = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, seq: object) -> bool:
        return seq in self._entries

    @property
    def seqs(self) -> KeysView[SeqId]:
        """All waiting sequences, in no order."""
        return self._entries.keys()

    def __getitem__(self, seq: SeqId) -> WaitingSequence:
        return self._entries[seq].waiting

    def account(self, seq: SeqId) -> Account:
        """Return the account under which a sequence waits: without a tenant under `priority` and `fcfs`.

        Errors: KeyError if the sequence does not wait.
        """
        return self._entries[seq].line.account

    def sort_key(self, waiting: WaitingSequence, *, is_spent: bool) -> tuple[float, float, float]:
        """Return a key that sorts sequences as `candidates` yields them. `is_spent`: the account is not eligible."""
        return self._order.account(waiting).band, is_spent, self._order.key(waiting)

    def add(self, waiting: WaitingSequence, now_s: float) -> None:
        """Add a sequence. Errors: InvariantError if it already waits."""
        if waiting.seq in self._entries:
            raise InvariantError("queue.added_twice", seq=waiting.seq)
        line = self._line(self._order.account(waiting))
        entry = self._entries[waiting.seq] = _Entry(waiting, line, self._next_stamp())
        line.num_waiting += 1
        self._push(entry)
        self._line_changed(line, now_s)

    def remove(self, seq: SeqId, now_s: float) -> None:
        """Remove a sequence. Errors: KeyError if it does not wait."""
        entry = self._entries.pop(seq)
        line = entry.line
        line.num_waiting -= 1
        line.num_deferred -= entry.is_deferred
        self._line_changed(line, now_s)

    def update(self, waiting: WaitingSequence, now_s: float) -> None:
        """Move a sequence after a change of its work, goal or band, or of the order's alpha.

        Errors: KeyError if the sequence does not wait.
        """
        entry = self._entries[waiting.seq]
        before, entry.line = entry.line, self._line(self._order.account(waiting))
        entry.waiting = waiting
        entry.stamp = self._next_stamp()
        if not entry.is_deferred:
            self._push(entry)
        if entry.line is not before:
            entry.line.num_waiting += 1
            entry.line.num_deferred += entry.is_deferred
            before.num_waiting -= 1
            before.num_deferred -= entry.is_deferred
            self._line_changed(before, now_s)
        self._line_changed(entry.line, now_s)

    def defer(self, seq: SeqId, now_s: float) -> None:
        """Mark a sequence as not dispatchable: it is being restored, or another sequence computes its prefix."""
        entry = self._entries[seq]
        if not entry.is_deferred:
            entry.is_deferred = True
            entry.stamp = self._next_stamp()
            entry.line.num_deferred += 1
            self._line_changed(entry.line, now_s)

    def resume(self, seq: SeqId, now_s: float) -> None:
        """Mark a deferred sequence as dispatchable again."""
        entry = self._entries[seq]
        if entry.is_deferred:
            entry.is_deferred = False
            entry.stamp = self._next_stamp()
            entry.line.num_deferred -= 1
            self._push(entry)
            self._line_changed(entry.line, now_s)

    def stall(self, tenant: TenantId, now_s: float, *, is_stalled: bool) -> None:
        """Set whether a limit of the tenant itself keeps its sequences back, so that they are not dispatchable.

        `candidates` yields them all the same, so that the planner notices when the limit allows them again.
        """
        for number, band in self._bands.items():
            line = band.lines.get(Account(number, tenant))
            if line is not None and line.is_stalled != is_stalled:
                line.is_stalled = is_stalled
                self._line_changed(line, now_s)

    def refresh(self) -> None:
        """Read from the gate which accounts are eligible now. Call after charges and refills, before `candidates`."""
        changed = self._gate.take_changed()
        if len(changed) > _REBUILD_FROM:
            for band in self._bands.values():
                self._rebuild(band)
        else:
            for account in changed:
                band = self._bands.get(account.band)
                line = band.lines.get(account) if band is not None else None
                if line is not None:
                    line.head = None
                    self._update_head(line)
        for band in self._bands.values():
            for heads in band.heads:
                while heads and heads[0].line.head is not heads[0]:
                    heappop(heads)

    def candidates(self, now_s: float, closed: Container[Account] = ()) -> Iterator[SeqId]:
        """Yield dispatchable sequences, ordered by (band, not eligible, key), without those of barred accounts.

        `closed` may grow during the iteration: the remaining sequences of its accounts are left out.
        Errors: InvariantError if the queue changes during the iteration.
        """
        version = self._version
        for number in sorted(self._bands):
            for heads in self._bands[number].heads:
                for seq in self._walk(heads, now_s, closed):
                    yield seq
                    if version != self._version:
                        raise InvariantError("queue.changed_while_drawing")

    def oldest(self, now_s: float, starve_s: float) -> SeqId | None:
        """Return the dispatchable sequence that has waited longest, in any band.

        Returns None if no sequence of an account that may age has waited for `starve_s`.
        """
        heads = self._oldest
        reached = [(*head[:3], 0) for head in heads[:1]]
        while reached:
            since_s, seq, _, index = heappop(reached)
            head = heads[index]
            if now_s - since_s < starve_s:
                return None
            line = head.line
            if line.oldest is head and not line.is_stalled and self._gate.may_age(line.account):
                return seq
            for child in range(2 * index + 1, min(2 * index + 3, len(heads))):
                heappush(reached, (*heads[child][:3], child))
        return None

    def since_by_tenant(self) -> dict[TenantId, float]:
        """Return since when the oldest waiting sequence of each tenant has waited. Cost: O(accounts)."""
        since: dict[TenantId, float] = {}
        for tenant, since_s in self.oldest_by_account():
            since[tenant] = min(since.get(tenant, since_s), since_s)
        return since

    def oldest_by_account(self) -> Iterator[tuple[TenantId, float]]:
        """Yield since when the oldest waiting sequence of each account has waited.

        The queue may change during the iteration.
        """
        for band in list(self._bands.values()):
            for line in list(band.lines.values()):
                if line.oldest is not None:
                    yield line.account.tenant, line.oldest.key

    def check_integrity(self) -> None:
        """Check counts, items and heads. Errors: InvariantError."""
        for band in self._bands.values():
            for line in band.lines.values():
                entries = [entry for entry in self._entries.values() if entry.line is line]
                ready = [entry for entry in entries if not entry.is_deferred]
                live = sorted(item for item in line.by_key if self._is_live(item))
                heads = [head[:3] for heads in band.heads for head in heads if line.head is head]
                oldest = [head[:3] for head in self._oldest if line.oldest is head]
                is_right = (
                    (line.num_waiting, line.num_live) == (len(entries), len(ready))
                    and sorted(item[1] for item in live) == sorted(entry.waiting.seq for entry in ready)
                    and heads == live[:1]
                    and oldest == sorted(item for item in line.by_age if self._is_live(item))[:1]
                )
                if not is_right:
                    raise InvariantError("queue.line", account=line.account)

    def _walk(self, heads: list[_Head], now_s: float, closed: Container[Account]) -> Iterator[SeqId]:
        """Yield the sequences of these lines in order, without taking anything from the heaps.

        The children of a heap node are looked at when the node is yielded.
        """
        entries = self._entries
        front: list[tuple[float, SeqId, int, int, _Line | None]] = []  # key, sequence, stamp, index, line
        if heads:
            front.append((*heads[0][:3], -1, None))
        while front:
            _, seq, stamp, index, line = heappop(front)
            if line is None:  # a head, with a negative index; the heads below it and the line's sequences follow
                head_index = -1 - index
                for child in range(2 * head_index + 1, min(2 * head_index + 3, len(heads))):
                    heappush(front, (*heads[child][:3], -1 - child, None))
                head = heads[head_index]
                line, index = head.line, 0
                if line.head is not head or not self._gate.may_admit(line.account, now_s):
                    continue
            if line.account in closed:
                continue
            first_child = 2 * index + 1
            for child, item in enumerate(line.by_key[first_child : first_child + 2], first_child):
                heappush(front, (*item, child, line))
            entry = entries.get(seq)
            if entry is not None and entry.stamp == stamp:
                yield seq

    def _push(self, entry: _Entry) -> None:
        waiting = entry.waiting
        heappush(entry.line.by_key, (self._order.key(waiting), waiting.seq, entry.stamp))
        heappush(entry.line.by_age, (waiting.since_s, waiting.seq, entry.stamp))

    def _line_changed(self, line: _Line, now_s: float) -> None:
        """Update the line's heads, and tell the gate how many of its sequences wait."""
        self._version += 1
        for heap in (line.by_key, line.by_age):
            self._sweep(heap, line.num_live)
        self._gate.wait(line.account, line.num_waiting, line.num_ready, now_s)
        band = self._bands[line.account.band]
        self._update_oldest(line)
        if line.num_waiting:
            self._update_head(line)
            return
        line.head = None
        del band.lines[line.account]
        self._num_lines -= 1
        if not band.lines:
            del self._bands[line.account.band]

    def _update_head(self, line: _Line) -> None:
        """Put the line's first item by key into the heaps of its band."""
        if not line.by_key:
            line.head = None
            return
        first = line.by_key[0]
        if line.head is not None and line.head[:3] == first:
            return
        band = self._bands[line.account.band]
        line.head = _Head(*first, line)
        heads = band.heads[not self._gate.is_eligible(line.account)]
        heappush(heads, line.head)
        if len(heads) > 16 + 2 * len(band.lines):
            heads[:] = [head for head in heads if head.line.head is head]
            heapify(heads)

    def _update_oldest(self, line: _Line) -> None:
        """Put the line's first item by age into the heap of all lines."""
        first = line.by_age[0] if line.by_age else None
        if first is None or line.oldest is None or line.oldest[:3] != first:
            line.oldest = _Head(*first, line) if first is not None else None
            if line.oldest is not None:
                heappush(self._oldest, line.oldest)
                if len(self._oldest) > 16 + 2 * self._num_lines:
                    self._oldest = [head for head in self._oldest if head.line.oldest is head]
                    heapify(self._oldest)

    def _rebuild(self, band: _BandLines) -> None:
        """Build the heaps of a band anew from the live heads."""
        for heads in band.heads:
            heads.clear()
        for line in band.lines.values():
            if line.head is not None:
                band.heads[not self._gate.is_eligible(line.account)].append(line.head)
        for heads in band.heads:
            heapify(heads)

    def _line(self, account: Account) -> _Line:
        band = self._bands.setdefault(account.band, _BandLines())
        line = band.lines.get(account)
        if line is None:
            line = band.lines[account] = _Line(account)
            self._num_lines += 1
        return line

    def _sweep(self, heap: list[_Item], num_live: int) -> None:
        """Remove stale items from the top, and all stale items if they are more than half of the heap."""
        while heap and not self._is_live(heap[0]):
            heappop(heap)
        if len(heap) > 16 + 2 * num_live:
            heap[:] = [item for item in heap if self._is_live(item)]
            heapify(heap)

    def _is_live(self, item: _Item) -> bool:
        entry = self._entries.get(item[1])
        return entry is not None and entry.stamp == item[2]

    def _next_stamp(self) -> int:
        self._stamp += 1
        return self._stamp
