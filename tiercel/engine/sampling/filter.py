"""min_p, top_k and top_p as one lower limit per row: tokens with a score below the limit cannot be drawn.

A limit is a score, so the kept set never depends on the order of equal logits: tokens tied with the last kept token
are kept, too, and the likeliest token is always kept. top_p counts the mass of the tokens left by min_p and top_k.
"""

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tiercel.engine.sampling.row import Column, Feature
from tiercel.engine.sampling.subset import Subset
from tiercel.engine.sampling.upload import CopyLink, HostLink

MassSearch = Callable[[Tensor, Tensor], Tensor]
"""See `least_no_sync`."""

_PROBABILITY_BITS = 30  # of a float32 in [0, 1]: sign and the highest exponent bit are zero


def least_no_sync(probabilities: Tensor, wanted_mass: Tensor) -> Tensor:
    """Return for each row the largest limit such that the probabilities above or equal to it have the wanted mass.

    The limit is found bit by bit, because the bits of non-negative floats have the order of the floats.

    Shapes:  probabilities [M, vocab] float32, wanted_mass [M]; returns [M, 1] int32, the bits of a float32.
    Cost:    30 rounds of three kernels over [M, vocab]: on a CPU core at vocab 32,000 about 2.5 times as fast
             as a sort, without storing indices.
    """
    upper = torch.empty_like(probabilities)
    least = torch.zeros_like(wanted_mass, dtype=torch.int32)[:, None]
    for bit in reversed(range(_PROBABILITY_BITS)):
        raised = least | (1 << bit)
        torch.ge(probabilities, raised.view(torch.float32), out=upper)
        mass = upper.mul_(probabilities).sum(dim=-1, keepdim=True)
        least = torch.where(mass >= wanted_mass[:, None], raised, least)
    return least


def limits_no_sync(
    scores: Tensor,
    features: NDArray[np.uint16],
    floats: Tensor,
    top_ks: NDArray[np.int64],
    search: MassSearch = least_no_sync,
    link: HostLink | None = None,
) -> Tensor:
    """Return the smallest score that each row may draw.

    Shapes:  scores [M, vocab] after temperature; features, top_ks [M] on the host; floats [M, len(Column)];
             returns [M, 1], -inf without a filter.
    Cost:    each filter reads only the rows that use it.
    """
    link = link or CopyLink(scores.device)
    limits = scores.new_full((len(features), 1), -torch.inf)
    rows = Subset((features & Feature.MIN_P) != 0, link)
    if rows:
        limits = rows.put(limits, min_p_limits(rows.take(scores), rows.take(floats)[:, Column.LOG_MIN_P]))
    rows = Subset((features & Feature.TOP_K) != 0, link)
    if rows:
        some, floor = rows.take(scores), rows.take(limits)
        largest = some.topk(int(top_ks[rows.host].max()), dim=-1).values
        floor = torch.maximum(floor, top_k_limits(largest, link.send_no_sync(top_ks[rows.host])))
        if np.any(features[rows.host] & Feature.TOP_P):
            floor = top_k_top_p_limits(some, largest, floor, rows.take(floats)[:, Column.TOP_P])
        limits = rows.put(limits, floor)
    rows = Subset((features & (Feature.TOP_P | Feature.TOP_K)) == Feature.TOP_P, link)
    if rows:
        top_p = rows.take(floats)[:, Column.TOP_P]
        limits = rows.put(limits, top_p_limits(rows.take(scores), rows.take(limits), top_p, search))
    return limits


def min_p_limits(scores: Tensor, log_min_p: Tensor) -> Tensor:
    """Return limits that keep tokens at least min_p times as likely as the likeliest token.

    Shapes: scores [M, vocab], log_min_p [M]; returns [M, 1].
    Source: arXiv 2407.01082.
    """
    return scores.amax(dim=-1, keepdim=True) + log_min_p[:, None]


def top_k_limits(largest: Tensor, top_ks: Tensor) -> Tensor:
    """Return the k-th largest score of each row.

    Shapes: largest [M, K] descending, top_ks [M] int64; returns [M, 1].
    """
    return largest.gather(1, top_ks[:, None] - 1)


def top_k_top_p_limits(scores: Tensor, largest: Tensor, floor: Tensor, top_p: Tensor) -> Tensor:
    """Raise the limits of top_k to the smallest set that has mass top_p, using only the K largest scores.

    Tokens tied with the k-th are missing in `largest` but count in the total mass, so the limit is exact.

    Shapes: scores [M, vocab]; largest [M, K] descending; floor [M, 1]; top_p [M], inf = off; returns [M, 1].
    """
    whole = scores.masked_fill(scores < floor, -torch.inf).logsumexp(dim=-1, keepdim=True)
    mass = (largest - whole).exp_()
    before = mass.cumsum(dim=-1, dtype=torch.float64) - mass
    last = largest.masked_fill(before >= top_p[:, None], torch.inf).amin(dim=-1, keepdim=True)
    return torch.maximum(floor, torch.minimum(last, largest[:, :1]))


def top_p_limits(scores: Tensor, floor: Tensor, top_p: Tensor, search: MassSearch = least_no_sync) -> Tensor:
    """Return limits of the smallest set of likeliest tokens that has mass top_p, without sorting.

    Shapes: scores [M, vocab], floor and returns [M, 1], top_p [M].
    Source: nucleus sampling, arXiv 1904.09751.
    """
    probabilities = scores.masked_fill(scores < floor, -torch.inf).softmax(dim=-1)
    least = search(probabilities, top_p).view(torch.float32)
    last = scores.masked_fill(probabilities < least, torch.inf).amin(dim=-1, keepdim=True)
    return torch.maximum(floor, torch.minimum(last, scores.amax(dim=-1, keepdim=True)))
