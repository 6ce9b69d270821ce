"""The cache manager: sealing keeps the promises of the ledger, and each key has one canonical copy."""

import random
from array import array

import pytest

from tiercel.kvcache.ledger import Ledger
from tiercel.kvcache.manager import CacheManager
from tiercel.kvcache.step_budget import MAX_HASHES
from tiercel.values.errors import InvariantError
from tiercel.values.ids import SeqId
from tiercel.values.plan import NanoBatch, Plan, Slice, StepPlan
from tiercel.values.rates import Rates

BLOCK = 4


def plan_of(*slices: tuple[int, int, int]) -> Plan:
    pieces = tuple(Slice(SeqId(seq), start, length, False) for seq, start, length in slices)
    return Plan((NanoBatch(pieces),) if pieces else ())


def hit(ledger: Ledger, seq: int) -> int | None:
    """Return the tokens of the prefix that the ledger gives to a sequence; None if the sequence must wait."""
    found = ledger.match(SeqId(seq))
    return None if found is None else found.tokens


class Driver:
    """A cache, driven step by step."""

    def __init__(self, blocks: int = 16, **options: bool) -> None:
        self.cache = CacheManager(blocks, BLOCK, b"weights", **options)
        self.tokens: dict[int, array[int]] = {}
        self.step = 0

    def open(self, seq: int, tokens: list[int], scope: bytes = b"s") -> None:
        self.tokens[seq] = array("I", tokens)
        self.cache.open(SeqId(seq), self.tokens[seq], scope)

    def launch(self, seq: int, *, end: int | None = None) -> StepPlan:
        """Compute tokens of one sequence from its prefix hit up to `end`, launched but not committed."""
        ledger = self.cache.ledger()
        start = hit(ledger, seq) if not self.cache.slots(SeqId(seq)) else 0
        assert start is not None
        end = end or len(self.tokens[seq])
        assert ledger.reserve(SeqId(seq), end)
        ledger.claim(SeqId(seq), start, end)
        return self.seal(plan_of((seq, start, end - start)), ledger)

    def seal(self, plan: Plan, ledger: Ledger) -> StepPlan:
        self.step += 1
        return self.cache.seal(plan, ledger, self.step)

    def compute(self, seq: int, *, end: int | None = None) -> None:
        """Launch and commit a step for one sequence."""
        self.launch(seq, end=end)
        self.cache.commit(self.step, [(SeqId(seq), end or len(self.tokens[seq]))])
        self.cache.check_integrity()


def test_a_full_prefix_is_hit_and_one_token_is_always_left() -> None:
    driver = Driver()
    driver.open(1, list(range(12)))
    driver.compute(1)
    driver.open(2, list(range(12)))
    ledger = driver.cache.ledger()
    assert hit(ledger, 2) == 8
    driver.open(3, list(range(13)))
    assert hit(ledger, 3) == 12


def test_a_hit_needs_the_same_scope_and_the_same_prefix() -> None:
    driver = Driver()
    driver.open(1, list(range(12)), scope=b"one")
    driver.compute(1)
    driver.open(2, list(range(12)), scope=b"two")
    driver.open(3, [99, *range(1, 12)], scope=b"one")
    ledger = driver.cache.ledger()
    assert hit(ledger, 2) == 0
    assert hit(ledger, 3) == 0


def test_uncommitted_blocks_are_waited_for_and_never_hit() -> None:
    driver = Driver()
    driver.open(1, list(range(12)))
    driver.launch(1)
    driver.open(2, list(range(12)))
    assert hit(driver.cache.ledger(), 2) is None
    driver.cache.commit(driver.step, [(SeqId(1), 12)])
    assert hit(driver.cache.ledger(), 2) == 8


def test_a_failed_step_publishes_nothing() -> None:
    driver = Driver()
    driver.open(1, list(range(12)))
    driver.launch(1)
    driver.cache.end(driver.step)
    driver.open(2, list(range(12)))
    assert hit(driver.cache.ledger(), 2) == 0


def test_the_free_of_a_slot_is_deferred_until_the_last_step_that_touches_it_commits() -> None:
    driver = Driver(blocks=4)
    driver.open(1, list(range(14)))
    driver.launch(1)
    driver.cache.close(SeqId(1))
    driver.open(2, list(range(50, 64)))
    assert driver.cache.blocks_used == 4
    assert not driver.cache.ledger().reserve(SeqId(2), 1)
    driver.cache.end(driver.step)
    assert driver.cache.blocks_used == 0
    assert driver.cache.ledger().reserve(SeqId(2), 14)


