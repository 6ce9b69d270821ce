"""The results of a call of the sampler: tensors on the device, and log-probabilities on the host."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tiercel.engine.sampling.upload import CopyLink, HostLink
from tiercel.values.ids import SeqId
from tiercel.values.outcome import TokenLogprobs


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

    def to_host_no_sync(self, link: HostLink) -> "Logprobs":
        """Return them on the host, to be read when the lane has passed this point."""
        tensors = (self.sampled, self.ranks, self.top_tokens, self.top_logprobs)
        return Logprobs(self.indices, self.num_top, *map(link.fetch_no_sync, tensors))


@dataclass(frozen=True, slots=True)
class Sampled:
    """The tokens of one call, in the order of its rows.

    Shapes: tokens [N] int64; bad_rows [N] bool: the largest raw logit is not finite (some logit is a NaN or +inf, or
            all are -inf). The token of a bad row is a valid id without meaning; its request has to fail.
            is_empty [N] bool: the parameters of the row exclude every token, with the same consequence; None if no row
            has such parameters.
    """

    tokens: Tensor
    bad_rows: Tensor
    logprobs: Logprobs | None = None
    is_empty: Tensor | None = None

    def to_host_no_sync(self, link: HostLink | None = None) -> "Sampled":
        """Return the results on the host, to be read when the lane has passed this point. `link`: by default copies."""
        link = link or CopyLink(self.tokens.device)
        return self.with_rest_no_sync(link.fetch_no_sync(self.tokens), link.fetch_no_sync(self.bad_rows), link)

    def with_rest_no_sync(self, tokens: Tensor, bad_rows: Tensor, link: HostLink) -> "Sampled":
        """Return these tokens and flags, which are on the host, with everything else fetched to the host, too."""
        logprobs = None if self.logprobs is None else self.logprobs.to_host_no_sync(link)
        is_empty = None if self.is_empty is None else link.fetch_no_sync(self.is_empty)
        return Sampled(tokens, bad_rows, logprobs, is_empty)


def token_logprobs(sampled: Sampled, seqs: Sequence[SeqId]) -> tuple[TokenLogprobs, ...]:
    """Return the log-probabilities of a call, one entry for each row that requested them.

    Ids that have no token, whose logits are -inf, are not listed.

    The copies of `sampled` on the host must be complete; `seqs` are the N sequences of the call, in its order.
    """
    found = sampled.logprobs
    if found is None:
        return ()
    tokens = sampled.tokens.tolist()
    num_listed: list[int] = (found.top_logprobs != -torch.inf).sum(dim=1).tolist()
    columns = zip(
        found.indices,
        map(min, found.num_top, num_listed),
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
