"""Requests that wait until their grammars are compiled. Imports no torch."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple, Protocol

from tiercel.values.grammar import GRAMMAR_FAILED
from tiercel.values.ids import SeqId, TenantId
from tiercel.values.outcome import GrammarGauges
from tiercel.values.request import Request


class GrammarKey(NamedTuple):
    """A grammar of a tenant. Requests of other tenants and scopes have their own, also of an equal text."""

    tenant: TenantId
    scope: bytes
    text: str

    @staticmethod
    def of(request: Request) -> "GrammarKey":
        """Return the key of a request's grammar."""
        return GrammarKey(request.tenant, request.scope, request.params.grammar)


class CompileEnd(NamedTuple):
    """The end of a compilation."""

    key: GrammarKey
    error: str  # "" if the grammar can be used


class Grammars(Protocol):
    """Compiles grammars beside the loop, and keeps those of unfinished sequences."""

    def want(self, request: Request) -> bool:
        """Keep the grammar of a request. Return False if it is being compiled; `poll` tells when that has ended."""
        ...

    def drop(self, seq: SeqId) -> None:
        """Note that a sequence has ended. Sequences without a grammar are ignored."""
        ...

    def poll(self) -> list[CompileEnd]:
        """Return the compilations that have ended since the last call."""
        ...

    def set_weights(self, weights: Mapping[TenantId, float]) -> None:
        """Share compilations and memory by these weights of tenants; others have the weight 1."""
        ...

    def gauges(self) -> GrammarGauges: ...


class NoGrammars:
    """The grammars of an engine that has none: every compilation fails."""

    def __init__(self, why: str = "this engine applies no grammars") -> None:
        self._why = why
        self._ended: list[CompileEnd] = []

    def want(self, request: Request) -> bool:
        """Fail the compilation at the next poll."""
        self._ended.append(CompileEnd(GrammarKey.of(request), self._why))
        return False

    def drop(self, seq: SeqId) -> None:
        """Do nothing."""

    def poll(self) -> list[CompileEnd]:
        """Return the compilations asked for since the last call."""
        ended, self._ended = self._ended, []
        return ended

    def set_weights(self, weights: Mapping[TenantId, float]) -> None:
        """Do nothing."""

    def gauges(self) -> GrammarGauges:
        """Return zeros."""
        return GrammarGauges()


class GrammarQueue:
    """Holds back requests until their grammars are compiled, so that no step waits for a compilation.

    For the HTTP process such a request is queued like any other.
    """

    def __init__(self, grammars: Grammars) -> None:
        self._grammars = grammars
        self._held: dict[SeqId, Request] = {}

    def __contains__(self, seq: object) -> bool:
        return seq in self._held

    def __len__(self) -> int:
        return len(self._held)

    def hold(self, request: Request) -> bool:
        """Hold a request back if its grammar is not compiled. Return False if it can be taken in now."""
        if not request.params.grammar or self._grammars.want(request):
            return False
        self._held[request.id] = request
        return True

    def release(self, seq: SeqId) -> Request:
        """Return a held request without waiting for its grammar; the caller ends it."""
        return self._held.pop(seq)

    def take(self) -> Iterator[tuple[Request, str | None]]:
        """Release the requests whose grammars are compiled, each with the error of the compilation, if any."""
        for key, error in self._grammars.poll():
            for request in [held for held in self._held.values() if GrammarKey.of(held) == key]:
                yield self._held.pop(request.id), f"{GRAMMAR_FAILED}: {error}" if error else None
