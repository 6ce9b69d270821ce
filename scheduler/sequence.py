"""Our progress on one request."""

from array import array

from tiercel.ids import SeqId
from tiercel.outcome import MOST_ABSENCES, Absence, Finished, FinishReason, SequenceState
from tiercel.plan import PreemptionReason
from tiercel.request import Request, unpack_tokens
from tiercel.scheduler.fairness import Account


class SequenceProgress:
    """One sequence. Written by the SequenceBook only.

    One progress number chases the number of tokens: `computed` (KV committed) <= `scheduled` (KV launched) <=
    `num_tokens` (tokens that exist or are being sampled). Prefill, prefix hits, resumption and decode are one rule.
    """

    __slots__ = (
        "absences",
        "account",
        "admitted",
        "away_for",
        "away_since_s",
        "computed",
        "culprit",
        "first_launch_s",
        "first_token_s",
        "id",
        "in_flight",
        "is_aged",
        "is_suspect",
        "limit",
        "lost",
        "near_tokens",
        "num_cached",
        "num_prompt",
        "pending",
        "preemptions",
        "rank",
        "recomputed",
        "redo_until",
        "request",
        "resumed_at",
        "scheduled",
        "state",
        "tbt_goal_s",
        "tokens",
    )

    def __init__(self, request: Request, rank: tuple[float, ...], limit: int) -> None:
        self.id: SeqId = request.id
        self.request = request
        self.rank = rank  # lower goes first
        self.account = Account(request.band, request.tenant)  # who is gated and charged for it
        self.limit = limit  # tokens at which it ends, whatever it says
        self.tokens: array[int] = unpack_tokens(request.prompt + request.outputs)
        self.num_prompt = len(request.prompt) // self.tokens.itemsize
        self.state = SequenceState.WAITING
        self.computed = 0
        self.scheduled = 0
        self.in_flight = 0  # launched, uncommitted slices
        self.pending = 0  # tokens being sampled by them
        self.is_suspect = False  # was in a step that failed: runs alone until a step of its own succeeds
        self.num_cached = 0  # prompt tokens hit at the first admission
        self.preemptions = 0
        self.lost = 0  # tokens computed or in flight when it was last preempted, which may have to be computed again
        self.recomputed = 0  # tokens computed once more after a preemption
        self.redo_until = (
            0  # tokens up to here were computed or in flight before: computing them again is somebody's fault
        )
        self.culprit: Account | None = None  # whose
        self.away_since_s: float | None = None  # no place in a step since, as it was preempted or is restored
        self.away_for: PreemptionReason | None = None  # why; None: its prefix comes up for the first time
        self.absences: tuple[Absence, ...] = ()  # that are over
        self.near_tokens = 0  # cached when it began to wait; 0 once it is launched
        self.admitted = 0  # counts up with every admission of anybody
        self.resumed_at = 0  # tokens computed when it was last admitted
        self.is_aged = False  # admitted on the aging share
        self.tbt_goal_s: float | None = None  # between two of its tokens
        self.first_launch_s: float | None = None
        self.first_token_s: float | None = None

    @property
    def band(self) -> int:
        """Of priority; lower goes first."""
        return self.account.band

    @property
    def num_tokens(self) -> int:
        """Tokens that exist or are being sampled."""
        return len(self.tokens) + self.pending

    @property
    def num_outputs(self) -> int:
        """Tokens said so far."""
        return len(self.tokens) - self.num_prompt

    @property
    def want(self) -> int:
        """Tokens that could be computed next: 0 while it is restored, or when its last token is being sampled."""
        if self.state is SequenceState.RESTORING or self.num_tokens >= self.limit:
            return 0
        return self.num_tokens - self.scheduled

    def end_absence(self, now_s: float) -> None:
        """Record the absence that is over, if there is one: the next slice is launched, or the sequence has ended."""
        if self.away_since_s is not None and len(self.absences) < MOST_ABSENCES:
            self.absences += (Absence(self.away_since_s, now_s, self.away_for),)
        self.away_since_s = None

    def finished(self, reason: FinishReason, now_s: float, *, stop_token: int | None, error: str | None) -> Finished:
        """Return the report of a sequence that ends now."""
        started_s, first_s, arrival_s = self.first_launch_s, self.first_token_s, self.request.arrival_s
        return Finished(
            seq=self.id,
            reason=reason,
            num_prompt=self.num_prompt,
            num_outputs=self.num_outputs,
            num_cached=self.num_cached,
            preemptions=self.preemptions,
            recomputed_tokens=self.recomputed,
            absences=self.absences,
            queued_s=(now_s if started_s is None else started_s) - arrival_s,
            prefill_s=0.0 if started_s is None else (now_s if first_s is None else first_s) - started_s,
            decode_s=0.0 if first_s is None else now_s - first_s,
            stop_token=stop_token,
            error=error,
        )
