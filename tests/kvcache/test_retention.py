"""Retention classes: no copy is kept for a sequence that does not need it any more."""

from array import array

from tiercel.kvcache.eviction import RetentionClass
from tiercel.kvcache.manager import CacheManager
from tiercel.kvcache.tiers import TierLimits
from tiercel.values.ids import SeqId
from tiercel.values.plan import NanoBatch, Plan, Slice
from tiercel.values.tier import Landing, Tier, Transfer, Verdict

BLOCK = 4
FIRST, OTHER = SeqId(1), SeqId(2)


class Steps:
    """A cache of 16 blocks over a DDR of 16, driven step by step. Admitted sequences load nothing from DDR."""

    def __init__(self) -> None:
        self.cache = CacheManager(16, BLOCK, b"weights", host_blocks=16, limits=TierLimits(shadow_share=1.0))
        self._step = 0

    def compute(self, seq: SeqId, end: int) -> None:
        """Compute the sequence's tokens up to `end`, except those whose blocks it has."""
        self._step += 1
        ledger, start = self.cache.ledger(), len(self.cache.slots(seq)) * BLOCK
        if not start:
            found = ledger.match(seq, may_load=False)
            start = found.tokens if found else 0
        assert ledger.reserve(seq, end)
        ledger.claim(seq, start, end)
        self.cache.seal(Plan((NanoBatch((Slice(seq, start, end - start, False),)),)), ledger, self._step)
        self.cache.commit(self._step, [(seq, end)])
        self.cache.check_integrity()

    def preempt(self, seq: SeqId) -> tuple[Transfer, ...]:
        """Preempt the sequence. Return the transfers that take its blocks down."""
        ledger = self.cache.ledger()
        ledger.release(seq, spills=True)
        return (*self.cache.seal(Plan(()), ledger, self._step).transfers, *self.cache.outgoing())

    def write_back(self, seq: SeqId) -> None:
        """Write the sequence's blocks back to DDR in idle time, and land them."""
        self.cache.work([seq], 0.0, is_idle=False)
        self.land(self.cache.outgoing())

    def land(self, transfers: list[Transfer] | tuple[Transfer, ...]) -> None:
        self.cache.land([Landing(transfer.id, Verdict.LANDED) for transfer in transfers])
        self.cache.check_integrity()

    def kept(self, retention: RetentionClass) -> int:
        """Return the number of DDR copies of a class."""
        return dict(self.cache.tiers.pools())[Tier.DDR].copies.num_retained(retention)


def test_a_spill_that_lands_after_a_second_preemption_keeps_only_the_blocks_held_then() -> None:
    steps = Steps()
    steps.cache.open(FIRST, array("I", range(21)), b"s")
    steps.compute(FIRST, 8)
    steps.write_back(FIRST)
    steps.compute(FIRST, 20)
    spill = steps.preempt(FIRST)
    assert [len(transfer.keys) for transfer in spill] == [3]
    steps.cache.open(OTHER, array("I", range(100, 152)), b"s")
    steps.compute(OTHER, 52)  # takes all slots that no transfer holds
    steps.cache.close(OTHER)
    steps.compute(FIRST, 4)  # the head of its chain was evicted from HBM and is computed again
    assert not steps.preempt(FIRST)
    steps.land(spill)
    assert steps.kept(RetentionClass.PREEMPTED) == 1, "the one block that it held at its last preemption"
    steps.cache.close(FIRST)
    assert steps.kept(RetentionClass.PREEMPTED) == 0, "the sequence has ended"
