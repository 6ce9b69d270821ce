"""What a device can do for long contexts, from shapes and rates alone: no measurement, no state.

Sources: "Challenges in Deploying Long-Context Transformers" (arXiv 2405.08944) for the five figures of a context;
Mélange (arXiv 2404.14527) for load units. All figures are bounds of a device that is always busy at its rates: prefill
computes, decoding reads memory, a context switch moves KV over the link. Units are bytes, seconds and tokens.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Literal

from tiercel.units import GIB, MIB

BoundBy = Literal["memory", "users", "seats", "compute", "link"]


@dataclass(frozen=True, slots=True)
class DeviceProfile:
    """Memory and rates of one device: a vendor's peaks, or what was measured."""

    name: str
    memory_bytes: int
    flops_per_s: float  # multiplications and additions, of 16-bit numbers
    memory_bytes_per_s: float
    link_bytes_per_s: float  # one way, to where KV lies that has no room here
    float32_flops_per_s: float | None = None


DEVICES: Final[Mapping[str, DeviceProfile]] = MappingProxyType(
    {
        profile.name: profile
        for profile in (
            # dense peaks of the data sheets; links as copies of whole blocks reach them
            DeviceProfile("H200", 143_771 * MIB, 989e12, 4.8e12, 50e9, 67e12),
            DeviceProfile("A100-80G", 80 * GIB, 312e12, 2e12, 20e9, 19.5e12),
            # two cores with AVX512-BF16, measured; the link is a disk of 2 GB/s, assumed
            DeviceProfile("cpu", 24 * GIB, 1e12, 73e9, 2e9, 0.53e12),
        )
    }
)


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What of a model decides memory and time. A mixture of experts has fewer active parameters than parameters."""

    parameters: int
    active_parameters: int  # that one token is multiplied with
    layers: int
    kv_heads: int
    head_dim: int
    attention_width: int  # query heads * head_dim
    itemsize: int  # bytes of one weight and of one KV element

    @property
    def weights_bytes(self) -> int:
        """All weights."""
        return self.parameters * self.itemsize

    @property
    def kv_token_bytes(self) -> int:
        """KV of one token: keys and values of all layers."""
        return self.layers * self.kv_heads * self.head_dim * 2 * self.itemsize


@dataclass(frozen=True, slots=True)
class Session:
    """One user's visit: a context is read once, then `turns` answers are read and thought about."""

    context_tokens: int
    turns: int = 1
    answer_tokens: int = 250  # the paper's "one screen"
    think_s: float = 60.0  # after each answer
    users: int | None = None  # at once; None = as many as have a seat


@dataclass(frozen=True, slots=True)
class ContextFigures:
    """The five figures of a context, and what they are made of."""

    concurrency: int  # contexts that lie in memory at once
    prefill_s: float
    decode_s: float  # one answer, alone
    switch_s: float  # one context out and another in
    sessions_per_s: float  # at most
    bound_by: BoundBy  # what would have to grow for more sessions
    session_s: float  # one visit, thinking included
    free_bytes: int  # for KV
    longest_context_tokens: int  # one context that fills it


@dataclass(frozen=True, slots=True)
class WorkloadBucket:
    """Requests of like lengths in a histogram of a workload."""

    input_tokens: int
    output_tokens: int
    share: float  # of the requests
    requests_per_s: float | None = None  # measured with such requests alone; None = by formula


@dataclass(frozen=True, slots=True)
class BucketLoad:
    """What a bucket costs: `load` is the part of the device that it takes at one request per second of the mix."""

    bucket: WorkloadBucket
    requests_per_s: float  # with such requests alone
    load: float


def flops_per_s(model: ModelShape, device: DeviceProfile) -> float:
    """The device's rate for the model's type; without one for float32 the other is taken."""
    wide = device.float32_flops_per_s
    return device.flops_per_s if model.itemsize < 4 or wide is None else wide


def critical_tokens(model: ModelShape, device: DeviceProfile) -> float:
    """Tokens a step from which multiplying dense weights takes longer than reading them: FLOPS / bandwidth."""
    return flops_per_s(model, device) * model.itemsize / (2 * device.memory_bytes_per_s)


def free_kv_bytes(model: ModelShape, device: DeviceProfile, reserve_bytes: int = 0) -> int:
    """Memory that the weights and a reserve leave for KV; 0 when they leave none."""
    return max(0, device.memory_bytes - model.weights_bytes - reserve_bytes)


def kv_bytes(model: ModelShape, tokens: float) -> float:
    """KV(n) = n * layers * kv_heads * head_dim * 2 * itemsize."""
    return tokens * model.kv_token_bytes


def concurrency(model: ModelShape, device: DeviceProfile, tokens: int, reserve_bytes: int = 0) -> int:
    """C(n) = floor((memory - weights - reserve) / KV(n)): contexts of `tokens` that lie in memory at once."""
    return free_kv_bytes(model, device, reserve_bytes) // (tokens * model.kv_token_bytes)


def prefill_s(model: ModelShape, device: DeviceProfile, tokens: int) -> float:
    """T_prefill(n) = n * (2 P + 2 L n d) / FLOPS: every weight once a token, and causal attention of width d."""
    operations = tokens * (2 * model.active_parameters + 2 * model.layers * tokens * model.attention_width)
    return operations / flops_per_s(model, device)


