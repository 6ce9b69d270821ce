"""The book of all sequences: the only writer of their progress."""

from bisect import insort
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice, pairwise

from tiercel.scheduler.cost import mean_context
from tiercel.scheduler.policy import Policy
from tiercel.scheduler.preemption_book import PreemptionBook
from tiercel.scheduler.preemption_counts import PreemptionCounts
from tiercel.scheduler.sequence import SequenceProgress
from tiercel.scheduler.speculation import SpeculationCounts, accepted_tokens
from tiercel.values.errors import InvariantError
from tiercel.values.ids import SeqId, TenantId
from tiercel.values.outcome import (
    FairGauges,
    Finished,
    FinishReason,
    FirstToken,
    SequenceGauges,
    SequenceState,
)
from tiercel.values.plan import NanoBatch, Plan, PreemptionReason, Slice, whole_slices
from tiercel.values.request import Request
from tiercel.values.tenant import PolicyName, Tenants, TenantShare

_TENANTS_AT_ONCE = 256  # compared in one piece of a change of tenants
_MOVES_AT_ONCE = 64  # sequences moved in one piece of a change of tenants
_MIN_PROMPT_TOKENS = 64  # of a step whose time corrects the predicted cost of prompts
_AWAY = (SequenceState.PREEMPTED, SequenceState.DRAINING)
_RUNNING = SequenceState.RUNNING  # every step asks every sequence; Python 3.11 looks members up slowly


class Commit:
    """The changes of one committed step."""

    __slots__ = ("finished", "firsts", "progress", "prompt_tokens", "sampled")

    def __init__(self) -> None:
        self.progress: list[tuple[SeqId, int]] = []  # KV tokens now computed, of sequences that hold blocks
        self.sampled: list[tuple[SeqId, int]] = []  # new tokens
        self.firsts: list[FirstToken] = []  # the sequences whose first token was sampled
        self.finished: list[Finished] = []
        self.prompt_tokens = 0  # computed by the step


def _prompt_shape(pieces: Sequence[tuple[SequenceProgress, Slice]]) -> tuple[int, float]:
    """Return the tokens and the context of a step that computes prompts only; (0, 0) for any other step.

    A step that also computes the log-probabilities of a prompt takes longer than its tokens explain: (0, 0), too.
    """
    if any(piece.is_decode or sequence.has_unread for sequence, piece in pieces):
        return 0, 0
    return sum(piece.length for _, piece in pieces), mean_context((piece.length, piece.start) for _, piece in pieces)


def _rank(sequence: SequenceProgress) -> tuple[float, ...]:
    return sequence.rank


