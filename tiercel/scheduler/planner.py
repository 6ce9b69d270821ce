"""The planner: decides what one step computes, from the book of sequences and an overlay of the cache."""

import functools
from itertools import chain, islice

from tiercel.scheduler.account import Account
from tiercel.scheduler.book import SequenceBook
from tiercel.scheduler.draft import CacheView, Draft, StepSplitter
from tiercel.scheduler.nanobatch import Splitter
from tiercel.scheduler.preemption_limiter import PreemptionLimiter, StarvationCounter
from tiercel.scheduler.preemptor import Preemptor
from tiercel.scheduler.prompt_lookup import PromptLookup
from tiercel.scheduler.prompt_planner import MAX_CANDIDATES, PromptPlanner
from tiercel.scheduler.sequence import SequenceProgress
from tiercel.scheduler.step_goal import beside_decodes
from tiercel.scheduler.step_limits import YIELD_LOSS, StepLimits
from tiercel.scheduler.swap_choice import SwapChooser
from tiercel.values.ids import SeqId
from tiercel.values.outcome import SequenceState
from tiercel.values.plan import Plan
from tiercel.values.rates import Rates


class Planner:
    """Plans steps. Reads the book of sequences and draws on the overlay of the cache; changes neither."""

    def __init__(
        self,
        book: SequenceBook,
        limits: StepLimits,
        chooser: SwapChooser | None = None,
        splitter: StepSplitter | None = None,
        starvation: StarvationCounter | None = None,
        lookup: PromptLookup | None = None,
    ) -> None:
        self._book = book
        self._policy = book.policy
        self._limits = limits
        self._chooser = chooser or SwapChooser("auto", Rates)
        self._splitter = splitter or Splitter()
        self._starvation = starvation or StarvationCounter()
        self._max_forward_tokens: int | None = None
        self.preemptor = Preemptor(book, self._chooser)
        self._prompts = PromptPlanner(book, self.preemptor, self._starvation)
        self._lookup = lookup or PromptLookup()

    @property
    def limits(self) -> StepLimits:
        """The limits on one step."""
        return self._limits

    @property
    def next_suspect(self) -> SequenceProgress | None:
        """The suspect that runs alone now or next; None if there is none."""
        running = (one for one in self._book.running if one.is_suspect)
        return next(chain(running, self._waiting_suspects()), None) if self._book.num_suspects else None

    def set_limits(self, limits: StepLimits) -> None:
        """Set the limits from the next step on. Sequences that run beyond a lower limit go on."""
        self._limits = limits

    def cap_forwards(self, tokens: int | None) -> None:
        """Limit the tokens of a nano-batch from the next step on; None: no limit.

        Steps are limited to the same number of tokens, except that every decoding sequence gets its token.
        """
        self._max_forward_tokens = tokens

    def order(self, now_s: float) -> tuple[SeqId, ...]:
        """Begin a step. Return the first waiting sequences in the order in which they will be admitted.

        The sequences that the previous step deferred are among them, because the cache may have to be asked again for
        what they wait for.
        """
        self._policy.begin(now_s)
        waiting, starving = self._book.waiting, self._policy.starving(now_s)
        suspects = [one.id for one in self._waiting_suspects()]
        first = chain(suspects, () if starving is None else (starving,), self._policy.candidates(now_s))
        return tuple(dict.fromkeys(islice((seq for seq in first if seq in waiting), MAX_CANDIDATES)))

    def plan(self, cache: CacheView, now_s: float = 0.0, order: tuple[SeqId, ...] | None = None) -> Plan:
        """Plan one step: decodes, then chunks of prompts and admissions in the order of the policy.

        The sequence of the highest rank always gets a token, and may preempt others for the blocks that it needs. The
        call never fails for lack of room. `order` is the result of `order` for this step; None: call it now.
        """
        order = self.order(now_s) if order is None else order
        draft = Draft(
            cache,
            self._limits,
            PreemptionLimiter(is_lifted=self._starvation.is_starving),
            self._chooser,
            self._splitter,
            now_s=now_s,
            step_tokens=self._step_tokens(),
            max_forward_tokens=self._max_forward_tokens,
            order=order,
        )
        if self._book.num_suspects:
            self._run_suspect(draft)
            return draft.plan()
        paused_accounts = self._debtors(now_s)
        prefills, decodes = self._running()
        self._decode(draft, _without(decodes, paused_accounts), has_prefills=bool(prefills))
        draft.blocks_owed = sum(
            max(0, -(-one.num_tokens // cache.block_size) - cache.num_blocks(one.id))
            for one in prefills
            if one.id not in draft.preemption_by_seq
        )
        self.preemptor.keep_for_growth(draft)
        self._prompts.fill(draft, _without(prefills, paused_accounts), paused_accounts)
        if paused_accounts and draft.is_empty:  # only the debtors can use the step
            self._decode(draft, decodes, has_prefills=bool(prefills))
            self._prompts.continue_all(draft, prefills)
        self._propose(draft)
        return draft.plan()

    def _propose(self, draft: Draft) -> None:
        """Add proposed tokens to a step of decodes alone, while nothing waits and device memory is not short."""
        if draft.preemption_by_seq or self._book.waiting or self._max_forward_tokens is not None:
            return
        decoding = [self._book[seq] for seq in draft.slice_by_seq]
        if any(one.lookup_tokens for one in decoding) and all(
            piece.length == 1 and piece.samples for piece in draft.slice_by_seq.values()
        ):
            self._lookup.add_to(draft, decoding, self._policy.costs)

    def _step_tokens(self) -> int:
        """Return the maximum number of tokens of one step."""
        limits, max_forward = self._limits, self._max_forward_tokens
        if max_forward is None:
            return limits.max_num_batched_tokens
        return min(limits.max_num_batched_tokens, max(max_forward, limits.max_num_seqs, len(self._book.running)))

    def _running(self) -> tuple[list[SequenceProgress], list[SequenceProgress]]:
        """Return the running sequences with an unfinished prompt and the decoding sequences, each in rank order."""
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
        """Return the accounts that pause because of their debt while the first waiting sequence is served.

        A pause costs nothing: paused sequences keep their blocks unless the first waiting sequence needs the room.
        Accounts do not pause for a sequence whose tenant is at its quota; the first sequence behind it counts. They do
        not pause either while preempting for the first sequence costs too much: it is admitted sooner if the debtors
        go on until they end or their debt is worth the price. This also holds if the last attempt was for another,
        starving sequence, because a step makes only one attempt.
        """
        if not self._policy.fair.has_debtors:
            return frozenset()
        stalled: set[Account] = set()
        for seq in self._policy.candidates(now_s, stalled):
            sequence = self._book[seq]
            if self._policy.waits_behind(sequence, sequence.beneficiary(self._book.waiting), now_s):
                continue
            account = sequence.account
            if self._policy.fair.is_ready(account):
                if self.preemptor.is_too_dear and seq in self._book.waiting:
                    return frozenset()
                return self._policy.rules.debtors(account, now_s)
            stalled.add(account)
        return frozenset()

    # ---- decodes

    def _decode(self, draft: Draft, decodes: list[SequenceProgress], *, has_prefills: bool) -> None:
        """Add one token for each decoding sequence, and limit the prompts of the step by the goals of the decodes.

        Sequences whose last block has space go first, because they need nothing. The others get their block in rank
        order, so that a lower rank does not take the block that a preemption freed for a higher one.
        """
        block_size = draft.cache.block_size
        inside = [one for one in decodes if one.scheduled % block_size]
        needy = [one for one in decodes if not one.scheduled % block_size]
        kept_tokens = 1 if needy or has_prefills else 0  # the highest rank may be among these
        decoding = inside[: max(0, draft.tokens_left - kept_tokens)]
        draft.decode(decoding)
        for sequence in needy:
            if draft.tokens_left <= 0:
                break
            if sequence.id not in draft.preemption_by_seq and self.preemptor.grow(
                draft, sequence, sequence.scheduled + 1
            ):
                draft.decode((sequence,))
                decoding.append(sequence)
        if draft.preemption_by_seq:  # to make room for a block
            decoding = [one for one in decoding if one.id in draft.slice_by_seq]
        self._keep_goals(draft, decoding)

    def _keep_goals(self, draft: Draft, decoding: list[SequenceProgress]) -> None:
        """Limit the prompt tokens of the step by its length.

        It ends within the tightest goal of the sequences that decode, or later if prompts would get less than their
        share of it. A step without decodes ends after `yield_ms`. The number of tokens falls as the context of the
        prompt grows. Source: QoServe (ASPLOS '26), dynamic chunking.
        """
        block_size = draft.cache.block_size
        if decoding:
            # Most steps have no prompts and never ask.
            beside = functools.cache(functools.partial(beside_decodes, decoding, self._limits, self._policy.costs))

            def max_prompt(tokens: int, reads: int, start: int) -> int:
                return beside().max_prompt(block_size, tokens, reads, start)

            draft.limit_prompts(functools.cache(max_prompt))
        elif self._limits.yield_ms:
            draft.limit_prompts(functools.cache(functools.partial(self._until_yield, block_size)))

    def _until_yield(self, block_size: int, tokens: int, reads: int, start: int) -> int:
        """Return the tokens that a prompt may add to a step without decodes that ends within `yield_ms`.

        The step is longer if a step of this length is inefficient: its time per token is at most `YIELD_LOSS` above
        that of a full step.
        """
        limits, costs = self._limits, self._policy.costs
        least = costs.min_prefill(limits.max_num_batched_tokens, start, YIELD_LOSS)
        most = costs.max_added(costs.safe_ms(limits.yield_ms), tokens, reads, start, 0, 0)
        return max(most, -(-least // block_size) * block_size - tokens)

    # ---- after a failed step

    def _waiting_suspects(self) -> list[SequenceProgress]:
        """Return the waiting suspects in the order in which they run: the streams that have begun come first.

        Each of them needs one step, and its client waits for the next token; the others repeat their prompts.
        """
        if not self._book.num_suspects:
            return []
        suspects = [one for one in self._book.waiting.values() if one.is_suspect]
        return sorted(suspects, key=lambda one: not one.num_outputs)

    def _run_suspect(self, draft: Draft) -> None:
        """Run one suspect alone: after a failed step, its sequences run one at a time, with nothing else in flight.

        Any other sequence may be preempted for the suspect, and those of its own tenant if the quota requires it. No
        other sequence runs until the suspect is cleared or fails.
        """
        running, cache = self._book.running, draft.cache
        if cache.touched_blocks or any(sequence.in_flight for sequence in running):
            return
        suspect = self.next_suspect
        if suspect is None or suspect.state is SequenceState.RESTORING:
            return  # it is draining, or its blocks are on their way
        is_waiting = suspect not in running
        start, num_loads = suspect.scheduled, 0
        if is_waiting:
            found = cache.match(suspect.id)
            if found is None:  # its blocks are being verified or read
                draft.deferred.append(suspect.id)
                return
            start, num_loads = found.tokens, found.load_blocks
        want = suspect.num_tokens - start
        length = self._limits.chunk_tokens(start, want, draft.tokens_left, cache.block_size)
        if num_loads:  # all blocks and one more, as for any restore
            length = min(cache.block_size, suspect.limit - start)
        self.preemptor.clear_quota(draft, suspect, start + length)
        preempted = draft.preemption_by_seq
        # A step record and the rows of the device have room for one sequence beyond the limit, not for more.
        max_others = self._limits.max_num_seqs
        for other in reversed([one for one in running if one is not suspect and one.id not in preempted]):
            has_row = not is_waiting or len(running) - len(preempted) <= max_others
            if has_row and cache.reserve(suspect.id, start + length):
                break
            draft.preempt(other, "growth", suspect)
        if not cache.reserve(suspect.id, start + length):
            if is_waiting:
                cache.release(suspect.id)  # a waiting sequence holds no blocks
            return
        if is_waiting:
            draft.admitted.append(suspect.id)
        if num_loads:
            draft.restores.append(suspect.id)
        else:
            draft.add(suspect, start, length)


def _without(sequences: list[SequenceProgress], paused_accounts: frozenset[Account]) -> list[SequenceProgress]:
    """Return the sequences whose accounts do not pause."""
    return [one for one in sequences if one.account not in paused_accounts] if paused_accounts else sequences
