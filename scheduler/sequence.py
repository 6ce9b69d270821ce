"""Our progress on one request."""

import enum
from array import array

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
        "band",
        "computed",
        "first_launch_s",
        "first_token_s",
        "id",
        "in_flight",
        "is_suspect",
        "limit",
        "lost",
        "num_cached",
        "num_prompt",
        "pending",
        "preemptions",
        "rank",
        "request",
        "scheduled",
        "state",
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