def decode_s(model: ModelShape, device: DeviceProfile, tokens: float, answer_tokens: int, sequences: int = 1) -> float:
    """T_decode(n, k) = k * (weights + B * KV(n)) / bandwidth: each step reads the weights once and B contexts."""
    read = _weights_read(model, sequences) + sequences * kv_bytes(model, tokens)
    return answer_tokens * read / device.memory_bytes_per_s


def switch_s(model: ModelShape, device: DeviceProfile, tokens: int) -> float:
    """2 * KV(n) / link: one context goes out, another comes in."""
    return 2 * kv_bytes(model, tokens) / device.link_bytes_per_s


def step_s(model: ModelShape, device: DeviceProfile, tokens: float, sequences: int) -> float:
    """One decode step of B sequences: the longer of reading and multiplying the weights, then reading B contexts."""
    weights_s = _weights_read(model, sequences) / device.memory_bytes_per_s
    multiply_s = 2 * model.active_parameters * sequences / flops_per_s(model, device)
    return max(weights_s, multiply_s) + sequences * kv_bytes(model, tokens) / device.memory_bytes_per_s


def context_figures(
    model: ModelShape, device: DeviceProfile, session: Session, reserve_bytes: int = 0
) -> ContextFigures:
    """Concurrency, prefill, decode, context switch and session throughput of one context length.

    While all users have a seat, a session takes T_prefill + turns * (T_decode + think). With more users than seats a
    user gives the seat away to think and every turn adds one switch. Sessions per second are the least of what users,
    seats, computing and link allow. The device computes for one session at a time, but reads the weights for all who
    decode.
    """
    n, turns = session.context_tokens, session.turns
    free = free_kv_bytes(model, device, reserve_bytes)
    seats = concurrency(model, device, n, reserve_bytes)
    prefill, switch = prefill_s(model, device, n), switch_s(model, device, n)
    decode = decode_s(model, device, n, session.answer_tokens)
    users = seats if session.users is None else session.users
    is_resident = users <= seats
    seated_s = prefill + turns * (decode + (0.0 if is_resident else switch))
    session_s = seated_s + turns * session.think_s
    limit_by: dict[BoundBy, float] = {}
    if seats == 0:
        limit_by["memory"] = 0.0
    else:
        batch = min(users, seats)
        answer_s = session.answer_tokens * step_s(model, device, n, batch) / batch
        limit_by["seats" if session.users is None else "users"] = users / session_s
        limit_by["compute"] = 1 / (prefill + turns * answer_s)
        if not is_resident:
            limit_by["seats"] = seats / seated_s
            limit_by["link"] = 1 / (turns * switch)
    bound_by = min(limit_by, key=lambda name: limit_by[name])
    return ContextFigures(
        concurrency=seats,
        prefill_s=prefill,
        decode_s=decode,
        switch_s=switch,
        sessions_per_s=limit_by[bound_by],
        bound_by=bound_by,
        session_s=session_s,
        free_bytes=free,
        longest_context_tokens=free // model.kv_token_bytes,
    )


def bucket_requests_per_s(
    model: ModelShape, device: DeviceProfile, bucket: WorkloadBucket, max_sequences: int, reserve_bytes: int = 0
) -> float:
    """Requests of one bucket per second of a device that serves nothing else; 0 when not even one fits.

    Sequences at once: what memory holds at the mean length, input + output / 2, and no more than `max_sequences`. The
    prefill yields the first output token, each further one takes a step. No prefix hits.
    """
    if concurrency(model, device, bucket.input_tokens + bucket.output_tokens, reserve_bytes) == 0:
        return 0.0
    mean_tokens = bucket.input_tokens + bucket.output_tokens / 2
    at_once = int(free_kv_bytes(model, device, reserve_bytes) / kv_bytes(model, mean_tokens))
    sequences = min(max_sequences, max(1, at_once))
    steps_s = (bucket.output_tokens - 1) * step_s(model, device, mean_tokens, sequences) / sequences
    return 1 / (prefill_s(model, device, bucket.input_tokens) + steps_s)


def workload_loads(
    model: ModelShape,
    device: DeviceProfile,
    buckets: Sequence[WorkloadBucket],
    max_sequences: int,
    reserve_bytes: int = 0,
) -> tuple[BucketLoad, ...]:
    """Each bucket's load, share / throughput, as Mélange counts it.

    Every bucket must have room: see `bucket_requests_per_s`. Shares are taken relative to their sum.
    """
    total = sum(bucket.share for bucket in buckets)
    loads: list[BucketLoad] = []
    for bucket in buckets:
        rate = bucket.requests_per_s
        if rate is None:
            rate = bucket_requests_per_s(model, device, bucket, max_sequences, reserve_bytes)
        loads.append(BucketLoad(bucket, rate, bucket.share / total / rate))
    return tuple(loads)


def admissible_rate(loads: Sequence[BucketLoad]) -> float:
    """Requests per second of the mix that fill the device: the rate at which the loads sum to one."""
    return 1 / sum(part.load for part in loads)


def _weights_read(model: ModelShape, sequences: int) -> int:
    """Bytes of weights that a step of this many tokens reads, at most."""
    return min(model.parameters, model.active_parameters * sequences) * model.itemsize
