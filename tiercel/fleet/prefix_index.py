"""The index of the prefixes that the engines of a fleet have cached: from heads of block keys to engines."""

from collections.abc import Iterable, Sequence

from tiercel.values.errors import InvariantError
from tiercel.values.ids import EngineId, KeyHead

MAX_KEYS = 1 << 20
"""The default number of heads that an index keeps: about 180 MB with 64 engines, for 128 million tokens."""

_SHARDS = 256


class PrefixIndex:
    """For each announced head of a block key a bit mask of the engines that have the block, or will have it soon.

    Heads that an engine has stored stay until it drops them or leaves; promised ones, those of requests under way,
    until they are retracted. An engine that leaves is not found any more at once, and its bits are cleared little by
    little by the calls that follow.

    Memory: at most `max_keys` stored heads at up to 180 bytes each with 64 engines (320 bytes with 1,000; measured by
    `tests/fleet/test_prefix_index.py`). Beyond that, of each of 256 parts of the index the head stored first is
    forgotten, which costs hits and nothing else. A promised head takes up to 500 bytes; their number is limited by the
    requests under way.
    """

    def __init__(self, max_keys: int = MAX_KEYS) -> None:
        """Errors: InvariantError if `max_keys` is less than 256."""
        if max_keys < _SHARDS:
            raise InvariantError("prefix_index.max_keys", max_keys=max_keys, least=_SHARDS)
        self._max_of_shard = max_keys // _SHARDS
        self._shards: list[dict[int, int]] = [{} for _ in range(_SHARDS)]
        self._promises: dict[int, dict[int, int]] = {}  # head -> bit -> number of requests
        self._bit_by_engine: dict[EngineId, int] = {}
        self._engine_by_bit: dict[int, EngineId] = {}
        self._alive = 0  # mask of the engines that have joined
        self._left = 0  # mask of bits that the sweep under way clears
        self._to_sweep = 0  # mask of bits that the next sweep clears
        self._next_shard = _SHARDS  # of the sweep; _SHARDS: there is none
        self.num_forgotten = 0  # heads, for lack of room

    @property
    def num_keys(self) -> int:
        """Number of stored heads, with those that only engines which have left had stored and that are not cleared."""
        return sum(map(len, self._shards))

    @property
    def engines(self) -> Iterable[EngineId]:
        """The engines that have joined."""
        return self._bit_by_engine.keys()

    def join(self, engine: EngineId, heads: Iterable[KeyHead] = ()) -> None:
        """Add an engine and the heads that it has, all of them. Errors: InvariantError if it is there already."""
        if engine in self._bit_by_engine:
            raise InvariantError("prefix_index.joined", engine=engine)
        used = self._alive | self._left | self._to_sweep
        bit = (~used & (used + 1)).bit_length() - 1  # the lowest that is free
        self._bit_by_engine[engine] = bit
        self._engine_by_bit[bit] = engine
        self._alive |= 1 << bit
        self.store(engine, heads)

    def leave(self, engine: EngineId) -> None:
        """Remove an engine, if it is there. Cost: O(promised heads)."""
        bit = self._bit_by_engine.pop(engine, None)
        if bit is None:
            return
        del self._engine_by_bit[bit]
        self._alive &= ~(1 << bit)
        self._to_sweep |= 1 << bit
        for head in [head for head, counts in self._promises.items() if bit in counts]:
            self._promises[head].pop(bit)
            if not self._promises[head]:
                del self._promises[head]
        self._sweep()

    def store(self, engine: EngineId, heads: Iterable[KeyHead]) -> None:
        """Note heads that an engine has stored. Heads of an engine that is not there are ignored: they are late."""
        bit = self._bit_by_engine.get(engine)
        if bit is None:
            return
        mask, most, shards = 1 << bit, self._max_of_shard, self._shards
        for head in heads:
            shard = shards[head % _SHARDS]
            known = shard.get(head)
            if known is not None:
                shard[head] = known | mask
                continue
            if len(shard) >= most:
                del shard[next(iter(shard))]
                self.num_forgotten += 1
            shard[head] = mask
        self._sweep()

    def drop(self, engine: EngineId, heads: Iterable[KeyHead]) -> None:
        """Note heads that an engine does not have any more. Unknown engines and heads are ignored."""
        bit = self._bit_by_engine.get(engine)
        if bit is None:
            return
        keep, shards = ~(1 << bit), self._shards
        for head in heads:
            shard = shards[head % _SHARDS]
            left = shard.get(head, 0) & keep
            if left:
                shard[head] = left
            else:
                shard.pop(head, None)
        self._sweep()

    def promise(self, engine: EngineId, heads: Sequence[KeyHead]) -> tuple[KeyHead, ...]:
        """Note that a request under way will store heads. Return those that were not stored: `retract` takes them."""
        bit = self._bit_by_engine.get(engine)
        if bit is None:
            return ()
        mask, shards, promises = 1 << bit, self._shards, self._promises
        new = tuple(head for head in heads if not shards[head % _SHARDS].get(head, 0) & mask)
        for head in new:
            counts = promises.setdefault(head, {})
            counts[bit] = counts.get(bit, 0) + 1
        return new

    def retract(self, engine: EngineId, heads: Iterable[KeyHead]) -> None:
        """Take back promised heads: the engine has stored them by now, or will not."""
        bit = self._bit_by_engine.get(engine)
        if bit is None:
            return
        promises = self._promises
        for head in heads:
            counts = promises[head]
            counts[bit] -= 1
            if not counts[bit]:
                del counts[bit]
                if not counts:
                    del promises[head]

    def find(self, heads: Sequence[KeyHead]) -> dict[EngineId, int]:
        """Return for each engine that has a prefix of these heads how many of them, from the first one on, it has.

        Cost: one look-up for each head up to the first that no engine has, and O(engines found).
        """
        shards, promises = self._shards, self._promises
        mask, steps = self._alive, list[tuple[int, int]]()
        for number, head in enumerate(heads):
            having = shards[head % _SHARDS].get(head, 0)
            counts = promises.get(head)
            if counts is not None:
                for bit in counts:
                    having |= 1 << bit
            left = mask & having
            if left != mask:
                if number:
                    steps.append((mask & ~left, number))
                mask = left
                if not mask:
                    break
        if mask and heads:
            steps.append((mask, len(heads)))
        found: dict[EngineId, int] = {}
        for group, number in steps:
            while group:
                low = group & -group
                found[self._engine_by_bit[low.bit_length() - 1]] = number
                group ^= low
        return found

    def check_integrity(self) -> None:
        """Check masks and counts. Errors: InvariantError."""
        used = self._alive | self._left | self._to_sweep
        if self._alive & (self._left | self._to_sweep) or self._left & self._to_sweep:
            raise InvariantError("prefix_index.bits")
        if {1 << bit for bit in self._engine_by_bit} != {1 << bit for bit in self._bit_by_engine.values()}:
            raise InvariantError("prefix_index.engines")
        for number, shard in enumerate(self._shards):
            if len(shard) > self._max_of_shard or any(not mask or mask & ~used for mask in shard.values()):
                raise InvariantError("prefix_index.shard", shard=number)
        for head, counts in self._promises.items():
            if not counts or any(count < 1 or not self._alive >> bit & 1 for bit, count in counts.items()):
                raise InvariantError("prefix_index.promises", head=head)

    def _sweep(self) -> None:
        """Clear the bits of engines that have left from one more shard; free the bits at the end."""
        if self._next_shard == _SHARDS:
            if not self._to_sweep:
                return
            self._left, self._to_sweep, self._next_shard = self._to_sweep, 0, 0
        gone, shard = self._left, self._shards[self._next_shard]
        for head in [head for head, mask in shard.items() if mask & gone]:
            left = shard[head] & ~gone
            if left:
                shard[head] = left
            else:
                del shard[head]
        self._next_shard += 1
        if self._next_shard == _SHARDS:
            self._left = 0
