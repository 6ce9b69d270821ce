"""What is asked in a simulation: when, by whom, and which prompts begin alike. No words, only lengths."""

import random
from array import array
from collections.abc import Sequence
from itertools import accumulate

from msgspec import Struct
from msgspec.structs import replace

from tiercel.ids import TenantId
from tiercel.tenant import TenantShare


class PromptPart(Struct, frozen=True, gc=False):
    """A stretch of a prompt. Equal sources say the same; no two sources share a block."""

    source: int
    tokens: int


class SimRequest(Struct, frozen=True, gc=False):
    """One request."""

    at_s: float
    tenant: TenantId
    prompt: tuple[PromptPart, ...]
    outputs: int  # tokens it says

    @property
    def num_prompt(self) -> int:
        """Tokens."""
        return sum(part.tokens for part in self.prompt)


class Workload(Struct, frozen=True):
    """Everything that is asked in a run, in order of time."""

    tenants: tuple[TenantShare, ...]
    requests: tuple[SimRequest, ...]


class Lengths(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How long prompts and answers are."""

    input_len: int = 512  # mean tokens, without the shared prefix
    output_len: int = 128
    sigma: float = 0.0  # of a log-normal around the mean; 0: `range_ratio` alone
    range_ratio: float = 0.0  # evenly by this fraction to both sides
    prefix_len: int = 0  # tokens that prompts of a tenant, or of its group, share
    num_prefixes: int = 1  # so many different ones

    def __post_init__(self) -> None:
        if min(self.input_len, self.output_len, self.num_prefixes) < 1 or self.prefix_len < 0 or self.sigma < 0:
            raise ValueError("lengths are at least 1, prefix_len and sigma at least 0")
        if not 0 <= self.range_ratio < 1:
            raise ValueError("range_ratio is not between 0 and 1 (1 excluded)")


class Sources:
    """Numbers for what prompts are made of. Source 0 is nobody's."""

    def __init__(self) -> None:
        self._next = 0
        self._by_name: dict[str, int] = {}

    def new(self) -> int:
        """A text that nothing else begins with."""
        self._next += 1
        return self._next

    def named(self, name: str) -> int:
        """The text of this name."""
        source = self._by_name.get(name)
        if source is None:
            source = self._by_name[name] = self.new()
        return source


def draw_requests(
    share: TenantShare, times_s: Sequence[float], lengths: Lengths, rng: random.Random, sources: Sources
) -> list[SimRequest]:
    """A tenant's requests at these times."""
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
    """Requests of a trace that names no tenants, dealt out: the n-th tenant gets a part in proportion to n ** -skew."""
    totals = list(accumulate((number + 1) ** -skew for number in range(len(tenants))))
    names = [share.name for share in tenants]
    return [replace(request, tenant=rng.choices(names, cum_weights=totals)[0]) for request in requests]


def ordered_workload(tenants: Sequence[TenantShare], requests: Sequence[SimRequest]) -> Workload:
    """Everything of a run; asks of one moment stay in the order in which they were drawn."""
    return Workload(tuple(tenants), tuple(sorted(requests, key=lambda request: request.at_s)))


def prompt_bytes(parts: Sequence[PromptPart]) -> bytes:
    """Raw uint32 tokens. Every pair of tokens names its source, so that each block tells them apart."""
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
