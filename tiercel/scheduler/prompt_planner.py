"""The prompts of a step: chunks of running prompts and admissions, in the order of the policy."""

from dataclasses import dataclass, field
from itertools import chain
from math import inf

from tiercel.scheduler.account import Account
from tiercel.scheduler.book import SequenceBook
from tiercel.scheduler.draft import Draft
from tiercel.scheduler.preemption_limiter import StarvationCounter
from tiercel.scheduler.preemptor import Preemptor
from tiercel.scheduler.sequence import SequenceProgress
from tiercel.values.ids import SeqId
from tiercel.values.outcome import SequenceState

_MAX_DEFERRED = 256  # deferred sequences considered in one step
_MAX_LONG = 1024  # long prompts skipped in one step because too many are in progress; takes about 2 ms

MAX_CANDIDATES = 64
"""The maximum number of sequences that one step considers, not counting deferred ones."""


@dataclass(slots=True)
class _Search:
    """The search of one step for sequences to continue or admit."""

    num_long: int  # long prompts in progress
    paused_accounts: frozenset[Account]  # accounts that pause because of their debt
    seen: set[SeqId] = field(default_factory=set[SeqId])  # sequences considered so far
    blocked: set[Account] = field(default_factory=set[Account])  # accounts whose first sequence does not fit
    blocked_band: float = inf  # the highest band among blocked accounts; no sequence of a lower band may be admitted
    has_misfit: bool = False  # a sequence did not fit; sequences are preempted only for the first one
    is_full: bool = False  # no row is free
    num_skipped: int = 0  # long prompts skipped because too many are in progress
    first_unserved: SeqId | None = None  # the first sequence that preemptions could serve; for the starvation counter
    partial: list[SequenceProgress] = field(default_factory=list[SequenceProgress])  # prompts served in part


