"""In which order sequences are served. A policy ranks; it never sees blocks or tensors."""

from typing import Protocol

from tiercel.request import Request
from tiercel.settings import PolicyName


class Policy(Protocol):
    """Ranks requests: the lower rank goes first, the higher one is preempted first."""

    def rank(self, request: Request, band: int) -> tuple[float, ...]:
        """A total order; equal only for the same request. `band` is the request's own, or a later one."""
        ...


class FirstComeFirstServed:
    """By arrival; the id breaks ties."""

    def rank(self, request: Request, band: int) -> tuple[float, ...]:
        return (request.arrival_s, request.id)


class StrictPriority:
    """By band, then by arrival."""

    def rank(self, request: Request, band: int) -> tuple[float, ...]:
        return (band, request.arrival_s, request.id)


def open_policy(name: PolicyName) -> Policy:
    """The policy that the operator chose."""
    match name:
        case "fcfs":
            return FirstComeFirstServed()
        case "priority":
            return StrictPriority()
