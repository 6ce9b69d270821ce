"""Our progress on one request."""

import enum
from array import array

from scheduler.fairness import Account
from tiercel.ids import SeqId
from tiercel.request import Request, unpack_tokens


class SequenceState(enum.Enum):
    """WAITING -> (RESTORING) -> RUNNING -> DONE, with RUNNING -> DRAINING -> PREEMPTED -> RUNNING on the way."""

    WAITING = "waiting"  # never admitted; holds no blocks
    RESTORING = "restoring"  # admitted; its blocks are on their way up, nothing is computed yet
    RUNNING = "running"  # admitted; holds blocks
    DRAINING = "draining"  # preempted; its last launched step has not committed
    PREEMPTED = "preempted"  # waits again, with what it has said so far
    DONE = "done"


class Sequence:
    """One sequence. Written by the SequenceBook only.

    One progress number chases the number of tokens: `computed` (KV committed) <= `scheduled` (KV launched) <=
    `num_tokens` (tokens that exist or are being sampled). Prefill, prefix hits, resumption and decode are one rule.
    """

    __slots__ = (
        "admitted",
        "band",
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
        self.band = request.band  # of priority; lower goes first
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
        self.lost = 0  # tokens that were computed when it was last preempted and may have to be again
        self.redo_until = 0  # tokens up to here were computed before: computing them again is somebody's fault
        self.culprit: Account | None = None  # whose
        self.near_tokens = 0  # that were cached when it began to wait
        self.admitted = 0  # counts up with every admission of anybody
        self.resumed_at = 0  # tokens computed when it was last admitted
        self.is_aged = False  # admitted on the aging share
        self.tbt_goal_s: float | None = None  # between two of its tokens
        self.first_launch_s: float | None = None
        self.first_token_s: float | None = None

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
