"""The capacity of a device for long contexts, computed from shapes and rates alone.

Sources: "Challenges in Deploying Long-Context Transformers" (arXiv 2405.08944) for the five figures of a context;
Mélange (arXiv 2404.14527) for load units. All figures are bounds of a device that is always busy at its rates: prefill
computes, decoding reads memory, a context switch moves KV over the link. Units are bytes, seconds and tokens.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Literal

from tiercel.values.units import GIB, MIB

BoundBy = Literal["memory", "users", "seats", "compute", "link"]


@dataclass(frozen=True, slots=True)
class DeviceProfile:
    """Memory and rates of one device: a vendor's peaks, or what was measured."""

    name: str
    memory_bytes: int
    flops_per_s: float  # multiplications and additions, of 16-bit numbers
    memory_bytes_per_s: float
    link_bytes_per_s: float  # in one direction, to the memory that holds KV outside the device
    float32_flops_per_s: float | None = None


DEVICES: Final[Mapping[str, DeviceProfile]] = MappingProxyType(
    {
        profile.name: profile
        for profile in (
            # dense peaks of the data sheets; links as copies of whole blocks reach them
            DeviceProfile("H200", 143_771 * MIB, 989e12, 4.8e12, 50e9, 67e12),
            DeviceProfile("A100-80G", 80 * GIB, 312e12, 2e12, 20e9, 19.5e12),
            # two cores with AVX512-BF16, measured; the link is assumed to be a disk of 2 GB/s
            DeviceProfile("cpu", 24 * GIB, 1e12, 73e9, 2e9, 0.53e12),
        )
    }
)


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes of a model that determine memory and time. A mixture of experts has fewer active parameters."""

    parameters: int
    active_parameters: int  # by which one token is multiplied
    layers: int
    kv_heads: int
    head_dim: int
    attention_width: int  # query heads * head_dim
    itemsize: int  # bytes of one weight that is not quantised
    kv_head_bytes: int = 0  # of a token's key and value in one head; 0: numbers as wide as the weights
    weight_bytes: float | None = None  # bytes of one weight on average; None: `itemsize`

    @property
    def weights_bytes(self) -> int:
        """Bytes of all weights."""
        return round(self.parameters * self.bytes_per_weight)

    @property
    def bytes_per_weight(self) -> float:
        """Bytes of one weight on average."""
        return self.itemsize if self.weight_bytes is None else self.weight_bytes

    @property
    def kv_token_bytes(self) -> int:
        """Bytes of the keys and values of one token in all layers."""
        return self.layers * self.kv_heads * (self.kv_head_bytes or self.head_dim * 2 * self.itemsize)


@dataclass(frozen=True, slots=True)
class Session:
    """The session of one user: one prefill of a context, then `turns` answers with time to think after each."""

    context_tokens: int
    turns: int = 1
    answer_tokens: int = 250  # the paper's "one screen"
    think_s: float = 60.0  # after each answer
    users: int | None = None  # at the same time; None: as many as memory holds contexts


@dataclass(frozen=True, slots=True)
class ContextFigures:
    """The five figures of a context, and their parts."""

    concurrency: int  # contexts that fit in memory at the same time
    prefill_s: float
    decode_s: float  # one answer, alone
    switch_s: float  # one context out and another in
    sessions_per_s: float  # at most
    bound_by: BoundBy  # the resource that limits the sessions per second
    session_s: float  # one session, with the time to think
    free_bytes: int  # for KV
    longest_context_tokens: int  # length of one context that fills it


@dataclass(frozen=True, slots=True)
class WorkloadBucket:
    """Requests of similar lengths: one bucket of a histogram of a workload."""

    input_tokens: int
    output_tokens: int
    share: float  # of the requests
    requests_per_s: float | None = None  # measured with such requests alone; None: computed


@dataclass(frozen=True, slots=True)
class BucketLoad:
    """The load of a bucket: the part of the device that it uses at one request per second of the mix."""

    bucket: WorkloadBucket
    requests_per_s: float  # with such requests alone
    load: float


def flops_per_s(model: ModelShape, device: DeviceProfile) -> float:
    """Return the device's rate for the model's number type; the 16-bit rate if there is none for float32."""
    wide = device.float32_flops_per_s
    return device.flops_per_s if model.itemsize < 4 or wide is None else wide


def critical_tokens(model: ModelShape, device: DeviceProfile) -> float:
    """Return the tokens per step above which multiplying dense weights takes longer than reading them."""
    return flops_per_s(model, device) * model.bytes_per_weight / (2 * device.memory_bytes_per_s)


def free_kv_bytes(model: ModelShape, device: DeviceProfile, reserve_bytes: int = 0) -> int:
    """Return the memory that weights and reserve leave for KV, at least 0."""
    return max(0, device.memory_bytes - model.weights_bytes - reserve_bytes)


def kv_bytes(model: ModelShape, tokens: float) -> float:
    """Return the bytes of KV of n tokens: KV(n) = n * layers * kv_heads * head_dim * 2 * itemsize."""
    return tokens * model.kv_token_bytes


def concurrency(model: ModelShape, device: DeviceProfile, tokens: int, reserve_bytes: int = 0) -> int:
    """Return the contexts of n tokens that fit in memory: C(n) = floor((memory - weights - reserve) / KV(n))."""
    return free_kv_bytes(model, device, reserve_bytes) // (tokens * model.kv_token_bytes)


def prefill_s(model: ModelShape, device: DeviceProfile, tokens: int) -> float:
    """Return T_prefill(n) = n * (2 P + 2 L n d) / FLOPS: all weights per token, and causal attention of width d."""
    operations = tokens * (2 * model.active_parameters + 2 * model.layers * tokens * model.attention_width)
    return operations / flops_per_s(model, device)


def decode_s(model: ModelShape, device: DeviceProfile, tokens: float, answer_tokens: int, sequences: int = 1) -> float:
    """Return T_decode(n, k) = k * (weights + B * KV(n)) / bandwidth: a step reads the weights and B contexts."""
    read = _weights_read(model, sequences) + sequences * kv_bytes(model, tokens)
    return answer_tokens * read / device.memory_bytes_per_s


def switch_s(model: ModelShape, device: DeviceProfile, tokens: int) -> float:
    """Return the time to move one context out and another in: 2 * KV(n) / link."""
    return 2 * kv_bytes(model, tokens) / device.link_bytes_per_s


def step_s(model: ModelShape, device: DeviceProfile, tokens: float, sequences: int) -> float:
    """Return the time of a decode step of B sequences: reading or multiplying the weights, then reading B contexts."""
    weights_s = _weights_read(model, sequences) / device.memory_bytes_per_s
    multiply_s = 2 * model.active_parameters * sequences / flops_per_s(model, device)
    return max(weights_s, multiply_s) + sequences * kv_bytes(model, tokens) / device.memory_bytes_per_s


def context_figures(
    model: ModelShape, device: DeviceProfile, session: Session, reserve_bytes: int = 0
) -> ContextFigures:
    """Return concurrency, prefill, decode, context switch and session throughput for one context length.

    A seat is memory for one context. While all users have a seat, a session takes T_prefill + turns * (T_decode +
    think). With more users than seats a user gives up the seat while thinking, and every turn adds one switch.
    Sessions per second are the minimum of what users, seats, computing and link allow. The device computes for one
    session at a time, but reads the weights once for all sequences that decode.
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
    """Return the requests per second of a device that serves one bucket alone; 0 if no request fits.

    The number of sequences is what memory holds at the mean length, input + output / 2, at most `max_sequences`. The
    prefill yields the first output token, a step each further one. Without prefix hits.
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
    """Return the load of each bucket, share / throughput, as in Mélange. Shares are relative to their sum.

    A request of every bucket must fit, see `bucket_requests_per_s`.
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
    """Return the requests per second of the mix that fill the device: the rate at which the loads sum to 1."""
    return 1 / sum(part.load for part in loads)


def _weights_read(model: ModelShape, sequences: int) -> int:
    """Return the bytes of weights that a step of this many tokens reads, at most."""
    return round(min(model.parameters, model.active_parameters * sequences) * model.bytes_per_weight)