def test_two_sequences_that_computed_the_same_block_end_with_one_copy() -> None:
    driver = Driver()
    for seq in (1, 2):
        driver.open(seq, list(range(9)))
    ledger = driver.cache.ledger()
    assert ledger.reserve(SeqId(1), 9) and ledger.reserve(SeqId(2), 9)
    driver.seal(plan_of((1, 0, 9), (2, 0, 9)), ledger)
    before = driver.cache.slots(SeqId(2))
    driver.cache.commit(driver.step, [(SeqId(1), 9), (SeqId(2), 9)])
    driver.cache.check_integrity()
    assert driver.cache.slots(SeqId(2))[:2] == driver.cache.slots(SeqId(1))[:2] != before[:2]
    assert driver.cache.slots(SeqId(2))[2] == before[2]
    assert driver.cache.blocks_used == 4
    ledger = driver.cache.ledger()
    updates = driver.seal(plan_of((2, 9, 1)), ledger).table_updates
    assert [(update.seq, update.first, update.slots) for update in updates] == [
        (2, 0, driver.cache.slots(SeqId(1))[:1]),
        (2, 1, driver.cache.slots(SeqId(1))[1:2]),
    ]


def test_the_least_recent_chain_goes_first_and_its_tail_before_its_head() -> None:
    driver = Driver(blocks=6)
    driver.open(1, list(range(12)))
    driver.compute(1)
    driver.open(2, list(range(50, 62)))
    driver.compute(2)
    driver.cache.close(SeqId(1))
    driver.cache.close(SeqId(2))
    driver.open(3, list(range(90, 98)))
    driver.compute(3)  # takes two blocks: the tail of chain 1
    for seq, tokens, expected in ((4, range(12), 4), (5, range(50, 62), 8)):
        driver.open(seq, list(tokens))
        assert hit(driver.cache.ledger(), seq) == expected


def test_without_prefix_caching_nothing_is_kept() -> None:
    driver = Driver(has_prefix_caching=False)
    driver.open(1, list(range(12)))
    driver.compute(1)
    driver.cache.close(SeqId(1))
    driver.open(2, list(range(12)))
    assert hit(driver.cache.ledger(), 2) == 0
    assert driver.cache.blocks_cached == 0


def test_fresh_tables_are_runs_of_consecutive_slots() -> None:
    driver = Driver(blocks=16)
    driver.open(1, list(range(40)))
    driver.compute(1)
    slots = driver.cache.slots(SeqId(1))
    assert list(slots) == list(range(slots[0], slots[0] + 10))


def test_a_very_long_prompt_is_hashed_in_pieces() -> None:
    driver = Driver(blocks=8)
    driver.open(1, [1] * 40_000)
    asked = 1
    while hit(driver.cache.ledger(), 1) is None:
        asked += 1
    assert asked == 20  # 9,999 blocks, 512 a step


def test_books_that_disagree_are_found() -> None:
    driver = Driver(blocks=2)
    driver.open(1, list(range(12)))
    with pytest.raises(InvariantError):
        driver.open(1, [1])
    roomy = CacheManager(8, BLOCK, b"weights")
    roomy.open(SeqId(1), driver.tokens[1], b"s")
    ledger = roomy.ledger()
    assert ledger.reserve(SeqId(1), 12)
    with pytest.raises(InvariantError, match="exhausted"):
        driver.cache.seal(plan_of((1, 0, 12)), ledger, 1)  # promised by another pool


