"""What one call of the sampler brings: tensors on the device, facts once they are on the host."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tiercel.ids import SeqId
from tiercel.outcome import TokenLogprobs


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Natural log-softmax of the raw logits for the M of N rows that asked.

    Shapes: sampled, ranks [M]; top_tokens, top_logprobs [M, K], likeliest first, K the most that a row asked.
    """

    indices: tuple[int, ...]  # into the call's N rows
    num_top: tuple[int, ...]  # how many of the K each row asked
    sampled: Tensor
    ranks: Tensor  # 1 + the number of strictly larger logits
    top_tokens: Tensor
    top_logprobs: Tensor


@dataclass(frozen=True, slots=True)
class Sampled:
    """The tokens of one call, in the order of its rows.

    Shapes: tokens [N] int64; bad_rows [N] bool: the largest raw logit is not finite (a NaN or +inf somewhere, or
            -inf everywhere). The token of a bad row is a valid id and means nothing: fail its request.
    """

    tokens: Tensor
    bad_rows: Tensor
    logprobs: Logprobs | None = None

    def to_host_no_sync(self) -> "Sampled":
        """Copies on the host, to be read once the lane has passed this point; on the CPU itself."""
        if self.tokens.device.type == "cpu":
            return self
        found = self.logprobs
        if found is not None:
            found = Logprobs(
                found.indices,
                found.num_top,
                _to_host_no_sync(found.sampled),
                _to_host_no_sync(found.ranks),
                _to_host_no_sync(found.top_tokens),
                _to_host_no_sync(found.top_logprobs),
            )
        return Sampled(_to_host_no_sync(self.tokens), _to_host_no_sync(self.bad_rows), found)


def token_logprobs(sampled: Sampled, seqs: Sequence[SeqId]) -> tuple[TokenLogprobs, ...]:
    """The facts in a call's log-probabilities, one for each row that asked.

    `sampled` lies on the host and has landed; `seqs` are the N sequences of the call, in its order.
    """
    found = sampled.logprobs
    if found is None:
        return ()
    tokens = sampled.tokens.tolist()
    columns = zip(
        found.indices,
        found.num_top,
        found.sampled.tolist(),
        found.ranks.tolist(),
        found.top_tokens.tolist(),
        found.top_logprobs.tolist(),
        strict=True,
    )
    return tuple(
        TokenLogprobs(seqs[index], tokens[index], logprob, rank, tuple(top[:count]), tuple(logprobs[:count]))
        for index, count, logprob, rank, top, logprobs in columns
    )


def _to_host_no_sync(values: Tensor) -> Tensor:
    """A queued copy into pinned memory: into pageable memory it would wait for the device."""
    return torch.empty_like(values, device="cpu", pin_memory=True).copy_(values, non_blocking=True)
