"""What copies are kept for: nothing stays kept for a sequence that does not need it any more."""

from array import array

from tiercel.ids import SeqId
from tiercel.kvcache.eviction import RetentionClass
from tiercel.kvcache.manager import CacheManager
from tiercel.kvcache.tiers import TierLimits
from tiercel.plan import NanoBatch, Plan, Slice
from tiercel.tier import Landing, Tier, Transfer, Verdict

BLOCK = 4
FIRST, OTHER = SeqId(1), SeqId(2)


class Steps:
    """A cache of 16 blocks over a DDR of 16, driven by hand; whoever comes in loads nothing, as after a failed step."""

    def __init__(self) -> None:
        self.cache = CacheManager(16, BLOCK, b"weights", host_blocks=16, limits=TierLimits(shadow_share=1.0))
        self._step = 0

    def compute(self, seq: SeqId, end: int) -> None:
        """A step that computes the sequence's tokens up to `end`, all of those that it has no blocks of."""
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
        """The sequence gives way; its blocks begin to go down."""
        ledger = self.cache.ledger()
        ledger.release(seq, spills=True)
        return (*self.cache.seal(Plan(()), ledger, self._step).transfers, *self.cache.outgoing())

    def write_back(self, seq: SeqId) -> None:
        """What the sequence has computed goes down in idle time, and has landed."""
        self.cache.work([seq], 0.0, is_idle=False)
        self.land(self.cache.outgoing())

    def land(self, transfers: list[Transfer] | tuple[Transfer, ...]) -> None:
        self.cache.land([Landing(transfer.id, Verdict.LANDED) for transfer in transfers])
        self.cache.check_integrity()

    def kept(self, retention: RetentionClass) -> int:
        """Copies in DDR that are kept for this."""
        return dict(self.cache.tiers.pools())[Tier.DDR].copies.num_retained(retention)


def test_a_spill_that_lands_after_its_sequence_came_back_and_gave_way_again_keeps_only_what_it_still_had() -> None:
    steps = Steps()
    steps.cache.open(FIRST, array("I", range(21)), b"s")
    steps.compute(FIRST, 8)
    steps.write_back(FIRST)
    steps.compute(FIRST, 20)
    spill = steps.preempt(FIRST)
    assert [len(transfer.keys) for transfer in spill] == [3]
    steps.cache.open(OTHER, array("I", range(100, 152)), b"s")
    steps.compute(OTHER, 52)  # takes all room that no transfer holds
    steps.cache.close(OTHER)
    steps.compute(FIRST, 4)  # the head of its chain has left HBM: it is computed again
    assert not steps.preempt(FIRST)
    steps.land(spill)
    assert steps.kept(RetentionClass.PREEMPTED) == 1, "the one block that it had when it gave way last"
    steps.cache.close(FIRST)
    assert steps.kept(RetentionClass.PREEMPTED) == 0, "kept for nobody"
