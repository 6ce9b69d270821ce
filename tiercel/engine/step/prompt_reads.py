"""The values that a nano-batch reads from the final states of prompts, and the lane's work to read them.

The whole [tokens, vocabulary] logits of a long prompt would not fit into memory, so they are computed for some rows at
a time, and only the log-probabilities that a request asked for are kept.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from msgspec import Struct
from numpy.typing import NDArray
from torch import Tensor

from tiercel.engine.sampling.upload import HostLink
from tiercel.scheduler.sequence import SequenceProgress
from tiercel.values.ids import SeqId
from tiercel.values.outcome import PromptReading
from tiercel.values.plan import Slice

_CHUNK_ELEMENTS_CPU = 1 << 20  # 4 MiB of float32 logits at a time
_LEAST_LOGPROB = -9999.0  # of an id in the prompt that has no token: JSON has no -inf, and vLLM writes this number
_CHUNK_ELEMENTS = 1 << 24  # 64 MiB: limits the memory and needs few launches
_MIN_ROWS = 16  # a product with fewer rows reads the whole head for little


class PromptRead(Struct, frozen=True, gc=False):
    """The states to read of one slice: those of the prompt positions [start, end) of its sequence."""

    seq: SeqId
    start: int
    end: int
    at: int  # the place of position `start` among the tokens of the nano-batch
    targets: NDArray[np.int64] | None  # [end - start] the tokens at start + 1 ...; None: the states are summed up
    num_top: int = 0


def prompt_read(sequence: SequenceProgress, piece: Slice, at: int) -> PromptRead | None:
    """Return what is to be read of a slice whose tokens begin at `at` in its nano-batch; None if nothing is.

    Positions that an earlier step has read are left out. So no position is summed up twice, although a sequence that
    was preempted computes some of them again.
    """
    start, end = max(piece.start, sequence.num_read), min(piece.start + piece.length, sequence.read_end)
    if start >= end:
        return None
    params = sequence.request.params
    targets = None
    if params.pooling is None:
        # A copy of the slice, because the array cannot grow while a view of it exists.
        targets = np.frombuffer(sequence.tokens[start + 1 : end + 1], np.uint32).astype(np.int64)
    place = at + start - piece.start
    return PromptRead(sequence.id, start, end, place, targets, params.prompt_logprobs or 0)


@dataclass(frozen=True, slots=True)
class ReadStates:
    """The values that were read, on the device or on the host.

    Shapes: logprobs, ranks [P] int64 and top_tokens, top_logprobs [P, num_top] of P positions; state_sum [hidden].
            Tensors that do not apply are empty.
    """

    read: PromptRead
    logprobs: Tensor
    ranks: Tensor
    top_tokens: Tensor
    top_logprobs: Tensor
    state_sum: Tensor

    def to_host_no_sync(self, link: HostLink) -> "ReadStates":
        """Return the values on the host, to be read when the lane has passed this point."""
        tensors = (self.logprobs, self.ranks, self.top_tokens, self.top_logprobs, self.state_sum)
        return ReadStates(self.read, *map(link.fetch_no_sync, tensors))

    def part(self) -> PromptReading:
        """Return the values for the report. The copies on the host must be complete.

        Ids that have no token, whose logits are -inf, are not listed; there are as many of them at each position.
        """
        num_top = self.top_tokens.shape[1]
        if num_top:
            num_top = int((self.top_logprobs != -torch.inf).sum(dim=1).min())
        return PromptReading(
            seq=self.read.seq,
            start=self.read.start,
            end=self.read.end,
            num_top=num_top,
            logprobs=self.logprobs.numpy().tobytes(),
            ranks=self.ranks.numpy().astype(np.uint32).tobytes(),
            top_tokens=self.top_tokens[:, :num_top].numpy().astype(np.uint32).tobytes(),
            top_logprobs=self.top_logprobs[:, :num_top].numpy().tobytes(),
            state_sum=self.state_sum.numpy().tobytes(),
        )


def read_states_no_sync(
    hidden: Tensor,
    reads: Sequence[PromptRead],
    logits_of: Callable[[Tensor], Tensor],
    vocab_size: int,
    link: HostLink,
) -> list[ReadStates]:
    """Read final states after the forward of a nano-batch.

    Shapes:  hidden [T, hidden] after the final norm; `logits_of` maps [N, hidden] to [N, vocab_size].
    Cost:    for log-probabilities the head and about four passes over its logits, for each position; the logits of
             `_CHUNK_ELEMENTS` are in memory at a time.
    Effects: queued on the current lane; on the CPU it is computed here.
    """
    return [
        _sum_no_sync(hidden, read)
        if read.targets is None
        else _logprobs_no_sync(hidden, read, link.send_no_sync(read.targets), logits_of, vocab_size)
        for read in reads
    ]


def _sum_no_sync(hidden: Tensor, read: PromptRead) -> ReadStates:
    states = hidden.narrow(0, read.at, read.end - read.start)
    floats, ints = hidden.new_empty(0, dtype=torch.float32), hidden.new_empty(0, dtype=torch.int64)
    return ReadStates(read, floats, ints, ints.view(0, 0), floats.view(0, 0), states.sum(dim=0, dtype=torch.float32))


def _logprobs_no_sync(
    hidden: Tensor,
    read: PromptRead,
    tokens: Tensor,
    logits_of: Callable[[Tensor], Tensor],
    vocab_size: int,
) -> ReadStates:
    """Return natural log-softmax of the raw logits, as the sampler does for drawn tokens. `tokens`: the targets."""
    budget = _CHUNK_ELEMENTS_CPU if hidden.device.type == "cpu" else _CHUNK_ELEMENTS
    count, rows, num_top = read.end - read.start, max(_MIN_ROWS, budget // vocab_size), min(read.num_top, vocab_size)
    logprobs = hidden.new_empty(count, dtype=torch.float32)
    ranks = hidden.new_empty(count, dtype=torch.int64)
    top_tokens = hidden.new_empty((count, num_top), dtype=torch.int64)
    top_logprobs = hidden.new_empty((count, num_top), dtype=torch.float32)
    for first in range(0, count, rows):
        part = slice(first, min(first + rows, count))
        raw = logits_of(hidden.narrow(0, read.at + first, part.stop - first)).float()
        whole = raw.logsumexp(dim=-1, keepdim=True)
        chosen = raw.gather(1, tokens[part, None])
        logprobs[part] = (chosen - whole).squeeze(1).clamp_min(_LEAST_LOGPROB)
        ranks[part] = (raw > chosen).sum(dim=-1) + 1
        if num_top:
            top = raw.topk(num_top, dim=-1)
            top_tokens[part] = top.indices
            top_logprobs[part] = top.values - whole
    return ReadStates(read, logprobs, ranks, top_tokens, top_logprobs, hidden.new_empty(0, dtype=torch.float32))
