"""Requests, as the engine sees them."""

from array import array
from collections.abc import Iterable

from msgspec import Struct

from tiercel.ids import SeqId, TenantId


class SamplingParams(Struct, frozen=True, kw_only=True):
    """The parameters for sampling the next token. The HTTP process has checked the values."""

    temperature: float = 1.0  # 0 = greedy
    top_p: float = 1.0  # 1 = off
    top_k: int = 0  # 0 = off
    min_p: float = 0.0  # 0 = off
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int = 0  # the HTTP process draws a seed if the client gave none
    max_tokens: int = 16
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None  # n = of the sampled token and the n likeliest tokens; None = none


class Request(Struct, frozen=True, kw_only=True):
    """One choice of one client request. The engine creates one sequence for it.

    `prompt` and `outputs` are raw uint32 token ids (`pack_tokens`). `outputs` is non-empty only when an interrupted
    stream is resumed: the client already has these tokens, so they are neither counted nor sent again.
    """

    id: SeqId
    prompt: bytes
    params: SamplingParams
    arrival_s: float  # CLOCK_MONOTONIC
    outputs: bytes = b""
    tenant: TenantId = TenantId("default")
    band: int = 0  # priority band; a lower number is served first
    suspect_until: int = 0  # runs alone until it has so many tokens, because an engine died while it computed them
    scope: bytes = b""  # requests of equal scope share cached blocks: an HMAC of the tenant's secret and cache_salt


def pack_tokens(tokens: Iterable[int]) -> bytes:
    """Return token ids as raw uint32 in the byte order of the machine, which both processes share."""
    return array("I", tokens).tobytes()


def unpack_tokens(packed: bytes) -> "array[int]":
    """Return the token ids in the output of `pack_tokens`."""
    tokens = array("I")
    tokens.frombytes(packed)
    return tokens
