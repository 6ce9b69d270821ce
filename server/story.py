"""What one HTTP request came to, for its one log line."""

from collections.abc import Callable, Sequence

from server.generation import Generation


class RequestStory:
    """Filled while a request is served. Never holds texts or keys."""

    def __init__(self, request_id: str, arrival_s: float) -> None:
        self.request_id = request_id
        self.arrival_s = arrival_s
        self.status: int | None = None  # of the response, once it has started
        self.outcome: str | None = None  # why it ended, when not by a finish reason
        self.is_generation = False
        self.generation: Generation | None = None
        self.tenant: str | None = None
        self.service: str | None = None  # full | shortened | deferred; None = nothing else was allowed
        self.rate_headers: Callable[[], list[tuple[bytes, bytes]]] | None = None

    def headers(self) -> list[tuple[bytes, bytes]]:
        """What the head of the response says beside its own: limits of the tenant, and the service it got."""
        headers = [] if self.rate_headers is None else self.rate_headers()
        if self.service is not None:
            headers.append((b"x-tiercel-service", self.service.encode()))
        return headers

    def summary(self, seconds: float) -> dict[str, object]:
        """The fields of the log line."""
        books = self.generation.facts if self.generation is not None else ()
        reasons = self.generation.finish_reasons if self.generation is not None else ()
        ends = [facts.finished for facts in books if facts.finished is not None]
        gaps = sorted(gap for facts in books for gap in facts.gaps_s)
        firsts = [facts.first_token_s for facts in books if facts.first_token_s is not None]
        return {
            "request_id": self.request_id,
            "tenant": self.tenant,
            "prompt_tokens": sum(facts.start.num_prompt for facts in books if facts.start.n is not None),
            "cached_tokens": sum(end.num_cached for end in ends),
            "output_tokens": sum(facts.num_outputs for facts in books),
            "queue_ms": _ms(max((end.queued_s for end in ends), default=None)),
            "ttft_ms": _ms(min(firsts) - self.arrival_s if firsts else None),
            "itl_p50_ms": _ms(_quantile(gaps, 0.5)),
            "itl_p99_ms": _ms(_quantile(gaps, 0.99)),
            "preemptions": sum(end.preemptions for end in ends),
            "finish_reason": self.outcome or ",".join(reasons) or None,
            "duration_ms": _ms(seconds),
        }


def _quantile(ordered: Sequence[float], share: float) -> float | None:
    return ordered[min(int(len(ordered) * share), len(ordered) - 1)] if ordered else None


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 3)
