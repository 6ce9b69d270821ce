"""Preempt running sequences so that another sequence can grow or be admitted."""

import functools
from collections.abc import Container, Iterator
from itertools import chain
from typing import NamedTuple

from tiercel.scheduler.account import Account
from tiercel.scheduler.book import SequenceBook
from tiercel.scheduler.draft import Draft
from tiercel.scheduler.policy import Holdings
from tiercel.scheduler.preemption_order import VictimCandidate, victims
from tiercel.scheduler.sequence import SequenceProgress
from tiercel.scheduler.swap_choice import SwapChooser
from tiercel.values.ids import SeqId
from tiercel.values.plan import PreemptionReason

_MIN_TOKENS_SINCE_RESUME = 16  # tokens before a resumed sequence may be preempted for a waiting one again
_EARMARK_STEPS = 64  # steps for which freed room is kept for the sequence that it was freed for


class _Victim(NamedTuple):
    """A running sequence that may be preempted."""

    sequence: SequenceProgress
    reason: PreemptionReason
    price_ms: float
    is_worth: bool  # the preemption settles enough to be worth its price


class Preemptor:
    """Preempts sequences on a draft, and keeps the freed room for the sequence that it was freed for."""

    def __init__(self, book: SequenceBook, chooser: SwapChooser) -> None:
        self.is_too_dear = False  # the last attempt to free room failed only because of its price
        self.largest_price_ms: dict[Account, float] = {}  # considered so far for a preemption for debt
        self._book = book
        self._policy = book.policy
        self._chooser = chooser
        self._earmark: SeqId | None = None  # the sequence that room was freed for
        self._is_for_aged = False  # the earmarked sequence is starving, and is admitted on the aging share
        self._earmark_steps = 0

    # ---- for running sequences

    def grow(self, draft: Draft, sequence: SequenceProgress, tokens: int) -> bool:
        """Reserve blocks for a running sequence, and preempt sequences of lower ranks if necessary.

        Return False if the sequence has to wait for blocks that are being freed or, if its tenant's quota is full,
        until an older sequence of the tenant ends.
        """
        cache = draft.cache
        if not self._make_quota(draft, sequence, tokens):
            return False
        while not cache.reserve(sequence.id, tokens):
            missing = -(-tokens // cache.block_size) - cache.num_blocks(sequence.id)
            victim = self._growth_victim(draft, sequence)
            if cache.available_blocks + cache.coming_blocks >= missing or victim is None:
                draft.is_short = True
                return False
            draft.preempt(victim, "growth", sequence)
        return True

    def keep_for_growth(self, draft: Draft) -> None:
        """Preempt a sequence if the blocks will soon run out.

        The blocks of a victim are free only after the steps in flight have committed, so this looks two steps ahead.
        """
        cache, block_size = draft.cache, draft.cache.block_size
        if draft.preemption_by_seq or draft.is_short or len(self._book.running) < 2:
            return
        if cache.available_blocks + cache.coming_blocks >= len(draft.slice_by_seq):
            return  # enough even if every sequence needs a block
        growing = [  # sequences that need a block within two steps
            one
            for piece in draft.slice_by_seq.values()
            if -(end := piece.start + piece.length) % block_size < 2 and end + 1 < (one := self._book[piece.seq]).limit
        ]
        if cache.available_blocks + cache.coming_blocks < len(growing):
            victim = self._growth_victim(draft, self._book.running[0])
            if victim is not None:
                draft.preempt(victim, "growth", min(growing, key=lambda one: one.rank))

    def _growth_victim(self, draft: Draft, beneficiary: SequenceProgress) -> SequenceProgress | None:
        """Return the victim of a lower rank: of the lowest band, of the tenant with the largest lead, the newest.

        Ranks never change by themselves, so two sequences cannot preempt each other in turns.
        """
        preempted = draft.preemption_by_seq
        behind = [one for one in self._book.running if one.rank > beneficiary.rank and one.id not in preempted]
        if not behind:
            return None
        return max(behind, key=lambda one: (one.account.band, self._policy.fair.lead(one.account), one.rank))

    # ---- quotas

    def lacks_quota(self, draft: Draft, sequence: SequenceProgress, tokens: int) -> bool:
        """Return whether `tokens` need blocks that the quota of the sequence's tenant does not allow."""
        missing = -(-tokens // draft.cache.block_size) - draft.cache.num_blocks(sequence.id)
        left = draft.cache.quota_left(sequence.id) if missing > 0 else None
        return left is not None and missing > left

    def exceeds_quota(self, draft: Draft, sequence: SequenceProgress, missing: int) -> bool:
        """Return whether the admission of a sequence would exceed its tenant's quota.

        The quota must also cover the known tokens of the tenant's other sequences, and one block for each to grow. A
        sequence without others may always be admitted: it was accepted under an earlier quota, and waiting would not
        help it.
        """
        cache = draft.cache
        left = cache.quota_left(sequence.id)
        if left is None:
            return False
        others = self._siblings(draft, sequence)
        owed = sum(max(0, -(-one.num_tokens // cache.block_size) - cache.num_blocks(one.id)) for one in others)
        return bool(others) and missing + owed + len(others) > left

    def _make_quota(self, draft: Draft, sequence: SequenceProgress, tokens: int) -> bool:
        """Preempt the tenant's newest sequences until the quota allows `tokens`. Return False if only older remain."""
        while self.lacks_quota(draft, sequence, tokens):
            others = self._siblings(draft, sequence)
            behind = [one for one in others if one.rank > sequence.rank and one.id not in draft.admitted]
            if not behind:
                return not others  # without others it was accepted under an earlier quota
            draft.preempt(max(behind, key=lambda one: one.rank), "growth", sequence)
        return True

    def clear_quota(self, draft: Draft, sequence: SequenceProgress, tokens: int) -> None:
        """Preempt other sequences of the tenant, the newest first, until the quota allows `tokens`."""
        while self.lacks_quota(draft, sequence, tokens) and (others := self._siblings(draft, sequence)):
            draft.preempt(max(others, key=lambda one: one.rank), "growth", sequence)

    def _siblings(self, draft: Draft, sequence: SequenceProgress) -> list[SequenceProgress]:
        """Return the tenant's other sequences that hold blocks. Cost: O(running sequences)."""
        holders = chain(self._book.running, map(self._book.__getitem__, draft.admitted))
        tenant, left_out = sequence.account.tenant, (sequence.id, *draft.preemption_by_seq)
        return [one for one in holders if one.account.tenant == tenant and one.id not in left_out]

    # ---- for waiting sequences

    def take(self, draft: Draft, sequence: SequenceProgress, needed: int) -> None:
        """Preempt on behalf of a waiting sequence that needs `needed` blocks and a row. It is admitted later."""
        cache = draft.cache
        for victim, reason, price_ms, _ in self._chosen(draft, sequence, needed):
            is_enough = draft.preemption_by_seq and cache.available_blocks + cache.coming_blocks >= needed
            if is_enough or not draft.limiter.may_preempt():
                break
            draft.limiter.preempt(spills=draft.preempt(victim, reason, sequence, price_ms))
            self._earmark = sequence.id
            self._is_for_aged = sequence.id == draft.aged
            self._earmark_steps = 0

    def begin_admissions(self) -> None:
        """Begin the admissions of a step. Drop the earmark if its sequence does not wait any more or waits too long."""
        self.is_too_dear = False
        self._earmark_steps += 1
        if self._earmark not in self._book.waiting or self._earmark_steps > _EARMARK_STEPS:
            self._earmark = None

    @property
    def earmarked_starving(self) -> SeqId | None:
        """The starving sequence that room was freed for, while it is not yet admitted."""
        return self._earmark if self._is_for_aged else None

    def is_kept_from(self, draft: Draft, sequence: SequenceProgress, seen: Container[SeqId]) -> bool:
        """Return whether the free room is kept for another sequence, which is starving or earlier in the order.

        `seen`: the sequences that the step has considered before this one.
        """
        earmark = self._earmark
        if earmark is None or earmark == sequence.id or earmark in draft.admitted:
            return False
        return self._is_for_aged or earmark in seen

    # ---- inside

    def _holdings(self, draft: Draft, first: Account, needed: int) -> Holdings:
        """Return the part of blocks or rows, whichever is larger, that each account holds.

        The first account counts with `needed` blocks and one row more. Rows count because many short sequences fill
        an engine as a few long ones do.
        """
        cache = draft.cache
        total = cache.available_blocks + cache.coming_blocks
        blocks_by_account: dict[Account, int] = {first: needed}
        rows_by_account: dict[Account, int] = {first: 1}
        for one in self._book.running:
            blocks, account = cache.num_blocks(one.id), one.account
            total += blocks
            blocks_by_account[account] = blocks_by_account.get(account, 0) + blocks
            rows_by_account[account] = rows_by_account.get(account, 0) + 1
        return {
            account: max(blocks / max(total, 1), rows_by_account[account] / draft.limits.max_num_seqs)
            for account, blocks in blocks_by_account.items()
        }

    def _chosen(self, draft: Draft, beneficiary: SequenceProgress, needed: int) -> list[_Victim]:
        """Return the sequences to preempt, in order: as many as free the needed blocks and are affordable.

        If they do not free enough blocks together, only those of lower bands are returned: preemptions for debt or
        for a share would waste their work.
        """
        cache, left_ms = draft.cache, self._policy.preemption_budget.left_ms
        missing = missing_at_any_price = max(1, needed - cache.available_blocks - cache.coming_blocks)
        chosen: list[_Victim] = []
        num_of_lower_bands = 0
        for victim in self._victims(draft, beneficiary, needed):
            if missing <= 0:
                break
            blocks = 1 + cache.num_blocks(victim.sequence.id)  # with the block that is kept for its growth
            missing_at_any_price -= blocks
            if victim.reason != "band":
                if not victim.is_worth or victim.price_ms > left_ms:
                    continue
                left_ms -= victim.price_ms
            else:
                num_of_lower_bands += 1
            chosen.append(victim)
            missing -= blocks
        self.is_too_dear = missing > 0 >= missing_at_any_price
        return chosen if missing <= 0 else chosen[:num_of_lower_bands]

    def _victims(self, draft: Draft, beneficiary: SequenceProgress, needed: int) -> Iterator[_Victim]:
        """Yield the running sequences that may be preempted for a waiting one, in order.

        Cost: O(running sequences).
        """
        policy, first = self._policy, beneficiary.account
        starves = beneficiary.id == draft.aged
        holdings = functools.cache(lambda: self._holdings(draft, first, needed))

        @functools.cache
        def reason_for(account: Account, is_aged: bool, price_ms: float = 0.0) -> PreemptionReason | None:
            if starves and not is_aged and account.band <= first.band:
                return "share"  # the aging share; sequences of lower bands are preempted for the reason `band`
            return policy.reason(account, first, draft.now_s, holdings, is_aged=is_aged, price_ms=price_ms)

        min_tokens = 0 if draft.limiter.is_lifted else _MIN_TOKENS_SINCE_RESUME
        candidates = [
            self._candidate(one)
            for one in self._book.running
            if one.id != draft.aged and reason_for(one.account, one.is_aged) is not None
        ]
        price_by_account: dict[Account, float] = {}  # of the victims so far, which one debt pays for together
        gain = functools.partial(self._gain, draft, needed)
        for seq in victims(candidates, policy.fair.lead, gain, min_tokens):
            victim = self._book[seq]
            account, reason = victim.account, reason_for(victim.account, victim.is_aged)
            is_before = starves and account.band == first.band and victim.rank < beneficiary.rank
            if reason is None or is_before or seq in draft.preemption_by_seq:
                continue
            price_ms = self._price_ms(draft, victim)
            together_ms = price_by_account.get(account, 0.0) + price_ms
            if reason == "debt" and together_ms > self.largest_price_ms.get(account, 0.0):
                self.largest_price_ms[account] = together_ms
            worth = reason_for(account, victim.is_aged, together_ms)
            if worth is not None:
                price_by_account[account] = together_ms
            yield _Victim(victim, worth or reason, price_ms, is_worth=worth is not None)

    def _price_ms(self, draft: Draft, victim: SequenceProgress) -> float:
        """Return the predicted device time of preempting a sequence: moving its blocks or computing it again.

        Work in flight is discarded, so it counts like computed work.
        """
        decision = self._chooser.decide(*draft.cache.blocks_below(victim.id), victim.scheduled)
        if decision.swaps:
            return 1e3 * decision.chosen_s
        return self._policy.costs.recompute_ms(victim.scheduled, step_tokens=draft.step_tokens)

    def _gain(self, draft: Draft, needed: int, seq: SeqId) -> float:
        """Return the wanted blocks that a victim would free, per second of its preemption and return."""
        cost = self._chooser.cost(*draft.cache.blocks_below(seq), self._book[seq].scheduled)
        return min(draft.cache.num_blocks(seq), max(needed, 1)) / (1e-6 + min(cost.swap_s, cost.recompute_s))

    def _candidate(self, sequence: SequenceProgress) -> VictimCandidate:
        return VictimCandidate(
            seq=sequence.id,
            account=sequence.account,
            is_batch=self._policy.slo(sequence.request.tenant).kind == "batch",
            admission=sequence.admission,
            # A sequence that was never preempted may be preempted at any time: only repeated preemptions are costly.
            since_resume=sequence.computed - sequence.resumed_at if sequence.preemptions else _MIN_TOKENS_SINCE_RESUME,
        )