class PromptPlanner:
    """Adds chunks of prompts and admissions to a draft."""

    def __init__(self, book: SequenceBook, preemptor: Preemptor, starvation: StarvationCounter) -> None:
        self._book = book
        self._policy = book.policy
        self._preemptor = preemptor
        self._starvation = starvation

    def fill(self, draft: Draft, prefills: list[SequenceProgress], paused_accounts: frozenset[Account]) -> None:
        """Add chunks and admissions in the order of the policy, until the tokens of the step are used.

        `prefills`: the running sequences with an unfinished prompt, without those of paused accounts. The starvation
        counter ignores sequences that are deferred or whose tenant is at its quota, because preemptions would not help
        them.
        """
        search = _Search(sum(self._is_long(draft, sequence) for sequence in prefills), paused_accounts)
        for sequence in prefills:
            if sequence.state is SequenceState.RUNNING:
                draft.cache.follow(sequence.id, sequence.scheduled)
        self._preemptor.begin_admissions()
        # Room that was freed for a starving sequence is used before another starving sequence is chosen.
        draft.aged = self._preemptor.earmarked_starving or self._policy.starving(draft.now_s)
        in_order = self._policy.candidates(draft.now_s, search.blocked)
        for seq in chain(() if draft.aged is None else (draft.aged,), in_order):
            if draft.tokens_left <= 0 or self._is_exhausted(draft, search):
                break
            self._consider(draft, search, self._book[seq])
            if self._is_closed(draft, search):
                break
        rest = [sequence for sequence in prefills if sequence.id not in search.seen]
        self._spend_rest(draft, search.partial + self._continue_others(draft, rest))
        first = search.first_unserved
        self._starvation.step(was_served=first is None or first in draft.slice_by_seq or first in draft.restores)
        if draft.aged not in draft.admitted and draft.aged not in draft.slice_by_seq:
            draft.aged = None

    def continue_all(self, draft: Draft, prefills: list[SequenceProgress]) -> None:
        """Add chunks of running prompts only."""
        self._spend_rest(draft, self._continue_others(draft, prefills))

    # ---- the search

    def _consider(self, draft: Draft, search: _Search, sequence: SequenceProgress) -> None:
        """Serve a sequence, unless the step has handled it, its account pauses, or too many long prompts run."""
        seq = sequence.id
        if sequence.account in search.paused_accounts or seq in search.seen or seq in draft.preemption_by_seq:
            return
        if self._policy.waits_behind(sequence, sequence.beneficiary(self._book.waiting), draft.now_s):
            return
        if self._is_too_long(draft, sequence, search.num_long):
            search.num_skipped += 1
            return
        search.seen.add(seq)
        self._serve(draft, search, sequence)
        is_helpless = seq in draft.deferred[-1:] or sequence.request.tenant in draft.at_quota
        if search.first_unserved is None and not is_helpless:
            search.first_unserved = seq
        if self._has_part(draft, sequence):
            search.partial.append(sequence)

    def _serve(self, draft: Draft, search: _Search, sequence: SequenceProgress) -> None:
        """Continue a running prompt, or admit a waiting sequence if it may be admitted."""
        allowance = self._allowance(draft, sequence)
        if sequence.state is SequenceState.RUNNING:
            self._continue(draft, sequence, allowance)
        elif sequence.state is SequenceState.RESTORING:
            draft.deferred.append(sequence.id)  # it has its row and its blocks, so no preemption can help it
        elif allowance > 0 and not self._is_closed(draft, search) and self._may_admit(draft, search, sequence):
            search.num_long += self._admit(draft, search, sequence, allowance) and self._is_long(draft, sequence)

    @staticmethod
    def _is_exhausted(draft: Draft, search: _Search) -> bool:
        """Return whether the step has reached a limit: of considered, of deferred, or of skipped sequences."""
        num_deferred = len(draft.deferred)
        num_considered = len(search.seen) - num_deferred
        return num_considered >= MAX_CANDIDATES or num_deferred >= _MAX_DEFERRED or search.num_skipped >= _MAX_LONG

    @staticmethod
    def _is_closed(draft: Draft, search: _Search) -> bool:
        """Return whether this step cannot admit any other sequence."""
        return draft.is_short or search.is_full or bool(draft.preemption_by_seq)

    def _continue_others(self, draft: Draft, prefills: list[SequenceProgress]) -> list[SequenceProgress]:
        """Continue the running prompts that the search did not reach, because they hold blocks.

        Return the sequences whose prompts the step computes in part.
        """
        partial: list[SequenceProgress] = []
        for sequence in sorted(prefills, key=self._policy.sort_key):
            if draft.tokens_left <= 0:
                break
            if sequence.id in draft.preemption_by_seq:
                continue
            self._continue(draft, sequence, self._allowance(draft, sequence))
            if self._has_part(draft, sequence):
                partial.append(sequence)
        return partial

    @staticmethod
    def _has_part(draft: Draft, sequence: SequenceProgress) -> bool:
        """Return whether the step computes some but not all of the remaining tokens of a sequence."""
        piece = draft.slice_by_seq.get(sequence.id)
        return piece is not None and piece.start + piece.length < sequence.num_tokens

    def _allowance(self, draft: Draft, sequence: SequenceProgress) -> int:
        """Return the tokens of this step for one sequence: its account's share of the prompts, at least a block."""
        share = self._policy.prefill_share(sequence.account)
        budget = draft.prompt_budget(max(sequence.scheduled, sequence.cached_tokens))
        return budget if share >= 1 else min(budget, max(draft.cache.block_size, int(share * budget)))

    def _spend_rest(self, draft: Draft, partial: list[SequenceProgress]) -> None:
        """Extend the slices of partly computed prompts by the remaining tokens of the step, in order."""
        for sequence in partial:
            piece = draft.slice_by_seq.get(sequence.id)
            if draft.tokens_left <= 0 or piece is None:
                continue
            want, budget = sequence.num_tokens - piece.start, piece.length + draft.prompt_budget(piece.start)
            length = draft.limits.chunk_tokens(piece.start, want, budget, draft.cache.block_size)
            end = piece.start + length
            if length <= piece.length or self._preemptor.lacks_quota(draft, sequence, end):
                continue
            if draft.cache.reserve(sequence.id, end):
                draft.extend(sequence, length)

    def _continue(self, draft: Draft, sequence: SequenceProgress, budget: int) -> None:
        """Add a slice of up to `budget` prompt tokens for a running sequence, if its blocks can be reserved."""
        if not sequence.want or budget <= 0:
            return
        cache, start = draft.cache, sequence.scheduled
        before = cache.num_blocks(sequence.id)
        budget = min(budget, draft.tokens_left)
        length = draft.limits.chunk_tokens(start, sequence.want, budget, cache.block_size)
        if self._preemptor.grow(draft, sequence, start + length):
            draft.add(sequence, start, length)
            draft.blocks_owed -= cache.num_blocks(sequence.id) - before

    # ---- admission

    def _may_admit(self, draft: Draft, search: _Search, sequence: SequenceProgress) -> bool:
        """Return False if the free room is kept for another sequence.

        Room is kept for the sequence that it was freed for, and for blocked sequences of the same account or of higher
        bands.
        """
        account = sequence.account
        if self._preemptor.is_kept_from(draft, sequence, search.seen):
            return False
        return account not in search.blocked and account.band <= search.blocked_band

    def _admit(self, draft: Draft, search: _Search, sequence: SequenceProgress, allowance: int) -> bool:
        """Admit a sequence: plan its first slice or start its restore.

        Return False if the sequence does not fit. Sequences that the policy allows may then be preempted.
        """
        cache, block_size = draft.cache, draft.cache.block_size
        num_others = len(self._book.running) + len(draft.admitted)
        if num_others >= draft.limits.max_num_seqs:
            search.is_full = True
            self._block(draft, search, sequence, -(-sequence.num_tokens // block_size))
            return False
        found = cache.match(sequence.id)
        if found is not None and self._waits_for_running(draft, search, sequence.id, found.tokens):
            cache.release(sequence.id)
            found = None
        if found is None:
            draft.deferred.append(sequence.id)  # another sequence computes its prefix
            return False
        missing = -(-sequence.num_tokens // block_size) - found.hit_blocks
        if self._preemptor.exceeds_quota(draft, sequence, missing):
            cache.release(sequence.id)
            # Preempting other tenants would not help, and sequences of other tenants need not wait.
            search.blocked.add(sequence.account)
            draft.at_quota.add(sequence.request.tenant)
            return False
        # Blocks for its known tokens, for the unfinished prompts of the others, and one for the growth of each.
        needed = missing + draft.blocks_owed + num_others
        if num_others and cache.available_blocks < needed:
            cache.release(sequence.id)
            self._block(draft, search, sequence, needed)
            return False
        if found.load_blocks:
            # All blocks and one more are reserved before the restore starts: restores that reserve blocks one by one
            # may wait for each other for ever.
            end = min(found.tokens + block_size, sequence.limit)
            if not draft.limiter.may_restore() or not cache.reserve(sequence.id, end):
                cache.release(sequence.id)
                return False
            draft.limiter.restore()
            draft.restores.append(sequence.id)
        else:
            want = sequence.num_tokens - found.tokens
            budget = max(1, min(allowance, draft.prompt_budget(found.tokens)))
            length = draft.limits.chunk_tokens(found.tokens, want, budget, block_size)
            if not cache.reserve(sequence.id, found.tokens + length):
                cache.release(sequence.id)
                return False
            draft.add(sequence, found.tokens, length)
            cache.follow(sequence.id, found.tokens + length)
        draft.blocks_owed += max(0, missing + found.hit_blocks - cache.num_blocks(sequence.id))
        draft.admitted.append(sequence.id)
        return True

    def _waits_for_running(self, draft: Draft, search: _Search, seq: SeqId, tokens: int) -> bool:
        """Return whether a running prompt computes what the sequence lacks behind its first `tokens` cached tokens.

        The running prompt takes the place of the sequence in the order. If it cannot be served, the sequence does not
        wait for it.
        """
        running = draft.cache.computing(seq, tokens)
        if running is None:
            return False
        if running not in draft.slice_by_seq:
            self._consider(draft, search, self._book[running])
        return running in draft.slice_by_seq

    def _block(self, draft: Draft, search: _Search, sequence: SequenceProgress, needed: int) -> None:
        """Mark the account of a sequence that does not fit as blocked.

        For the first sequence of a step that does not fit, preempt the victims that the policy allows.
        """
        is_first, search.has_misfit = not search.has_misfit, True
        search.blocked.add(self._policy.queue.account(sequence.id))
        search.blocked_band = min(search.blocked_band, sequence.account.band)
        if is_first and not draft.admitted:
            self._preemptor.take(draft, sequence, needed)

    # ---- limits

    def _is_too_long(self, draft: Draft, sequence: SequenceProgress, num_long: int) -> bool:
        """Return whether a long prompt has to wait because the maximum number of long prompts is in progress."""
        limit = draft.limits.max_long_partial_prefills
        is_waiting = sequence.state in (SequenceState.WAITING, SequenceState.PREEMPTED)
        return bool(limit) and num_long >= limit and is_waiting and self._is_long(draft, sequence)

    @staticmethod
    def _is_long(draft: Draft, sequence: SequenceProgress) -> bool:
        return sequence.num_tokens - sequence.scheduled >= draft.limits.long_prompt_tokens
