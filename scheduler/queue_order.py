"""In which order those that wait are served: in bands, or not, and by which key."""

from typing import Protocol

from msgspec import Struct

from tiercel.errors import InvariantError
from tiercel.ids import SeqId, TenantId
from tiercel.scheduler.fairness import Account
from tiercel.settings import PolicyName


class WaitingSequence(Struct, frozen=True, gc=False):
    """What the order of a waiting sequence depends on. A prefill that is not through waits, too."""

    seq: SeqId
    tenant: TenantId
    arrival_s: float
    since_s: float  # when it began to wait: its arrival, or when it was preempted
    band: int = 0  # lower goes first
    ttft_goal_s: float = 0.0
    work_s: float = 0.0  # predicted: tokens that are left to compute, without loads (docs/decisions/0015)


class Order(Protocol):
    """Places a waiting sequence: in which account, and where in it. The lower key goes first, across accounts too."""

    def account(self, waiting: WaitingSequence) -> Account: ...
    def key(self, waiting: WaitingSequence) -> float: ...


class FairOrder:
    """Bands, then the tenants' gate, then the deadline moved by the work.

    `arrival + goal + alpha * work`: the earliest deadline first while alpha is small, the shortest remaining prefill
    first when it is large (QoServe, ASPLOS '26). Cached prefixes are less work, so they go earlier by themselves.
    """

    def __init__(self, alpha: float = 1.0) -> None:
        self.alpha = alpha  # of the sequences placed from now on; larger in overload

    def account(self, waiting: WaitingSequence) -> Account:
        return Account(waiting.band, waiting.tenant)

    def key(self, waiting: WaitingSequence) -> float:
        return waiting.arrival_s + waiting.ttft_goal_s + self.alpha * waiting.work_s


class PriorityOrder:
    """Bands, then arrival."""

    def account(self, waiting: WaitingSequence) -> Account:
        return Account(waiting.band, TenantId(""))

    def key(self, waiting: WaitingSequence) -> float:
        return waiting.arrival_s


class ArrivalOrder:
    """Arrival alone."""

    def account(self, waiting: WaitingSequence) -> Account:
        return Account(0, TenantId(""))

    def key(self, waiting: WaitingSequence) -> float:
        return waiting.arrival_s


def open_order(name: PolicyName | str) -> Order:
    """The order that the operator chose. Errors: InvariantError for a name that settings do not know."""
    match name:
        case "fair":
            return FairOrder()
        case "priority":
            return PriorityOrder()
        case "fcfs":
            return ArrivalOrder()
        case _:
            raise InvariantError("queue.order", name=name)
