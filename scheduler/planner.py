"""The planner: from the book and a cache overlay to the plan of one step."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain, islice

from scheduler.book import SequenceBook
from scheduler.budget import chunk_length
from scheduler.draft import CacheView, Draft, StepSplitter
from scheduler.fairness import Account
from scheduler.nanobatch import Splitter
from scheduler.preemption import SwapChooser
from scheduler.sequence import Sequence, SequenceState
from scheduler.victim import Holder, Hunger, SwitchBrake, victims
from tiercel.ids import SeqId
from tiercel.plan import Plan, PreemptionReason
from tiercel.rates import Rates

_LEAST_SINCE_RESUME = 16  # tokens before somebody who came back may be sent away again for one who waits
_EARMARK_STEPS = 64  # for so long nobody takes what was freed for somebody else
_MOST_CANDIDATES = 64  # looked at in one step


@dataclass(frozen=True, slots=True)
class StepLimits:
    """What one step may hold."""

    max_num_seqs: int
    max_num_batched_tokens: int  # at least max_num_seqs, so that every decode fits beside a prefill's first token
    long_prefill_token_threshold: int = 0  # tokens of one prompt a step; 0 = no cap
    max_long_partial_prefills: int = 0  # long prompts under way at once; 0 = no cap
    long_prompt_tokens: int = 2048  # from here on a prompt is long
    tbt_goal_ms: float = 0.0  # between two tokens of those that decode, where the tenant has no goal; 0 = none
    block_bytes: int = 0  # for quotas


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
        self._splitter = splitter or Splitter(book.policy.costs)
        self._hunger = Hunger()
        self._earmark: SeqId | None = None
        self._earmark_steps = 0

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
        draft = Draft(cache, self._limits.max_num_batched_tokens, self._chooser, self._splitter)
        draft.order = self.order(now_s) if order is None else order
        draft.yield_ms = self._limits.tbt_goal_ms
        if self._book.num_suspects:
            self._run_suspect(draft)
            return draft.plan()
        prefills = [one for one in self._book.running if one.id in self._policy.queue]
        self._decode(draft, has_prefills=bool(prefills))
        draft.outstanding = sum(
            max(0, -(-one.num_tokens // cache.block_size) - cache.num_blocks(one.id))
            for one in prefills
            if one.id not in draft.victims
        )
        self._keep_room_to_grow(draft)
        self._fill(draft, now_s, prefills)
        return draft.plan()

    # ---- decodes

    def _decode(self, draft: Draft, *, has_prefills: bool) -> None:
        """One token each for those whose prompt is through, and the prompt budget that their goals leave.

        Decodes inside a block go first: they need nothing. Who needs a block gets it in rank order, so that what the
        first freed by preempting is not taken by a lower one that happens to decode.
        """
        block_size, queue = draft.cache.block_size, self._policy.queue
        inside: list[Sequence] = []
        needy: list[Sequence] = []
        for sequence in self._book.running:
            if sequence.want and sequence.id not in queue:
                (inside if sequence.scheduled % block_size else needy).append(sequence)
        kept_tokens = 1 if needy or has_prefills else 0  # in case the first in rank is among them
        for sequence in inside:
            if draft.budget <= kept_tokens:
                break
            draft.add(sequence, sequence.scheduled, 1)
        for sequence in needy:
            if draft.budget <= 0:
                break
            if sequence.id not in draft.victims and self._make_room(draft, sequence, sequence.scheduled + 1):
                draft.add(sequence, sequence.scheduled, 1)
        self._keep_goals(draft)

    def _keep_goals(self, draft: Draft) -> None:
        """Leave so much of the budget that the step ends within the tightest goal of those that decode.

        Source: QoServe (ASPLOS '26), dynamic chunking. A block at least, or prompts would never get through.
        """
        decoding = [self._book[seq] for seq in draft.slice_by_seq]
        default = self._limits.tbt_goal_ms or None
        goals = [1e3 * one.tbt_goal_s if one.tbt_goal_s else default for one in decoding]
        tightest = min((goal for goal in goals if goal is not None), default=None)
        if tightest is not None:
            draft.yield_ms = tightest
            context = sum(one.scheduled for one in decoding)
            allowed = self._policy.costs.largest_prefill(tightest, len(decoding), context)
            draft.budget = min(draft.budget, max(allowed, draft.cache.block_size))

    def _make_room(self, draft: Draft, sequence: Sequence, tokens: int) -> bool:
        """Reserve blocks, preempting those behind it in rank. False: wait for blocks that are coming."""
        cache = draft.cache
        while not cache.reserve(sequence.id, tokens):
            missing = -(-tokens // cache.block_size) - cache.num_blocks(sequence.id)
            victim = self._behind(draft, sequence)
            if cache.available_blocks + cache.coming_blocks >= missing or victim is None:
                draft.is_short = True
                return False
            draft.preempt(victim, "growth")
        return True

    def _behind(self, draft: Draft, beneficiary: Sequence) -> Sequence | None:
        """Of those behind it in rank: the lowest band, the tenant furthest ahead of its share, the newest.

        Ranks never change by themselves, so that two cannot take from each other in turns.
        """
        behind = [one for one in self._book.running if one.rank > beneficiary.rank and one.id not in draft.victims]
        if not behind:
            return None
        return max(behind, key=lambda one: (one.band, self._policy.lead(self._policy.account(one)), one.rank))

    def _keep_room_to_grow(self, draft: Draft) -> None:
        """Preempt before room runs out: a victim's blocks are free only after the steps in flight have committed."""
        cache, block_size = draft.cache, draft.cache.block_size
        if draft.victims or draft.is_short or len(self._book.running) < 2:
            return
        if cache.available_blocks + cache.coming_blocks >= len(draft.slice_by_seq):
            return  # room for everybody, whoever crosses a block boundary next
        growing = sum(  # needs a block within two steps
            -(end := piece.start + piece.length) % block_size < 2 and end + 1 < self._book[piece.seq].limit
            for piece in draft.slice_by_seq.values()
        )
        if cache.available_blocks + cache.coming_blocks < growing:
            victim = self._behind(draft, self._book.running[0])
            if victim is not None:
                draft.preempt(victim, "growth")

    # ---- prompts

    def _fill(self, draft: Draft, now_s: float, prefills: list[Sequence]) -> None:
        """Chunks and admissions in the policy's order, until the budget is spent."""
        num_long = sum(self._is_long(one) for one in prefills)
        brake = SwitchBrake(is_void=self._hunger.is_void)
        draft.aged = self._policy.starving(now_s)
        first: SeqId | None = None
        capped: list[Sequence] = []
        looked_at: set[SeqId] = set()
        self._tend_earmark()
        for seq in chain(() if draft.aged is None else (draft.aged,), self._policy.candidates(now_s)):
            if draft.budget <= 0 or len(looked_at) >= _MOST_CANDIDATES:
                break
            sequence = self._book[seq]
            if seq in looked_at or seq in draft.victims:
                continue
            looked_at.add(seq)
            first = first if first is not None else seq
            allowance = self._allowance(draft, sequence)
            if sequence.state is SequenceState.RUNNING:
                self._continue(draft, sequence, allowance)
            elif not self._is_closed(draft) and self._may_come(draft, sequence, num_long):
                num_long += self._admit(draft, sequence, allowance, brake, now_s) and self._is_long(sequence)
            if seq in draft.slice_by_seq and draft.slice_by_seq[seq].length >= allowance:
                capped.append(sequence)
            if self._is_closed(draft):
                break
        capped += self._continue_others(draft, prefills, looked_at)
        self._spend_rest(draft, capped)
        if first is not None:
            self._collect_debt(draft, self._book[first], brake, now_s)
        self._hunger.step(first, was_served=first in draft.slice_by_seq or first in draft.restores)
        draft.aged = draft.aged if draft.aged in draft.admitted else None

    def _is_closed(self, draft: Draft) -> bool:
        """Nobody else can be admitted by this step."""
        return draft.is_short or draft.is_full or bool(draft.victims)

    def _continue_others(self, draft: Draft, prefills: list[Sequence], looked_at: set[SeqId]) -> list[Sequence]:
        """The prompts under way that the search for candidates did not reach: who holds blocks must get on.

        Returns those that were held to their tenant's share.
        """
        left = [one for one in prefills if one.id not in looked_at]
        capped: list[Sequence] = []
        for sequence in sorted(left, key=self._policy.place):
            if draft.budget <= 0:
                break
            if sequence.id in draft.victims:
                continue
            allowance = self._allowance(draft, sequence)
            self._continue(draft, sequence, allowance)
            if sequence.id in draft.slice_by_seq and draft.slice_by_seq[sequence.id].length >= allowance:
                capped.append(sequence)
        return capped

    def _allowance(self, draft: Draft, sequence: Sequence) -> int:
        """Tokens one sequence may have of this step: its tenant's share of the prompts' budget, a block at least."""
        share = self._policy.prefill_share(self._policy.account(sequence))
        return draft.budget if share >= 1 else max(draft.cache.block_size, int(share * draft.budget))

    def _spend_rest(self, draft: Draft, capped: list[Sequence]) -> None:
        """What nobody else wanted goes to those that were held to their share, in order."""
        for sequence in capped:
            piece = draft.slice_by_seq.get(sequence.id)
            if draft.budget <= 0 or piece is None:
                continue
            want = sequence.num_tokens - piece.start
            length = self._chunk(draft, piece.start, want, piece.length + draft.budget)
            if length > piece.length and draft.cache.reserve(sequence.id, piece.start + length):
                draft.extend(sequence, length)

    def _continue(self, draft: Draft, sequence: Sequence, budget: int) -> None:
        if not sequence.want:
            return
        before = draft.cache.num_blocks(sequence.id)
        length = self._chunk(draft, sequence.scheduled, sequence.want, min(budget, draft.budget))
        if self._make_room(draft, sequence, sequence.scheduled + length):
            draft.add(sequence, sequence.scheduled, length)
            draft.outstanding -= draft.cache.num_blocks(sequence.id) - before

    def _may_come(self, draft: Draft, sequence: Sequence, num_long: int) -> bool:
        """Nobody passes on space those of the same account, of a higher band, or for whom space was freed."""
        account = self._policy.account(sequence)
        if self._earmark is not None and self._earmark != sequence.id and self._earmark not in draft.admitted:
            return False
        if account in draft.blocked or account.band > draft.blocked_band:
            return False
        limit = self._limits.max_long_partial_prefills
        return not (limit and num_long >= limit and self._is_long(sequence))

    def _admit(self, draft: Draft, sequence: Sequence, allowance: int, brake: SwitchBrake, now_s: float) -> bool:
        """Its first slice, or the way up of its blocks. False: it waits, and whoever may gives way for it."""
        cache = draft.cache
        others = len(self._book.running) + len(draft.admitted)
        if others >= self._limits.max_num_seqs:
            draft.is_full = True
            self._block(draft, sequence, -(-sequence.num_tokens // cache.block_size), brake, now_s)
            return False
        found = cache.match(sequence.id)
        if found is None:
            draft.deferred.append(sequence.id)  # its prefix is on its way: others need not wait with it
            return False
        missing = -(-sequence.num_tokens // cache.block_size) - found.hit_blocks
        # Room for all it has to say by now, for what the others still need, and one block each to grow.
        needed = missing + draft.outstanding + others
        if (others and cache.available_blocks < needed) or self._is_over_quota(draft, sequence, missing):
            cache.release(sequence.id)
            self._block(draft, sequence, needed, brake, now_s)
            return False
        if found.load_blocks:
            # All it needs and one block more, before anything starts: restores that take slots as they come wait for
            # each other for ever.
            end = min(found.tokens + cache.block_size, sequence.limit)
            if not brake.may_restore() or not cache.reserve(sequence.id, end):
                cache.release(sequence.id)
                return False
            brake.restore()
            draft.restores.append(sequence.id)
        else:
            want = sequence.num_tokens - found.tokens
            length = self._chunk(draft, found.tokens, want, min(allowance, draft.budget))
            if not cache.reserve(sequence.id, found.tokens + length):
                cache.release(sequence.id)
                return False
            draft.add(sequence, found.tokens, length)
        draft.outstanding += max(0, missing + found.hit_blocks - cache.num_blocks(sequence.id))
        draft.admitted.append(sequence.id)
        return True

    # ---- giving way

    def _block(self, draft: Draft, sequence: Sequence, needed: int, brake: SwitchBrake, now_s: float) -> None:
        """It does not fit. Preempt for it whom the policy lets it; it comes in a later step, when the room is there."""
        is_first = not draft.blocked
        account = self._policy.account(sequence)
        draft.blocked.add(account)
        draft.blocked_band = min(draft.blocked_band, account.band)
        if is_first and not draft.admitted:
            self._take_for(draft, sequence, needed, brake, now_s)

    def _take_for(self, draft: Draft, sequence: Sequence, needed: int, brake: SwitchBrake, now_s: float) -> None:
        first = self._policy.account(sequence)
        would_hold, held = self._holdings(draft, first, needed)

        def may_take(holder: Holder) -> PreemptionReason | None:
            return self._policy.reason(holder, first, now_s, would_hold=would_hold, holds=held)

        cache = draft.cache
        for victim, reason in self._victims(draft, needed, may_take):
            if (draft.victims and cache.available_blocks + cache.coming_blocks >= needed) or not brake.may_preempt():
                break
            brake.preempt(spills=draft.preempt(victim, reason))
            draft.beneficiary = self._earmark = sequence.id
            self._earmark_steps = 0

    def _holdings(self, draft: Draft, first: Account, needed: int) -> tuple[float, dict[Account, float]]:
        """What an account would hold with so many blocks and one row more, and what each holds: parts of a whole.

        Of blocks or of rows, whichever is more: many small sequences fill an engine as a few large ones do.
        """
        cache, policy, rows = draft.cache, self._policy, self._limits.max_num_seqs
        total = cache.available_blocks + cache.coming_blocks
        blocks_by_account: dict[Account, int] = {first: needed}
        rows_by_account: dict[Account, int] = {first: 1}
        for one in self._book.running:
            blocks, account = cache.num_blocks(one.id), policy.account(one)
            total += blocks
            blocks_by_account[account] = blocks_by_account.get(account, 0) + blocks
            rows_by_account[account] = rows_by_account.get(account, 0) + 1
        held = {
            account: max(blocks / max(total, 1), rows_by_account[account] / rows)
            for account, blocks in blocks_by_account.items()
        }
        return held[first], held

    def _collect_debt(self, draft: Draft, first: Sequence, brake: SwitchBrake, now_s: float) -> None:
        """Whoever has had far more than its share gives way to one that is served, but too slowly.

        A prompt under way beside many decodes of others waits for nothing, and would wait for them all the same.
        """
        account = self._policy.account(first)
        # What goes down may push out of DDR what a restore of this step is about to bring up.
        if draft.victims or draft.restores or not self._policy.has_debtors(account.band):
            return

        def may_take(holder: Holder) -> PreemptionReason | None:
            return "debt" if self._policy.owes(holder.account, account, now_s) else None

        for victim, reason in self._victims(draft, 1, may_take):
            if not brake.may_preempt():
                break
            brake.preempt(spills=draft.preempt(victim, reason))
            draft.beneficiary = first.id

    def _victims(
        self, draft: Draft, needed: int, reason_for: Callable[[Holder], PreemptionReason | None]
    ) -> Iterator[tuple[Sequence, PreemptionReason]]:
        """Who may be preempted and why, first to last."""
        reason_by_seq: dict[SeqId, PreemptionReason] = {}

        def may_take(holder: Holder) -> bool:
            reason = reason_for(holder)
            if reason is not None:
                reason_by_seq[holder.seq] = reason
            return reason is not None

        least = 0 if self._hunger.is_void else _LEAST_SINCE_RESUME
        holders = [self._holder(one) for one in self._book.running if one.id not in draft.victims]
        for seq in victims(holders, may_take, self._policy.lead, lambda seq: self._gain(draft, seq, needed), least):
            yield self._book[seq], reason_by_seq[seq]

    def _gain(self, draft: Draft, seq: SeqId, needed: int) -> float:
        """Of the blocks that are wanted, those that it would free, for each second that its way out and back takes."""
        cost = self._chooser.cost(*draft.cache.blocks_below(seq), self._book[seq].computed)
        return min(draft.cache.num_blocks(seq), max(needed, 1)) / (1e-6 + min(cost.swap_s, cost.recompute_s))

    def _holder(self, sequence: Sequence) -> Holder:
        return Holder(
            seq=sequence.id,
            account=self._policy.account(sequence),
            is_batch=self._policy.slo(sequence.request.tenant).kind == "batch",
            admitted=sequence.admitted,
            # Who never gave way may be sent away at any time: only going to and fro is dear.
            since_resume=sequence.computed - sequence.resumed_at if sequence.preemptions else _LEAST_SINCE_RESUME,
            is_aged=sequence.is_aged,
        )

    def _tend_earmark(self) -> None:
        """Freed space is for whom it was freed, until it has come in, has gone, or has not managed for long."""
        self._earmark_steps += 1
        waiting = self._book.waiting
        if self._earmark is not None and (self._earmark not in waiting or self._earmark_steps > _EARMARK_STEPS):
            self._earmark = None

    # ---- limits

    def _is_over_quota(self, draft: Draft, sequence: Sequence, missing: int) -> bool:
        share = self._policy.share(sequence.request.tenant)
        if share is None or share.kv_quota.hbm is None or not self._limits.block_bytes:
            return False
        tenant = sequence.request.tenant
        held = sum(draft.cache.num_blocks(one.id) for one in self._book.running if one.request.tenant == tenant)
        return held > 0 and (held + missing) * self._limits.block_bytes > share.kv_quota.hbm

    def _is_long(self, sequence: Sequence) -> bool:
        return sequence.num_tokens - sequence.scheduled >= self._limits.long_prompt_tokens

    def _chunk(self, draft: Draft, start: int, want: int, budget: int) -> int:
        threshold = self._limits.long_prefill_token_threshold or want
        return chunk_length(start, want, min(budget, threshold), draft.cache.block_size)

    # ---- after a failed step

    def _run_suspect(self, draft: Draft) -> None:
        """After a failed step its sequences run one at a time, with nothing else in flight.

        Anybody gives way to the suspect: until it is cleared or failed nobody else runs.
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
        for other in reversed([one for one in running if one is not suspect]):
            if cache.reserve(suspect.id, start + length):
                break
            draft.preempt(other, "growth")
        if not cache.reserve(suspect.id, start + length):
            return
        if is_waiting:
            draft.admitted.append(suspect.id)
        draft.add(suspect, start, length)
