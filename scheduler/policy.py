"""In which order sequences are served. A policy ranks; it never sees blocks or tensors."""

from typing import Protocol

from tiercel.request import Request
from tiercel.settings import PolicyName


class Policy(Protocol):
    """Ranks requests: the lower rank goes first, the higher one is preempted first."""

    def rank(self, request: Request) -> tuple[float, ...]:
        """A total order; equal only for the same request."""
        ...


class FirstComeFirstServed:
    """By arrival; the id breaks ties."""

    def rank(self, request: Request) -> tuple[float, ...]:
        return (request.arrival_s, request.id)


def open_policy(name: PolicyName) -> Policy:
    """The policy that the operator chose."""
    match name:
        case "fcfs":
            return FirstComeFirstServed()
