"""The workload of a simulation: times, tenants and lengths of requests, and the prefixes that they share."""

import random
from array import array
from collections.abc import Sequence
from itertools import accumulate

from msgspec import Struct
from msgspec.structs import replace

from tiercel.values.ids import TenantId
from tiercel.values.tenant import TenantShare


class PromptPart(Struct, frozen=True, gc=False):
    """A part of a prompt. Equal sources have equal tokens; different sources share no block."""

    source: int
    tokens: int


class SimRequest(Struct, frozen=True, gc=False):
    """One request."""

    at_s: float
    tenant: TenantId
    prompt: tuple[PromptPart, ...]
    outputs: int  # output tokens

    @property
    def num_prompt(self) -> int:
        """Tokens of the prompt."""
        return sum(part.tokens for part in self.prompt)


class Workload(Struct, frozen=True):
    """The tenants and requests of a run, the requests in order of time."""

    tenants: tuple[TenantShare, ...]
    requests: tuple[SimRequest, ...]


class Lengths(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Lengths of prompts and answers, in tokens."""

    input_len: int = 512  # mean, without the shared prefix
    output_len: int = 128
    sigma: float = 0.0  # of a log-normal distribution; 0: `range_ratio` alone
    range_ratio: float = 0.0  # lengths vary uniformly by up to this fraction, up and down
    prefix_len: int = 0  # tokens that the prompts of a tenant, or of its group, share
    num_prefixes: int = 1  # number of distinct shared prefixes

    def __post_init__(self) -> None:
        if min(self.input_len, self.output_len, self.num_prefixes) < 1 or self.prefix_len < 0 or self.sigma < 0:
            raise ValueError("lengths are at least 1, prefix_len and sigma at least 0")
        if not 0 <= self.range_ratio < 1:
            raise ValueError("range_ratio is not between 0 and 1 (1 excluded)")


class Sources:
    """Numbers of the sources that prompts consist of. Source 0 is never given out."""

    def __init__(self) -> None:
        self._next = 0
        self._by_name: dict[str, int] = {}

    def new(self) -> int:
        """Return a new source."""
        self._next += 1
        return self._next

    def named(self, name: str) -> int:
        """Return the source of a name."""
        source = self._by_name.get(name)
        if source is None:
            source = self._by_name[name] = self.new()
        return source


def draw_requests(
    share: TenantShare, times_s: Sequence[float], lengths: Lengths, rng: random.Random, sources: Sources
) -> list[SimRequest]:
    """Return requests of a tenant at these times."""
    owner = f"group {share.group}" if share.group else f"tenant {share.name}"
    requests: list[SimRequest] = []
    for at_s in times_s:
        own = PromptPart(sources.new(), _draw(lengths.input_len, lengths, rng))
        prompt = (own,)
        if lengths.prefix_len:
            prefix = sources.named(f"{owner} prefix {rng.randrange(lengths.num_prefixes)}")
            prompt = (PromptPart(prefix, lengths.prefix_len), own)
        requests.append(SimRequest(at_s, share.name, prompt, _draw(lengths.output_len, lengths, rng)))
    return requests


def deal_to_tenants(
    requests: Sequence[SimRequest], tenants: Sequence[TenantShare], skew: float, rng: random.Random
) -> list[SimRequest]:
    """Assign the requests of a trace without tenants: tenant n gets a part in proportion to n ** -skew."""
    totals = list(accumulate((number + 1) ** -skew for number in range(len(tenants))))
    names = [share.name for share in tenants]
    return [replace(request, tenant=rng.choices(names, cum_weights=totals)[0]) for request in requests]


def ordered_workload(tenants: Sequence[TenantShare], requests: Sequence[SimRequest]) -> Workload:
    """Return a workload. Requests with equal times keep their order."""
    return Workload(tuple(tenants), tuple(sorted(requests, key=lambda request: request.at_s)))


def prompt_bytes(parts: Sequence[PromptPart]) -> bytes:
    """Return a prompt as raw uint32 tokens. Each pair of tokens encodes its source, so that blocks differ."""
    pieces: list[bytes] = []
    for part in parts:
        pair = array("I", (part.source & 0xFFFFFFFF, part.source >> 32)).tobytes()
        pieces.append((pair * (part.tokens // 2 + 1))[: 4 * part.tokens])
    return b"".join(pieces)


def _draw(mean: int, lengths: Lengths, rng: random.Random) -> int:
    length = float(mean)
    if lengths.sigma:
        length *= rng.lognormvariate(-(lengths.sigma**2) / 2, lengths.sigma)
    if lengths.range_ratio:
        length *= rng.uniform(1 - lengths.range_ratio, 1 + lengths.range_ratio)
    return max(1, round(length))
