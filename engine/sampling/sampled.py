"""The results of a call of the sampler: tensors on the device, and log-probabilities on the host."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tiercel.ids import SeqId
from tiercel.outcome import TokenLogprobs


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Natural log-softmax of the raw logits, for the M of N rows that requested it.

    Shapes: sampled, ranks [M]; top_tokens, top_logprobs [M, K], likeliest first; K is the largest requested number.
    """

    indices: tuple[int, ...]  # into the call's N rows
    num_top: tuple[int, ...]  # how many of the K tokens each row requested
    sampled: Tensor
    ranks: Tensor  # 1 + the number of strictly larger logits
    top_tokens: Tensor
    top_logprobs: Tensor


@dataclass(frozen=True, slots=True)
class Sampled:
    """The tokens of one call, in the order of its rows.

    Shapes: tokens [N] int64; bad_rows [N] bool: the largest raw logit is not finite (some logit is a NaN or +inf, or
            all are -inf). The token of a bad row is a valid id without meaning; its request has to fail.
    """

    tokens: Tensor
    bad_rows: Tensor
    logprobs: Logprobs | None = None

    def to_host_no_sync(self) -> "Sampled":
        """Queue copies to the host, to be read when the lane has passed this point; on the CPU, return `self`."""
        if self.tokens.device.type == "cpu":
            return self
        found = self.logprobs
        if found is not None:
            found = Logprobs(
                found.indices,
                found.num_top,
                to_host_no_sync(found.sampled),
                to_host_no_sync(found.ranks),
                to_host_no_sync(found.top_tokens),
                to_host_no_sync(found.top_logprobs),
            )
        return Sampled(to_host_no_sync(self.tokens), to_host_no_sync(self.bad_rows), found)


def token_logprobs(sampled: Sampled, seqs: Sequence[SeqId]) -> tuple[TokenLogprobs, ...]:
    """Return the log-probabilities of a call, one entry for each row that requested them.

    The copies of `sampled` on the host must be complete; `seqs` are the N sequences of the call, in its order.
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


def to_host_no_sync(values: Tensor) -> Tensor:
    """Queue a copy into pinned memory; a copy into pageable memory would wait for the device."""
    return torch.empty_like(values, device="cpu", pin_memory=True).copy_(values, non_blocking=True)
