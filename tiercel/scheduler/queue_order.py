"""The orders of waiting sequences inside a band.

Bands come before any of these orders. The policy decides on the band in which a sequence is served
(`tiercel.values.tenant.served_band`); the band stands in the sequence's account.
"""

from typing import Protocol

from msgspec import Struct

from tiercel.scheduler.account import Account
from tiercel.values.errors import InvariantError
from tiercel.values.ids import SeqId, TenantId
from tiercel.values.tenant import PolicyName


class WaitingSequence(Struct, frozen=True, gc=False):
    """The properties of a waiting sequence that its place depends on. An unfinished prefill waits, too."""

    seq: SeqId
    tenant: TenantId
    arrival_s: float
    since_s: float  # when it began to wait: its arrival, its preemption, or the launch of its last slice
    band: int = 0  # of its account; a lower number is served first
    ttft_goal_s: float = 0.0
    work_s: float = 0.0  # predicted time to compute its remaining tokens, without loads (docs/decisions/0015)


class Order(Protocol):
    """Assigns a waiting sequence to an account, and a key to it. A lower key goes first, across accounts too."""

    def account(self, waiting: WaitingSequence) -> Account: ...
    def key(self, waiting: WaitingSequence) -> float: ...


class FairOrder:
    """The order of the policy `fair`: bands, then accounts with deficit left before accounts without, then the key.

    The key is the deadline shifted by the work, `arrival + goal + alpha * work`: with a small alpha the earliest
    deadline goes first, with a large one the shortest remaining prefill (QoServe, ASPLOS '26). Cached prefixes are
    less work, so they go earlier.
    """

    def __init__(self, alpha: float = 1.0) -> None:
        self.alpha = alpha  # applies to sequences added or updated from now on; larger in overload

    def account(self, waiting: WaitingSequence) -> Account:
        return Account(waiting.band, waiting.tenant)

    def key(self, waiting: WaitingSequence) -> float:
        return waiting.arrival_s + waiting.ttft_goal_s + self.alpha * waiting.work_s


class ArrivalOrder:
    """The order of the policies `priority` and `fcfs`: arrival, whatever the tenant."""

    def account(self, waiting: WaitingSequence) -> Account:
        return Account(waiting.band, TenantId(""))

    def key(self, waiting: WaitingSequence) -> float:
        return waiting.arrival_s


def open_order(name: PolicyName | str) -> Order:
    """Return the order of a policy. Errors: InvariantError if there is no policy of this name."""
    match name:
        case "fair":
            return FairOrder()
        case "priority" | "fcfs":
            return ArrivalOrder()
        case _:
            raise InvariantError("queue.order", name=name)