class Walk:
    """Random plans, sealed and then committed or failed, with victims, shared prefixes and steps in flight."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.blocks = self.rng.choice([6, 12, 40])
        self.driver = Driver(self.blocks)
        self.next_seq = 1
        self.computed: dict[int, int] = {}  # launched tokens of the sequences that hold blocks
        self.flights: list[tuple[int, list[tuple[int, int, int]]]] = []  # step, and its slices

    def open(self) -> None:
        shared = [7] * self.rng.randrange(0, 24)
        self.driver.open(self.next_seq, shared + [self.rng.randrange(5) for _ in range(self.rng.randrange(1, 12))])
        self.next_seq += 1

    def plan(self) -> None:
        cache, rng = self.driver.cache, self.rng
        ledger = cache.ledger()
        launched = dict(self.computed)
        slices: list[tuple[int, int, int]] = []
        for seq in rng.sample(sorted(self.driver.tokens), len(self.driver.tokens)):
            if seq in launched and rng.random() < 0.2:
                ledger.release(SeqId(seq))
                del launched[seq]
                continue
            if seq not in launched and any(seq == flying for _, flown in self.flights for flying, _, _ in flown):
                continue  # draining
            start = launched[seq] if seq in launched else hit(ledger, seq)
            want = 0 if start is None else len(self.driver.tokens[seq]) - start
            if start is None or want < 1:
                continue
            length = rng.randrange(1, want + 1)
            if ledger.reserve(SeqId(seq), start + length):
                ledger.claim(SeqId(seq), start, start + length)
                slices.append((seq, start, length))
                launched[seq] = start + length
            elif seq not in launched:
                ledger.release(SeqId(seq))
        promised = ledger.available_blocks, ledger.coming_blocks
        self.driver.seal(plan_of(*slices), ledger)
        cache.check_integrity()
        deferred = cache.blocks_used - len({slot for seq in self.driver.tokens for slot in cache.slots(SeqId(seq))})
        assert promised == (self.blocks - cache.blocks_used, deferred)
        self.computed = launched
        self.flights.append((self.driver.step, slices))

    def commit(self) -> None:
        if self.flights:
            step, slices = self.flights.pop(0)
            progress = [(SeqId(seq), start + length) for seq, start, length in slices if seq in self.computed]
            self.driver.cache.commit(step, progress)

    def fail(self) -> None:
        """Fail the oldest step: this step and all steps behind it count for nothing, and name no block."""
        named = dict(self.driver.cache.tiers.device.slot_by_key)
        voided: set[int] = set()
        for step, slices in self.flights:
            self.driver.cache.end(step)
            for seq, start, _ in slices:
                if seq in self.computed and seq not in voided:
                    self.computed[seq] = start  # its table stays, and the tokens are computed again from there
                    voided.add(seq)
        self.flights.clear()
        assert self.driver.cache.tiers.device.slot_by_key == named
        used = {slot for seq in self.driver.tokens for slot in self.driver.cache.slots(SeqId(seq))}
        assert self.driver.cache.blocks_used == len(used)

    def close(self) -> None:
        if self.driver.tokens:
            seq = self.rng.choice(sorted(self.driver.tokens))
            self.driver.cache.close(SeqId(seq))
            del self.driver.tokens[seq]
            self.computed.pop(seq, None)


@pytest.mark.parametrize("seed", range(60))
def test_random_walk_keeps_promises(seed: int) -> None:
    walk = Walk(seed)
    for _ in range(120):
        walk.rng.choice([walk.open, walk.plan, walk.plan, walk.plan, walk.commit, walk.commit, walk.fail, walk.close])()
        walk.driver.cache.check_integrity()
    while walk.driver.tokens:
        walk.close()
    while walk.flights:
        walk.commit()
    walk.driver.cache.check_integrity()
    assert walk.driver.cache.blocks_used == 0


def test_a_released_slice_claims_nothing() -> None:
    """No sequence waits for the blocks of a slice whose sequence is preempted by the same plan."""
    driver = Driver()
    for seq in (1, 2):
        driver.open(seq, list(range(12)))
    ledger = driver.cache.ledger()
    assert hit(ledger, 1) == 0
    assert ledger.reserve(SeqId(1), 12)
    ledger.claim(SeqId(1), 0, 12)
    assert ledger.match(SeqId(2)) is None, "the second waits for the first"
    ledger.release(SeqId(1))
    assert not ledger.claimed
    assert hit(ledger, 2) == 0


def test_long_prompts_without_cached_blocks_cost_a_step_next_to_nothing() -> None:
    """Otherwise the first prompts would spend the look-ups of every step, and the others would never be looked up."""
    cache = CacheManager(64, BLOCK, b"weights", host_blocks=64, rates=lambda: Rates(bytes_per_s_by_route={}))
    for seq in range(32):
        cache.open(SeqId(seq), array("I", range(10_000 * seq, 10_000 * seq + 4 * 2000)), b"s")
    for _ in range(32 * 2000 // MAX_HASHES + 2):
        ledger = cache.ledger()
        found = [hit(ledger, seq) for seq in range(32)]
    assert found == [0] * 32
    assert not cache.has_more
