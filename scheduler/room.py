"""Room for one sequence: who gives way so that it can grow or come in."""

import functools
from collections.abc import Iterator
from itertools import chain
from typing import NamedTuple

from tiercel.ids import SeqId
from tiercel.plan import PreemptionReason
from tiercel.scheduler.book import SequenceBook
from tiercel.scheduler.draft import Draft
from tiercel.scheduler.fairness import Account
from tiercel.scheduler.policy import Holdings
from tiercel.scheduler.sequence import SequenceProgress
from tiercel.scheduler.swap_choice import SwapChooser
from tiercel.scheduler.victim import VictimCandidate, victims

_LEAST_SINCE_RESUME = 16  # tokens before somebody who came back may be sent away again for one who waits
_EARMARK_STEPS = 64  # for so long nobody takes what was freed for somebody else


class _Victim(NamedTuple):
    """A running sequence that may be preempted."""

    sequence: SequenceProgress
    reason: PreemptionReason
    price_ms: float
    is_worth: bool  # what the preemption settles is worth its price


class RoomMaker:
    """Preempts on a draft. Remembers for whom the last room was freed until it has come in."""

    def __init__(self, book: SequenceBook, chooser: SwapChooser) -> None:
        self._book = book
        self._policy = book.policy
        self._chooser = chooser
        self._earmark: SeqId | None = None
        self._is_for_aged = False  # the earmarked comes in on the aging share
        self._earmark_steps = 0
        self.is_too_dear = False  # the last step's one attempt to make room cost too much, whomever it was for

    # ---- for who runs

    def grow(self, draft: Draft, sequence: SequenceProgress, tokens: int) -> bool:
        """Reserve blocks, preempting those behind it in rank. False: wait for blocks that are coming.

        Or, where its tenant's quota is full, for an older one of that tenant to end: nobody else waits with it.
        """
        cache = draft.cache
        if not self._make_quota(draft, sequence, tokens):
            return False
        while not cache.reserve(sequence.id, tokens):
            missing = -(-tokens // cache.block_size) - cache.num_blocks(sequence.id)
            victim = self._behind(draft, sequence)
            if cache.available_blocks + cache.coming_blocks >= missing or victim is None:
                draft.is_short = True
                return False
            draft.preempt(victim, "growth", sequence)
        return True

    def keep_for_growth(self, draft: Draft) -> None:
        """Preempt before room runs out: a victim's blocks are free only after the steps in flight have committed."""
        cache, block_size = draft.cache, draft.cache.block_size
        if draft.victims or draft.is_short or len(self._book.running) < 2:
            return
        if cache.available_blocks + cache.coming_blocks >= len(draft.slice_by_seq):
            return  # room for everybody, whoever crosses a block boundary next
        growing = [  # need a block within two steps
            one
            for piece in draft.slice_by_seq.values()
            if -(end := piece.start + piece.length) % block_size < 2 and end + 1 < (one := self._book[piece.seq]).limit
        ]
        if cache.available_blocks + cache.coming_blocks < len(growing):
            victim = self._behind(draft, self._book.running[0])
            if victim is not None:
                draft.preempt(victim, "growth", min(growing, key=lambda one: one.rank))

    def _behind(self, draft: Draft, beneficiary: SequenceProgress) -> SequenceProgress | None:
        """Of those behind it in rank: the lowest band, the tenant furthest ahead of its share, the newest.

        Ranks never change by themselves, so that two cannot take from each other in turns.
        """
        behind = [one for one in self._book.running if one.rank > beneficiary.rank and one.id not in draft.victims]
        if not behind:
            return None
        return max(behind, key=lambda one: (one.band, self._policy.lead(one.account), one.rank))

    # ---- quotas

    def lacks_quota(self, draft: Draft, sequence: SequenceProgress, tokens: int) -> bool:
        """For so many tokens it needs blocks that its tenant may not hold beside what it holds."""
        missing = -(-tokens // draft.cache.block_size) - draft.cache.num_blocks(sequence.id)
        left = draft.cache.quota_left(sequence.id) if missing > 0 else None
        return left is not None and missing > left

    def may_not_come(self, draft: Draft, sequence: SequenceProgress, missing: int) -> bool:
        """Its tenant's quota has no room for it, for what the tenant's others still need, and one block each to grow.

        Alone it may come whatever the quota: it was accepted under another one, and waiting would not help it.
        """
        cache = draft.cache
        left = cache.quota_left(sequence.id)
        if left is None:
            return False
        others = self._siblings(draft, sequence)
        owed = sum(max(0, -(-one.num_tokens // cache.block_size) - cache.num_blocks(one.id)) for one in others)
        return bool(others) and missing + owed + len(others) > left

    def _make_quota(self, draft: Draft, sequence: SequenceProgress, tokens: int) -> bool:
        """Where it lacks quota, its tenant's newest give way. False: the others of its tenant are older."""
        while self.lacks_quota(draft, sequence, tokens):
            others = self._siblings(draft, sequence)
            behind = [one for one in others if one.rank > sequence.rank and one.id not in draft.admitted]
            if not behind:
                return not others  # alone, it was accepted under another quota: waiting would not help it
            draft.preempt(max(behind, key=lambda one: one.rank), "growth", sequence)
        return True

    def clear_quota(self, draft: Draft, sequence: SequenceProgress, tokens: int) -> None:
        """Where it lacks quota, its tenant's others give way, newest first, whatever their rank."""
        while self.lacks_quota(draft, sequence, tokens) and (others := self._siblings(draft, sequence)):
            draft.preempt(max(others, key=lambda one: one.rank), "growth", sequence)

    def _siblings(self, draft: Draft, sequence: SequenceProgress) -> list[SequenceProgress]:
        """The others of its tenant that hold blocks. Cost: one look at those that run."""
        holders = chain(self._book.running, map(self._book.__getitem__, draft.admitted))
        tenant = sequence.account.tenant
        return [one for one in holders if one.account.tenant == tenant and one.id not in (sequence.id, *draft.victims)]

    # ---- for who waits

    def take(self, draft: Draft, sequence: SequenceProgress, needed: int) -> None:
        """Preempt on behalf of a waiting sequence that needs `needed` blocks and a row. It is admitted later."""
        cache = draft.cache
        for victim, reason, price_ms, _ in self._chosen(draft, sequence, needed):
            is_enough = draft.victims and cache.available_blocks + cache.coming_blocks >= needed
            if is_enough or not draft.brake.may_preempt():
                break
            draft.brake.preempt(spills=draft.preempt(victim, reason, sequence, price_ms))
            self._earmark = sequence.id
            self._is_for_aged = sequence.id == draft.aged
            self._earmark_steps = 0

    def tend(self) -> None:
        """Freed room is for whom it was freed, until it has come in, has gone, or has not managed for long."""
        self.is_too_dear = False
        self._earmark_steps += 1
        if self._earmark not in self._book.waiting or self._earmark_steps > _EARMARK_STEPS:
            self._earmark = None

    @property
    def starved(self) -> SeqId | None:
        """Room was freed for this one because it starved, and it has not come in."""
        return self._earmark if self._is_for_aged else None

    def is_kept_from(self, draft: Draft, sequence: SequenceProgress) -> bool:
        """The room there is was freed for another, who stands before it and still waits; or starves."""
        earmark = self._earmark
        if earmark is None or earmark == sequence.id or earmark in draft.admitted:
            return False
        return self._is_for_aged or earmark in draft.looked_at

    # ---- inside

    def _holdings(self, draft: Draft, first: Account, needed: int) -> Holdings:
        """What an account would hold with so many blocks and one row more, and what the others hold.

        Of blocks or of rows, whichever is more: many small sequences fill an engine as a few large ones do.
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
            account: max(blocks / max(total, 1), rows_by_account[account] / draft.rows)
            for account, blocks in blocks_by_account.items()
        }

    def _chosen(self, draft: Draft, beneficiary: SequenceProgress, needed: int) -> list[_Victim]:
        """The sequences to preempt, first to last: those of lower bands, then as many as suffice and are affordable.

        Preemptions for debt or for a share that would not free enough together, or whose prices exceed the budget,
        are not begun: their work would be lost for nothing.
        """
        cache, left_ms = draft.cache, self._policy.preemption_budget.left_ms
        missing = missing_at_any_price = max(1, needed - cache.available_blocks - cache.coming_blocks)
        chosen: list[_Victim] = []
        num_free = 0  # of the victims of lower bands
        for victim in self._victims(draft, beneficiary, needed):
            if missing <= 0:
                break
            blocks = 1 + cache.num_blocks(victim.sequence.id)  # with the one that is kept for its growth
            missing_at_any_price -= blocks
            if victim.reason != "band":
                if not victim.is_worth or victim.price_ms > left_ms:
                    continue
                left_ms -= victim.price_ms
            else:
                num_free += 1
            chosen.append(victim)
            missing -= blocks
        self.is_too_dear = missing > 0 >= missing_at_any_price
        return chosen if missing <= 0 else chosen[:num_free]

    def _victims(self, draft: Draft, beneficiary: SequenceProgress, needed: int) -> Iterator[_Victim]:
        """Running sequences that may be preempted on its behalf, first to last. Cost: one look at each that runs."""
        policy, first = self._policy, beneficiary.account
        starves = beneficiary.id == draft.aged
        holdings = functools.cache(lambda: self._holdings(draft, first, needed))

        @functools.cache
        def reason_for(account: Account, is_aged: bool, price_ms: float = 0.0) -> PreemptionReason | None:
            if starves and not is_aged and account.band <= first.band:
                return "share"  # that of those who starve; a lower band gives way anyhow
            return policy.reason(account, first, draft.now_s, holdings, is_aged=is_aged, price_ms=price_ms)

        least = 0 if draft.brake.is_void else _LEAST_SINCE_RESUME
        holders = [
            self._holder(one)
            for one in self._book.running
            if one.id != draft.aged and reason_for(one.account, one.is_aged) is not None
        ]
        price_by_account: dict[Account, float] = {}  # of all that were taken so far: one debt pays for them together
        for seq in victims(holders, policy.lead, lambda seq: self._gain(draft, seq, needed), least):
            victim = self._book[seq]
            account, reason = victim.account, reason_for(victim.account, victim.is_aged)
            is_before = starves and victim.band == beneficiary.band and victim.rank < beneficiary.rank
            if reason is None or is_before or seq in draft.victims:
                continue
            price_ms = self._price_ms(draft, victim)
            together_ms = price_by_account.get(account, 0.0) + price_ms
            worth = reason_for(account, victim.is_aged, together_ms)
            if worth is not None:
                price_by_account[account] = together_ms
            yield _Victim(victim, worth or reason, price_ms, is_worth=worth is not None)

    def _price_ms(self, draft: Draft, victim: SequenceProgress) -> float:
        """Return the predicted device time of preempting a sequence: moving its blocks, computing again what is left.

        Work in flight is discarded, and counts as what is computed.
        """
        decision = self._chooser.decide(*draft.cache.blocks_below(victim.id), victim.scheduled)
        if decision.swaps:
            return 1e3 * decision.chosen_s
        return self._policy.costs.recompute_ms(victim.scheduled, step_tokens=draft.step_tokens)

    def _gain(self, draft: Draft, seq: SeqId, needed: int) -> float:
        """Of the blocks that are wanted, those that it would free, for each second that its way out and back takes."""
        cost = self._chooser.cost(*draft.cache.blocks_below(seq), self._book[seq].scheduled)
        return min(draft.cache.num_blocks(seq), max(needed, 1)) / (1e-6 + min(cost.swap_s, cost.recompute_s))

    def _holder(self, sequence: SequenceProgress) -> VictimCandidate:
        return VictimCandidate(
            seq=sequence.id,
            account=sequence.account,
            is_batch=self._policy.slo(sequence.request.tenant).kind == "batch",
            admitted=sequence.admitted,
            # Who never gave way may be sent away at any time: only going to and fro is dear.
            since_resume=sequence.computed - sequence.resumed_at if sequence.preemptions else _LEAST_SINCE_RESUME,
        )
