"""The planner: from the book and a cache overlay to the plan of one step."""

import functools
from itertools import chain, islice

from tiercel.ids import SeqId
from tiercel.outcome import SequenceState
from tiercel.plan import Plan
from tiercel.rates import Rates
from tiercel.scheduler.book import SequenceBook
from tiercel.scheduler.chunk import chunk_length
from tiercel.scheduler.draft import CacheView, Draft, StepSplitter
from tiercel.scheduler.fairness import Account
from tiercel.scheduler.nanobatch import Splitter
from tiercel.scheduler.room import RoomMaker
from tiercel.scheduler.sequence import SequenceProgress
from tiercel.scheduler.step_limits import YIELD_LOSS, StepLimits
from tiercel.scheduler.swap_choice import SwapChooser
from tiercel.scheduler.victim import PreemptionLimiter, StarvationCounter

_MOST_CANDIDATES = 64  # looked at in one step, without those that wait for something on its way
_MOST_DEFERRED = 256  # of those
_MOST_LONG = 1024  # long prompts passed over in one step because too many are under way: about 2 ms


class Planner:
    """Decides who computes what next. Reads the book, draws on the cache's overlay, changes neither."""

    def __init__(
        self,
        book: SequenceBook,
        limits: StepLimits,
        chooser: SwapChooser | None = None,
        splitter: StepSplitter | None = None,
    ) -> None:
        self._book = book
        self._policy = book.policy
        self._limits = limits
        self._chooser = chooser or SwapChooser("auto", Rates)
        self._splitter = splitter or Splitter()
        self._room = RoomMaker(book, self._chooser)
        self._hunger = StarvationCounter()
        self._most_forward_tokens: int | None = None

    @property
    def limits(self) -> StepLimits:
        """What one step may hold."""
        return self._limits

    def set_limits(self, limits: StepLimits) -> None:
        """Other limits from the next step on. What runs beyond a lower one goes on."""
        self._limits = limits

    def cap_forwards(self, tokens: int | None) -> None:
        """No nano-batch computes more tokens from the next step on; None: as many as the step does.

        Steps shrink as far: but those that decode all get their token, in as many nano-batches as that takes.
        """
        self._most_forward_tokens = tokens

    def order(self, now_s: float) -> tuple[SeqId, ...]:
        """The first of those that wait, in the order in which they will be admitted. Begins a step.

        Those deferred in the step before are among them: what they wait for may have to be asked for again.
        """
        self._policy.begin(now_s)
        waiting, starving = self._book.waiting, self._policy.starving(now_s)
        first = chain(() if starving is None else (starving,), self._policy.candidates(now_s))
        return tuple(dict.fromkeys(islice((seq for seq in first if seq in waiting), _MOST_CANDIDATES)))

    def plan(self, cache: CacheView, now_s: float = 0.0, order: tuple[SeqId, ...] | None = None) -> Plan:
        """One step: decodes, then chunks of prompts and admissions in the policy's order.

        The first in rank always gets a token; it may take blocks from those behind it. Never fails for lack of room.
        `order` is published with the plan, without those that it admits; None: as it is now.
        """
        draft = Draft(cache, self._budget(), self._limits.max_num_seqs, now_s, self._chooser, self._splitter)
        draft.most_forward_tokens = self._most_forward_tokens
        draft.order = self.order(now_s) if order is None else order
        if self._book.num_suspects:
            self._run_suspect(draft)
            return draft.plan()
        draft.brake = PreemptionLimiter(is_void=self._hunger.is_void)
        draft.held = self._debtors(now_s)
        prefills, decodes = self._running()
        self._decode(draft, self._free(draft, decodes), has_prefills=bool(prefills))
        draft.outstanding = sum(
            max(0, -(-one.num_tokens // cache.block_size) - cache.num_blocks(one.id))
            for one in prefills
            if one.id not in draft.victims
        )
        self._room.keep_for_growth(draft)
        self._fill(draft, self._free(draft, prefills))
        if draft.held and draft.is_empty:  # nobody can use the step but those who were to pause for it
            draft.held = frozenset()
            self._decode(draft, decodes, has_prefills=bool(prefills))
            self._spend_rest(draft, self._continue_others(draft, prefills))
        return draft.plan()

    def _budget(self) -> int:
        """Tokens of one step."""
        limits, most = self._limits, self._most_forward_tokens
        if most is None:
            return limits.max_num_batched_tokens
        return min(limits.max_num_batched_tokens, max(most, limits.max_num_seqs, len(self._book.running)))

    def _running(self) -> tuple[list[SequenceProgress], list[SequenceProgress]]:
        """Those whose prompt is not through, and those that want the one token of a decode; in rank order."""
        prefills: list[SequenceProgress] = []
        decodes: list[SequenceProgress] = []
        in_queue = self._policy.queue.seqs
        for sequence in self._book.running:
            if sequence.id in in_queue:
                prefills.append(sequence)
            elif sequence.want:
                decodes.append(sequence)
        return prefills, decodes

    # ---- debt

    def _debtors(self, now_s: float) -> frozenset[Account]:
        """Who has had so much more than its share that it pauses while the first of those who wait is served.

        Pausing costs nothing: they keep their blocks, unless the first needs the room. For one that its own quota
        keeps back nobody pauses: the first is the first behind it. Nor for one that waits while
        room is too dear to take: the sooner the debtors end, or their debt is worth the price, the sooner it is
        admitted. A step tries to make room for one sequence; if that was another one, which starves, the first waits
        for the outcome just the same.
        """
        fair = self._policy.fair
        if fair is None:
            return frozenset()
        stalled: set[Account] = set()
        for seq in self._policy.candidates(now_s, stalled):
            account = self._book[seq].account
            if fair.is_ready(account):
                if self._room.is_too_dear and seq in self._book.waiting:
                    return frozenset()
                return self._policy.debtors(account, now_s)
            stalled.add(account)
        return frozenset()

    def _free(self, draft: Draft, sequences: list[SequenceProgress]) -> list[SequenceProgress]:
        """Those that need not pause."""
        held = draft.held
        return [one for one in sequences if one.account not in held] if held else sequences

    # ---- decodes

    def _decode(self, draft: Draft, decodes: list[SequenceProgress], *, has_prefills: bool) -> None:
        """One token each for those whose prompt is through, and the prompt budget that their goals leave.

        Decodes inside a block go first: they need nothing. Who needs a block gets it in rank order, so that what the
        first freed by preempting is not taken by a lower one that happens to decode.
        """
        block_size = draft.cache.block_size
        inside = [one for one in decodes if one.scheduled % block_size]
        needy = [one for one in decodes if not one.scheduled % block_size]
        kept_tokens = 1 if needy or has_prefills else 0  # in case the first in rank is among them
        for sequence in inside:
            if draft.budget <= kept_tokens:
                break
            draft.decode(sequence)
        for sequence in needy:
            if draft.budget <= 0:
                break
            if sequence.id not in draft.victims and self._room.grow(draft, sequence, sequence.scheduled + 1):
                draft.decode(sequence)
        self._keep_goals(draft, [one for one in decodes if one.id in draft.slice_by_seq])

    def _keep_goals(self, draft: Draft, decoding: list[SequenceProgress]) -> None:
        """Limit the prompt tokens of the step so that it ends within the tightest goal of the sequences that decode.

        A step without decodes ends after `yield_ms`. The number of tokens falls as the context of the prompt grows.
        Source: QoServe (ASPLOS '26), dynamic chunking.
        """
        default_s = self._limits.tbt_goal_ms / 1e3
        tightest = 1e3 * min((goal_s for one in decoding if (goal_s := one.tbt_goal_s or default_s)), default=0.0)
        if not decoding and self._limits.yield_ms:
            draft.most_prompt = functools.cache(functools.partial(self._until_yield, draft.cache.block_size))
        elif tightest:
            context = sum(one.scheduled for one in decoding)
            largest = self._policy.costs.largest_prefill

            @functools.cache
            def most_prompt(start: int) -> int:
                return largest(tightest, start, len(decoding), context)

            draft.most_prompt = most_prompt

    def _until_yield(self, block_size: int, start: int) -> int:
        """Return the prompt tokens, behind `start` others, of a step without decodes that ends within `yield_ms`.

        Where so few tokens would waste time the step is longer: per token it costs at most `YIELD_LOSS` more than a
        full one.
        """
        limits, costs = self._limits, self._policy.costs
        least = costs.least_prefill(limits.max_num_batched_tokens, start, YIELD_LOSS)
        return max(costs.largest_prefill(limits.yield_ms, start, 0, 0), -(-least // block_size) * block_size)

    # ---- prompts

    def _fill(self, draft: Draft, prefills: list[SequenceProgress]) -> None:
        """Chunks and admissions in the policy's order, until the budget is spent.

        Who waits for something on its way, or at its tenant's quota, is not first: switching would not help it.
        """
        num_long, num_passed = sum(self._is_long(one) for one in prefills), 0
        first: SeqId | None = None
        capped: list[SequenceProgress] = []
        self._room.tend()
        draft.aged = self._room.starved or self._policy.starving(draft.now_s)
        in_order = self._policy.candidates(draft.now_s, draft.blocked)
        for seq in chain(() if draft.aged is None else (draft.aged,), in_order):
            if draft.budget <= 0 or self._has_seen_enough(draft):
                break
            sequence = self._book[seq]
            is_held = bool(draft.held) and sequence.account in draft.held
            if is_held or seq in draft.looked_at or seq in draft.victims:
                continue
            if self._is_too_long(sequence, num_long):
                num_passed += 1  # and hides nobody behind it, until they are very many
                if num_passed == _MOST_LONG:
                    break
                continue
            draft.looked_at.add(seq)
            allowance = self._allowance(draft, sequence)
            if sequence.state is SequenceState.RUNNING:
                self._continue(draft, sequence, allowance)
            elif sequence.state is SequenceState.RESTORING:
                draft.deferred.append(seq)  # it has its row and its room: nobody need give way, or wait with it
            elif allowance > 0 and not self._is_closed(draft) and self._may_come(draft, sequence):
                num_long += self._admit(draft, sequence, allowance) and self._is_long(sequence)
            if first is None and seq not in draft.deferred[-1:] and sequence.request.tenant not in draft.at_quota:
                first = seq
            if self._has_part(draft, sequence):
                capped.append(sequence)
            if self._is_closed(draft):
                break
        capped += self._continue_others(draft, prefills)
        self._spend_rest(draft, capped)
        is_served = first is None or first in draft.slice_by_seq or first in draft.restores
        self._hunger.step(was_served=is_served)
        if draft.aged not in draft.admitted and draft.aged not in draft.slice_by_seq:
            draft.aged = None

    def _has_seen_enough(self, draft: Draft) -> bool:
        """A step looks at so many only. Those deferred hide nobody behind them until they are very many."""
        num_deferred = len(draft.deferred)
        return len(draft.looked_at) - num_deferred >= _MOST_CANDIDATES or num_deferred >= _MOST_DEFERRED

    def _is_closed(self, draft: Draft) -> bool:
        """Nobody else can be admitted by this step."""
        return draft.is_short or draft.is_full or bool(draft.victims)

    def _continue_others(self, draft: Draft, prefills: list[SequenceProgress]) -> list[SequenceProgress]:
        """The prompts under way that the search for candidates did not reach: who holds blocks must get on.

        Returns those that got a part of what they want.
        """
        left = [one for one in prefills if one.id not in draft.looked_at]
        capped: list[SequenceProgress] = []
        for sequence in sorted(left, key=self._policy.place):
            if draft.budget <= 0:
                break
            if sequence.id in draft.victims:
                continue
            allowance = self._allowance(draft, sequence)
            self._continue(draft, sequence, allowance)
            if self._has_part(draft, sequence):
                capped.append(sequence)
        return capped

    @staticmethod
    def _has_part(draft: Draft, sequence: SequenceProgress) -> bool:
        """The step computes a part of what the sequence wants."""
        piece = draft.slice_by_seq.get(sequence.id)
        return piece is not None and piece.start + piece.length < sequence.num_tokens

    def _allowance(self, draft: Draft, sequence: SequenceProgress) -> int:
        """Tokens one sequence may have of this step: its tenant's share of the prompts' budget, a block at least."""
        share = self._policy.prefill_share(sequence.account)
        budget = draft.prompt_budget(max(sequence.scheduled, sequence.near_tokens))
        return budget if share >= 1 else min(budget, max(draft.cache.block_size, int(share * budget)))

    def _spend_rest(self, draft: Draft, capped: list[SequenceProgress]) -> None:
        """What nobody else wanted goes to the prompts that got a part of what they want, in order."""
        for sequence in capped:
            piece = draft.slice_by_seq.get(sequence.id)
            if draft.budget <= 0 or piece is None:
                continue
            want = sequence.num_tokens - piece.start
            length = self._chunk(draft, piece.start, want, piece.length + draft.budget)
            end = piece.start + length
            if length <= piece.length or self._room.lacks_quota(draft, sequence, end):
                continue
            if draft.cache.reserve(sequence.id, end):
                draft.extend(sequence, length)

    def _continue(self, draft: Draft, sequence: SequenceProgress, budget: int) -> None:
        if not sequence.want or budget <= 0:
            return
        before = draft.cache.num_blocks(sequence.id)
        length = self._chunk(draft, sequence.scheduled, sequence.want, min(budget, draft.budget))
        if self._room.grow(draft, sequence, sequence.scheduled + length):
            draft.add(sequence, sequence.scheduled, length)
            draft.outstanding -= draft.cache.num_blocks(sequence.id) - before

    def _may_come(self, draft: Draft, sequence: SequenceProgress) -> bool:
        """Nobody passes on space those of the same account, of a higher band, or for whom space was freed."""
        account = sequence.account
        if self._room.is_kept_from(draft, sequence):
            return False
        return account not in draft.blocked and account.band <= draft.blocked_band

    def _admit(self, draft: Draft, sequence: SequenceProgress, allowance: int) -> bool:
        """Its first slice, or the way up of its blocks. False: it waits, and whoever may gives way for it."""
        cache = draft.cache
        others = len(self._book.running) + len(draft.admitted)
        if others >= draft.rows:
            draft.is_full = True
            self._block(draft, sequence, -(-sequence.num_tokens // cache.block_size))
            return False
        found = cache.match(sequence.id)
        if found is None:
            draft.deferred.append(sequence.id)  # its prefix is on its way: others need not wait with it
            return False
        missing = -(-sequence.num_tokens // cache.block_size) - found.hit_blocks
        if self._room.may_not_come(draft, sequence, missing):
            cache.release(sequence.id)
            # No room of others would help: nobody need give way, or wait with it.
            draft.blocked.add(sequence.account)
            draft.at_quota.add(sequence.request.tenant)
            return False
        # Room for all it has to say by now, for what the others still need, and one block each to grow.
        needed = missing + draft.outstanding + others
        if others and cache.available_blocks < needed:
            cache.release(sequence.id)
            self._block(draft, sequence, needed)
            return False
        if found.load_blocks:
            # All it needs and one block more, before anything starts: restores that take slots as they come wait for
            # each other for ever.
            end = min(found.tokens + cache.block_size, sequence.limit)
            if not draft.brake.may_restore() or not cache.reserve(sequence.id, end):
                cache.release(sequence.id)
                return False
            draft.brake.restore()
            draft.restores.append(sequence.id)
        else:
            want = sequence.num_tokens - found.tokens
            length = self._chunk(draft, found.tokens, want, max(1, min(allowance, draft.prompt_budget(found.tokens))))
            if not cache.reserve(sequence.id, found.tokens + length):
                cache.release(sequence.id)
                return False
            draft.add(sequence, found.tokens, length)
        draft.outstanding += max(0, missing + found.hit_blocks - cache.num_blocks(sequence.id))
        draft.admitted.append(sequence.id)
        return True

    def _block(self, draft: Draft, sequence: SequenceProgress, needed: int) -> None:
        """It does not fit. Whom the policy lets it gives way for the first such; it comes when the room is there."""
        is_first, draft.has_misfit = not draft.has_misfit, True
        draft.blocked.add(self._policy.queue.account(sequence.id))
        draft.blocked_band = min(draft.blocked_band, sequence.band)
        if is_first and not draft.admitted:
            self._room.take(draft, sequence, needed)

    # ---- limits

    def _is_too_long(self, sequence: SequenceProgress, num_long: int) -> bool:
        """A long prompt that waits while as many are under way as the operator allows."""
        limit = self._limits.max_long_partial_prefills
        is_waiting = sequence.state in (SequenceState.WAITING, SequenceState.PREEMPTED)
        return bool(limit) and num_long >= limit and is_waiting and self._is_long(sequence)

    def _is_long(self, sequence: SequenceProgress) -> bool:
        return sequence.num_tokens - sequence.scheduled >= self._limits.long_prompt_tokens

    def _chunk(self, draft: Draft, start: int, want: int, budget: int) -> int:
        threshold = self._limits.long_prefill_token_threshold or want
        return chunk_length(start, want, min(budget, threshold), draft.cache.block_size)

    # ---- after a failed step

    def _run_suspect(self, draft: Draft) -> None:
        """After a failed step its sequences run one at a time, with nothing else in flight.

        Anybody gives way to the suspect, those of its own tenant where the quota wants it: until it is cleared or
        failed nobody else runs.
        """
        running, cache = self._book.running, draft.cache
        if cache.touched_blocks or any(sequence.in_flight for sequence in running):
            return
        suspect = next((one for one in (*running, *self._book.waiting.values()) if one.is_suspect), None)
        if suspect is None:
            return  # it drains
        is_waiting = suspect not in running
        start = suspect.scheduled
        if is_waiting:
            found = cache.match(suspect.id, may_load=False)
            start = found.tokens if found else 0
        length = self._chunk(draft, start, suspect.num_tokens - start, draft.budget)
        self._room.clear_quota(draft, suspect, start + length)
        for other in reversed([one for one in running if one is not suspect and one.id not in draft.victims]):
            if cache.reserve(suspect.id, start + length):
                break
            draft.preempt(other, "growth", suspect)
        if not cache.reserve(suspect.id, start + length):
            if is_waiting:
                cache.release(suspect.id)  # it comes when the room is there; until then it holds nothing
            return
        if is_waiting:
            draft.admitted.append(suspect.id)
        draft.add(suspect, start, length)
