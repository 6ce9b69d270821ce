"""The order in which running sequences are preempted."""

from collections.abc import Callable, Iterable, Iterator
from itertools import groupby

from msgspec import Struct

from tiercel.scheduler.account import Account
from tiercel.values.ids import SeqId


class VictimCandidate(Struct, frozen=True, gc=False):
    """A running sequence that may be preempted."""

    seq: SeqId
    account: Account
    is_batch: bool  # the tenant's class is `batch`
    admission: int  # number of its last admission; a later admission has a larger number
    since_resume: int  # tokens computed since that admission


def victims(
    candidates: Iterable[VictimCandidate],
    lead: Callable[[Account], float],
    gain: Callable[[SeqId], float],
    min_tokens: int = 16,
) -> Iterator[SeqId]:
    """Yield the candidates in the order in which they are preempted.

    The order is: the lowest band, batch before interactive, the tenant with the largest lead over its share, the
    largest gain (blocks freed per second of cost), the newest. `gain` is called only for candidates that are equal in
    everything before it. Candidates with fewer than `min_tokens` since they resumed are left out.
    """

    def place(candidate: VictimCandidate) -> tuple[int, bool, float]:
        return (-candidate.account.band, not candidate.is_batch, -lead(candidate.account))

    able = [one for one in candidates if one.since_resume >= min_tokens]
    placed = sorted(((place(one), one) for one in able), key=lambda pair: pair[0])
    for _, group in groupby(placed, key=lambda pair: pair[0]):
        equals = [one for _, one in group]
        if len(equals) > 1:
            equals.sort(key=lambda one: (-gain(one.seq), -one.admission))
        yield from (one.seq for one in equals)
