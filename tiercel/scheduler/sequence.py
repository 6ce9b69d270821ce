"""The engine's progress on one request."""

from array import array
from collections.abc import Mapping

from tiercel.scheduler.account import Account
from tiercel.scheduler.speculation import may_speculate
from tiercel.values.ids import SeqId
from tiercel.values.outcome import MAX_ABSENCES, Absence, Finished, FinishReason, SequenceState
from tiercel.values.plan import PreemptionReason
from tiercel.values.request import Request, SamplingParams, unpack_tokens

_RESTORING = SequenceState.RESTORING  # every step asks every sequence; Python 3.11 looks members up slowly


class SequenceProgress:
    """The engine's progress on one request. Written by the SequenceBook only.

    One number follows the number of tokens: `computed` (KV committed) <= `scheduled` (KV launched) <= `num_tokens`
    (tokens that exist or are being sampled). Prefill, prefix hits, resumption and decode all follow this rule.
    """

    __slots__ = (
        "absences", "account", "admission", "away_for", "away_since_s", "band", "cached_tokens", "computed",
        "first_launch_s", "first_token_s", "gave_way_to", "id", "in_flight", "is_aged", "is_suspect", "limit",
        "lookup_tokens", "lost_tokens", "num_found", "num_prompt", "num_read", "pending", "preempted_for",
        "preemptions", "rank", "read_end", "recomputed_tokens", "repeated_until", "request", "resumed_at", "scheduled",
        "state", "stop_tokens", "tbt_goal_s", "tokens",
    )  # fmt: skip

    def __init__(
        self, request: Request, account: Account, limit: int, end_tokens: frozenset[int] = frozenset()
    ) -> None:
        """`end_tokens`: of the model; they end the sequence unless the request ignores them."""
        self.id: SeqId = request.id
        self.request = request
        self.band = request.band  # that was asked for; the policy serves it in the band of its account
        self.enter(account)
        self.limit = limit  # number of tokens at which the sequence ends at the latest
        stop_tokens = frozenset(request.params.stop_token_ids)
        self.stop_tokens = stop_tokens if request.params.ignore_eos else stop_tokens | end_tokens
        self.tokens: array[int] = unpack_tokens(request.prompt + request.outputs)
        self.num_prompt = len(request.prompt) // self.tokens.itemsize
        self.lookup_tokens = request.params.prompt_lookup_num_tokens if may_speculate(request.params) else 0
        self.state = SequenceState.WAITING
        self.computed = 0
        self.scheduled = 0
        self.in_flight = 0  # launched, uncommitted slices
        self.pending = 0  # tokens that these slices sample
        self.is_suspect = False  # was in a step that failed; runs alone until a step of its own succeeds
        self.num_found = 0  # tokens hit at the first admission
        self.read_end = _read_end(request.params, self.num_prompt)  # prompt positions whose states are read
        self.num_read = max(request.num_read, self.read_end - 1 if request.params.pooling == "last" else 0)
        self.preemptions = 0
        self.lost_tokens = 0  # computed or in flight at the last preemption; 0 once it is launched again
        self.recomputed_tokens = 0  # computed again after a preemption
        self.repeated_until = 0  # tokens below this were computed or in flight before a preemption
        self.preempted_for: Account | None = None  # the beneficiary of the last preemption
        self.gave_way_to: tuple[SeqId, int] | None = None  # the waiting beneficiary, and its `admission` at that time
        self.away_since_s: float | None = None  # when it left the steps, preempted or restoring; None: it is in steps
        self.away_for: PreemptionReason | None = None  # of the last preemption; None: it was never preempted
        self.absences: tuple[Absence, ...] = ()  # that have ended
        self.cached_tokens = 0  # expected prefix hit when it began to wait; 0 once it is launched
        self.admission = 0  # number of its last admission, counted over all sequences
        self.resumed_at = 0  # tokens computed at the last admission
        self.is_aged = False  # admitted on the aging share
        self.tbt_goal_s: float | None = None  # goal between two tokens
        self.first_launch_s: float | None = None
        self.first_token_s: float | None = None

    def enter(self, account: Account) -> None:
        """Move the sequence to an account, which is gated and charged for it, and to its rank.

        The rank is a total order that decides which sequences may preempt others to grow: a lower rank goes first. It
        changes only with the account.
        """
        self.account = account
        self.rank: tuple[float, ...] = (account.band, self.request.arrival_s, self.request.id)

    @property
    def num_tokens(self) -> int:
        """The tokens that exist or are being sampled."""
        return len(self.tokens) + self.pending

    @property
    def has_unread(self) -> bool:
        """Whether final states of prompt positions from `num_read` on are still to be read; earlier ones are known.

        Such a sequence uses cached blocks of the first `num_read` tokens only: a cached block has no states.
        """
        return self.num_read < self.read_end

    @property
    def num_outputs(self) -> int:
        """The output tokens so far."""
        return len(self.tokens) - self.num_prompt

    @property
    def want(self) -> int:
        """The tokens that could be computed next: 0 during a restore, or if the last token is being sampled."""
        num_tokens = len(self.tokens) + self.pending
        return 0 if num_tokens >= self.limit or self.state is _RESTORING else num_tokens - self.scheduled

    def beneficiary(self, waiting: Mapping[SeqId, "SequenceProgress"]) -> "SequenceProgress | None":
        """Return the waiting sequence that this one was preempted for; None once that one was admitted or has ended."""
        if self.gave_way_to is None:
            return None
        seq, admission = self.gave_way_to
        first = waiting.get(seq)
        return first if first is not None and first.admission == admission else None

    def end_absence(self, now_s: float) -> None:
        """Record the end of the absence, if there is one: the next slice is launched, or the sequence has ended."""
        if self.away_since_s is not None and len(self.absences) < MAX_ABSENCES:
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
            num_cached=min(self.num_found, self.num_prompt),
            preemptions=self.preemptions,
            recomputed_tokens=self.recomputed_tokens,
            absences=self.absences,
            queued_s=(now_s if started_s is None else started_s) - arrival_s,
            prefill_s=0.0 if started_s is None else (now_s if first_s is None else first_s) - started_s,
            decode_s=0.0 if first_s is None else now_s - first_s,
            stop_token=stop_token,
            error=error,
        )


def _read_end(params: SamplingParams, num_prompt: int) -> int:
    """Return the end of the prompt positions whose states are read; 0 if none are."""
    if params.pooling is not None:
        return num_prompt
    return 0 if params.prompt_logprobs is None else num_prompt - 1  # the state of the last one predicts an output
