"""What a client asked for, as the engine sees it."""

from array import array
from collections.abc import Iterable

from msgspec import Struct

from tiercel.ids import SeqId, TenantId


class SamplingParams(Struct, frozen=True, kw_only=True):
    """How the next token of one sequence is drawn. Checked by the HTTP process; trusted here."""

    temperature: float = 1.0  # 0 = greedy
    top_p: float = 1.0  # 1 = off
    top_k: int = 0  # 0 = off
    min_p: float = 0.0  # 0 = off
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int = 0  # always set: the HTTP process draws one where the client gave none
    max_tokens: int = 16
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None  # None = none; n = the sampled token's and those of the n likeliest


class Request(Struct, frozen=True, kw_only=True):
    """One choice of one client request: the engine makes one sequence of it.

    `prompt` and `outputs` are raw uint32 token ids (`pack_tokens`). `outputs` is non-empty only when an
    interrupted stream is resumed: tokens that the client has, which are not counted or sent again.
    """

    id: SeqId
    prompt: bytes
    params: SamplingParams
    arrival_s: float  # CLOCK_MONOTONIC
    outputs: bytes = b""
    tenant: TenantId = TenantId("default")
    band: int = 0  # priority band; lower goes first
    scope: bytes = b""  # whose cached blocks may be shared: an HMAC of the tenant's secret and cache_salt


def pack_tokens(tokens: Iterable[int]) -> bytes:
    """Token ids as raw uint32 in the machine's byte order (both processes share one machine)."""
    return array("I", tokens).tobytes()


def unpack_tokens(packed: bytes) -> "array[int]":
    """The inverse of `pack_tokens`."""
    tokens = array("I")
    tokens.frombytes(packed)
    return tokens