class SequenceBook:
    """All sequences by id: the running ones in rank order, the waiting ones in the queue of the policy."""

    def __init__(self, policy: Policy, max_model_len: int, end_tokens: Iterable[int]) -> None:
        self.running: list[SequenceProgress] = []  # rank order
        self.waiting: dict[SeqId, SequenceProgress] = {}  # WAITING and PREEMPTED; the policy knows their order
        self.preemption_counts = PreemptionCounts()
        self.preemption_book = PreemptionBook()
        self.recomputed_tokens = 0  # computed before a preemption and again after it, since start
        self.num_preempted = 0  # PREEMPTED or DRAINING now
        self.num_suspects = 0
        self.speculation = SpeculationCounts()
        self._prompts: deque[tuple[int, float]] = deque()  # tokens and mean context of the launched steps of prompts
        self._by_id: dict[SeqId, SequenceProgress] = {}
        self._seqs_by_tenant: dict[TenantId, dict[SeqId, None]] = {}  # in order of arrival
        self._policy = policy
        self._max_model_len = max_model_len
        self._end_tokens = frozenset(end_tokens)

    @property
    def num_tenants(self) -> int:
        """The number of tenants that are configured or have sequences."""
        return max(len(self._policy.tenants), len(self._seqs_by_tenant))

    @property
    def policy(self) -> Policy:
        """The scheduling policy."""
        return self._policy

    def __len__(self) -> int:
        return len(self._by_id)

    def __contains__(self, seq: object) -> bool:
        return seq in self._by_id

    def __getitem__(self, seq: SeqId) -> SequenceProgress:
        return self._by_id[seq]

    def add(
        self, request: Request, now_s: float = 0.0, cached_tokens: int = 0, max_tokens: int | None = None
    ) -> SequenceProgress:
        """Add a waiting sequence.

        The cache holds `cached_tokens` of it now. It ends at `max_tokens` tokens at the latest.
        """
        if request.id in self._by_id:
            raise InvariantError("book.added_twice", seq=request.id)
        num_prompt = len(request.prompt) // 4
        longest = self._max_model_len if max_tokens is None else min(max_tokens, self._max_model_len)
        # Without outputs, a token is sampled behind the prompt and discarded; its KV is never computed.
        limit = min(num_prompt + request.params.max_tokens, longest) if request.params.max_tokens else num_prompt + 1
        account = self._policy.account(request.tenant, request.band)
        sequence = SequenceProgress(request, account, limit, self._end_tokens)
        sequence.cached_tokens = cached_tokens
        sequence.tbt_goal_s = self._policy.slo(request.tenant).tbt_s
        self._by_id[request.id] = self.waiting[request.id] = sequence
        self._seqs_by_tenant.setdefault(request.tenant, {})[request.id] = None
        self._policy.wait(sequence, request.arrival_s, now_s)
        if request.suspect_until:
            self._mark_suspect(sequence)
        return sequence

    def changing_tenants(self, tenants: Tenants, now_s: float) -> Iterator[None]:
        """Apply new weights, goals and bands to all tenants and their sequences, in pieces of about 1 ms.

        Sequences in the first band of their tenant move to its new first band. Sequences in a lower band stay there
        unless the new first band is below it. Only what differs is visited.
        """
        removed = self._policy.tenants - {share.name for share in tenants.tenants}
        yield
        for number, share in enumerate(tenants.tenants, 1):
            old = self._policy.share(share.name)
            if old != share:
                self._policy.set_share(share.name, share, now_s)
                yield from self._follow(old, share, now_s)
            if number % _TENANTS_AT_ONCE == 0:
                yield
        for number, tenant in enumerate(removed, 1):  # their sequences go on as they are
            self._policy.set_share(tenant, None, now_s)
            if number % _TENANTS_AT_ONCE == 0:
                yield

    def _follow(self, old: TenantShare | None, new: TenantShare, now_s: float) -> Iterator[None]:
        """Apply the new goals and band of a tenant to its sequences, in pieces."""
        if old is not None and (old.band, old.slo) == (new.band, new.slo):
            return
        for number, seq in enumerate(tuple(self._seqs_by_tenant.get(new.name, ())), 1):
            sequence = self._by_id.get(seq)
            if sequence is None:
                continue
            sequence.tbt_goal_s = new.slo.tbt_s
            is_first = sequence.band == (old.band if old is not None else 0)
            self.move(sequence.id, new.band if is_first else max(new.band, sequence.band), now_s)
            if number % _MOVES_AT_ONCE == 0:
                yield

    def switch_policy(self, name: PolicyName, now_s: float, *, step_ms: float, patience_s: float) -> None:
        """Change the policy from the next step on. Running sequences go on, and waiting times are kept."""
        policy = self._policy
        waiting = [(one, policy.queue[one.id].since_s) for one in self._by_id.values() if one.id in policy.queue]
        policy.rename(name)
        for sequence in self._by_id.values():
            sequence.enter(policy.account(sequence.request.tenant, sequence.band))
            sequence.preempted_for = None  # an account of the policy before
        self.running.sort(key=_rank)
        policy.switch(waiting, self.running, now_s, step_ms=step_ms, patience_s=patience_s)

    def gauges(self, max_count: int) -> tuple[SequenceGauges, ...]:
        """Return the gauges of the running sequences in rank order, then of the preempted ones."""
        sequences = self.running[:max_count]
        if self.num_preempted and len(sequences) < max_count:
            away = (one for one in self._by_id.values() if one.state in _AWAY)
            sequences += islice(away, max_count - len(sequences))
        return tuple(SequenceGauges(one.id, one.state, one.computed, one.preemptions) for one in sequences)

    def move(self, seq: SeqId, band: int, now_s: float = 0.0) -> None:
        """Move a sequence to another priority band, in whatever state it is, and apply its tenant's current goals."""
        sequence = self._by_id[seq]
        sequence.band = band
        account = self._policy.account(sequence.request.tenant, band)
        if sequence.account != account:
            holds = sequence in self.running
            if holds:
                self.running.remove(sequence)
                self._policy.release(sequence, now_s)
            sequence.enter(account)
            if holds:
                insort(self.running, sequence, key=_rank)
                self._policy.admit(sequence, now_s)
        if seq in self._policy.queue:
            self._policy.wait(sequence, self._policy.queue[seq].since_s, now_s)

    def launch(self, plan: Plan, now_s: float) -> None:
        """Record that a plan was sealed and launched."""
        self._preempt_and_admit(plan, now_s)
        pieces: list[tuple[SequenceProgress, Slice]] = []
        queued = self._policy.queue.seqs
        for piece in whole_slices(plan.nano_batches):
            sequence = self._by_id[piece.seq]
            pieces.append((sequence, piece))
            if sequence.first_launch_s is None:
                sequence.first_launch_s = now_s
                sequence.num_found = piece.start
            if sequence.in_flight == 0 and piece.start > sequence.computed:
                sequence.computed = sequence.resumed_at = piece.start  # a prefix hit
            if sequence.lost_tokens:
                repeated = max(0, sequence.lost_tokens - piece.start)
                self.recomputed_tokens += repeated
                sequence.recomputed_tokens += repeated
                sequence.lost_tokens = 0
            if sequence.away_since_s is not None:
                sequence.end_absence(now_s)
            sequence.scheduled = piece.start + piece.length
            sequence.cached_tokens = 0
            sequence.in_flight += 1
            sequence.pending += piece.num_sampled
            if piece.samples and piece.seq in queued:
                self._policy.leave(sequence, now_s)
        if pieces:
            self._policy.launch(pieces, now_s)
            self.preemption_book.launch(pieces, self._policy.costs)
            self._prompts.append(_prompt_shape(pieces))

    def _preempt_and_admit(self, plan: Plan, now_s: float) -> None:
        for preemption in plan.preemptions:
            sequence = self._by_id[preemption.victim]
            if sequence.scheduled:  # otherwise it loses nothing, and an earlier preemption is still followed
                self.preemption_book.preempt(
                    sequence.id, preemption.cost, sequence.scheduled, is_swap=preemption.is_swap
                )
            self._policy.preempt(sequence, preemption.reason, preemption.price_ms)
            self.preemption_counts.add(sequence.request.tenant, preemption.reason, is_swap=preemption.is_swap)
            beneficiary = self._by_id[preemption.beneficiary]
            sequence.preempted_for = beneficiary.account
            sequence.gave_way_to = (beneficiary.id, beneficiary.admission) if beneficiary.id in self.waiting else None
            sequence.cached_tokens = preemption.kept_tokens
            self._preempt(sequence, now_s, preemption.reason)
        restores = set(plan.restores)
        for seq in plan.admitted:
            sequence = self.waiting.pop(seq)
            self.num_preempted -= sequence.state is SequenceState.PREEMPTED
            insort(self.running, sequence, key=_rank)
            sequence.state = SequenceState.RESTORING if seq in restores else SequenceState.RUNNING
            if seq in restores and sequence.away_since_s is None:
                sequence.away_since_s = now_s
            sequence.is_aged = seq == plan.aged
            sequence.resumed_at = 0
            self._policy.admit(sequence, now_s)
        if plan.aged is not None:
            self._by_id[plan.aged].is_aged = True

    def defer(self, plan: Plan, now_s: float) -> None:
        """Tell the policy what the plan could not dispatch, so that other sequences do not wait for it."""
        self._policy.defer(plan.deferred, plan.at_quota, now_s)

    def restored(self, seq: SeqId, tokens: int) -> None:
        """Record that the restore of a sequence has ended: it runs from `tokens` on, the tokens whose blocks landed."""
        sequence = self._by_id[seq]
        if sequence.state is not SequenceState.RESTORING:
            raise InvariantError("book.restored", seq=seq, state=sequence.state.value)
        sequence.state = SequenceState.RUNNING
        sequence.computed = sequence.scheduled = sequence.resumed_at = tokens

    def commit(self, batches: Sequence[NanoBatch], tokens: Sequence[int], now_s: float) -> Commit:
        """Record that a launched step succeeded. `tokens`: see `StepOutcome`.

        Slices of sequences that have ended since the launch are ghosts: their results are discarded.
        """
        commit = Commit()
        sampled = iter(tokens)
        for piece in whole_slices(batches):
            drawn = tuple(islice(sampled, piece.num_sampled))
            sequence = self._by_id.get(piece.seq)
            if sequence is not None:
                self._advance(sequence, piece, drawn, now_s, commit)
        return commit

    def note_read(self, seq: SeqId, end: int) -> None:
        """Record that the states of the prompt positions before `end` have been read."""
        self._by_id[seq].num_read = end

    def finish(
        self, seq: SeqId, reason: FinishReason, now_s: float, *, stop_token: int | None = None, error: str | None = None
    ) -> Finished:
        """End a sequence, in whatever state it is."""
        sequence = self._by_id.pop(seq)
        self.preemption_book.drop(seq)
        tenant = sequence.request.tenant
        del self._seqs_by_tenant[tenant][seq]
        if not self._seqs_by_tenant[tenant]:
            del self._seqs_by_tenant[tenant]
        match sequence.state:
            case SequenceState.WAITING | SequenceState.PREEMPTED:
                del self.waiting[seq]
            case SequenceState.RUNNING | SequenceState.RESTORING:
                self.running.remove(sequence)
                self._policy.release(sequence, now_s)
            case SequenceState.DRAINING | SequenceState.DONE:
                pass
        self._policy.end(sequence, now_s)
        self._clear_suspect(sequence)
        self.num_preempted -= sequence.state in (SequenceState.PREEMPTED, SequenceState.DRAINING)
        sequence.state = SequenceState.DONE
        sequence.end_absence(now_s)
        return sequence.finished(reason, now_s, stop_token=stop_token, error=error)

    def fair_gauges(self, now_s: float) -> FairGauges:
        """Return the gauges of fairness. Cost: O(tenants)."""
        *_, gauges = self.survey(now_s)
        return gauges or FairGauges()

    def survey(self, now_s: float) -> Iterator[FairGauges | None]:
        """Collect the gauges of fairness in pieces of about 1 ms: yield None until the last piece yields them."""
        return self._policy.survey(self.preemption_counts, now_s)

    def settle(self, measured_s: float, now_s: float) -> None:
        """Record the measured time of the oldest launched step; 0 if the step was void."""
        self._policy.settle(1e3 * measured_s, now_s)
        self.preemption_book.settle(measured_s)
        tokens, context = self._prompts.popleft()
        if tokens >= _MIN_PROMPT_TOKENS:
            self._policy.costs.correct_prompts(tokens, context, 1e3 * measured_s)

    def void(self, batches: Sequence[NanoBatch], now_s: float, *, is_suspect: bool) -> list[SeqId]:
        """Discard a launched step that failed or was launched behind a failed one.

        Returns its sequences that have not ended. `is_suspect`: they run alone from now on.
        """
        known: list[SeqId] = []
        for piece in whole_slices(batches):
            sequence = self._by_id.get(piece.seq)
            if sequence is None:
                continue
            known.append(piece.seq)
            sequence.in_flight -= 1
            sequence.pending -= piece.num_sampled
            sequence.scheduled = sequence.computed
            if is_suspect:
                self._mark_suspect(sequence)
            if sequence.state is SequenceState.DRAINING and sequence.in_flight == 0:
                self._wait_again(sequence, now_s)
            elif sequence.state is SequenceState.RUNNING and sequence.want > 1:
                self._policy.wait(sequence, now_s, now_s)
        return known

    def check_integrity(self) -> None:
        """Check lists, states and progress numbers. Errors: InvariantError."""
        for sequence in self._by_id.values():
            is_right = (
                0 <= sequence.computed <= sequence.scheduled <= sequence.num_tokens
                and (sequence.state in (SequenceState.RUNNING, SequenceState.RESTORING)) == (sequence in self.running)
                and (sequence.state in (SequenceState.WAITING, SequenceState.PREEMPTED))
                == (sequence.id in self.waiting)
                and (sequence.state is not SequenceState.DRAINING or sequence.in_flight > 0)
                and len(sequence.tokens) <= sequence.limit
                and (sequence.pending > 0) <= (sequence.in_flight > 0)
            )
            if not is_right:
                raise InvariantError("book.sequence", seq=sequence.id, state=sequence.state.value)
        if self.num_suspects != sum(sequence.is_suspect for sequence in self._by_id.values()):
            raise InvariantError("book.suspects", counted=self.num_suspects)
        if self.num_preempted != sum(sequence.state in _AWAY for sequence in self._by_id.values()):
            raise InvariantError("book.preempted", counted=self.num_preempted)
        if any(first.rank > second.rank for first, second in pairwise(self.running)):
            raise InvariantError("book.order")
        unplaced = [seq for seq in self.waiting if seq not in self._policy.queue]
        # A running sequence that wants more than the one token of a decode waits for the rest of its prompt.
        unplaced += [one.id for one in self.running if one.want > 1 and one.id not in self._policy.queue]
        if unplaced:
            raise InvariantError("book.queue", seqs=unplaced[:8])
        self._policy.check_integrity()

    def _advance(
        self, sequence: SequenceProgress, piece: Slice, drawn: tuple[int, ...], now_s: float, commit: Commit
    ) -> None:
        sequence.in_flight -= 1
        end = piece.start + piece.length
        if piece.proposed:
            drawn = accepted_tokens(piece.proposed, drawn, sequence.stop_tokens)
            self.speculation.add(len(piece.proposed), len(drawn) - 1)
            # The KV behind the last of these is void; nothing was launched behind them.
            end = sequence.scheduled = piece.start + len(drawn)
        if sequence.is_suspect and end >= sequence.request.suspect_until:
            self._clear_suspect(sequence)
        if sequence.state is _RUNNING:
            sequence.computed = end
            commit.progress.append((sequence.id, end))
        elif sequence.in_flight == 0:
            self._wait_again(sequence, now_s)
        if piece.start < sequence.num_prompt:
            commit.prompt_tokens += min(piece.length, sequence.num_prompt - piece.start)
        sequence.pending -= piece.num_sampled
        if drawn and not sequence.request.params.max_tokens:
            commit.finished.append(self.finish(sequence.id, FinishReason.LENGTH, now_s))
            return
        for token in drawn:
            sequence.tokens.append(token)
            if sequence.first_token_s is None:
                sequence.first_token_s = now_s
                started_s = now_s if sequence.first_launch_s is None else sequence.first_launch_s
                commit.firsts.append(FirstToken(sequence.id, started_s, sequence.num_found))
            commit.sampled.append((sequence.id, token))
            if token in sequence.stop_tokens:
                finished = self.finish(sequence.id, FinishReason.STOP, now_s, stop_token=token)
                commit.finished.append(finished)
                break
            if len(sequence.tokens) >= sequence.limit:
                commit.finished.append(self.finish(sequence.id, FinishReason.LENGTH, now_s))
                break

    def _preempt(self, sequence: SequenceProgress, now_s: float, reason: PreemptionReason) -> None:
        self.running.remove(sequence)
        self._policy.release(sequence, now_s)
        sequence.preemptions += 1
        sequence.away_since_s = now_s if sequence.away_since_s is None else sequence.away_since_s
        sequence.away_for = reason
        sequence.lost_tokens = max(sequence.lost_tokens, sequence.scheduled)  # work in flight is discarded, too
        sequence.repeated_until = max(sequence.repeated_until, sequence.scheduled)
        sequence.is_aged = False
        self.num_preempted += 1
        if sequence.in_flight:
            sequence.state = SequenceState.DRAINING
            self._policy.leave(sequence, now_s)
        else:
            self._wait_again(sequence, now_s)

    def _wait_again(self, sequence: SequenceProgress, now_s: float) -> None:
        sequence.state = SequenceState.PREEMPTED
        sequence.computed = sequence.scheduled = 0
        self.waiting[sequence.id] = sequence
        self._policy.wait(sequence, now_s, now_s)

    def _mark_suspect(self, sequence: SequenceProgress) -> None:
        self.num_suspects += not sequence.is_suspect
        sequence.is_suspect = True

    def _clear_suspect(self, sequence: SequenceProgress) -> None:
        self.num_suspects -= sequence.is_suspect
        sequence.is_suspect = False
