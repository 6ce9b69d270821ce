"""Requests, as the engine sees them."""

from array import array
from collections.abc import Iterable
from typing import Literal

from msgspec import Struct

from tiercel.values.ids import SeqId, TenantId

MAX_LOOKUP_TOKENS = 16
"""The maximum of `SamplingParams.prompt_lookup_num_tokens`."""

Pooling = Literal["last", "mean"]
"""How the states of a prompt become one vector: the state of its last token, or the mean over all its tokens."""

MAX_BAD_WORD_TOKENS = 32
"""The longest entry of `SamplingParams.bad_words`, because the device keeps the last outputs of each row."""


class SamplingParams(Struct, frozen=True, kw_only=True):
    """The parameters for sampling the next token. The HTTP process has checked the values.

    `grammar` is the text of an llguidance grammar, as `llguidance.LLMatcher.grammar_from_json_schema`, `_from_regex` or
    `_from_lark` or `StructTag.to_grammar` returns it. The output matches it from its first token on: a token that the
    grammar excludes is never drawn, an end token only where the grammar may end, and nothing else where it cannot go
    on. A grammar that the engine cannot compile fails its request. See `Ready.has_grammars`.
    """

    temperature: float = 1.0  # 0 = greedy
    top_p: float = 1.0  # 1 = off
    top_k: int = 0  # 0 = off
    min_p: float = 0.0  # 0 = off
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()  # token sequences that are never completed, at most 32 tokens each
    allowed_token_ids: tuple[int, ...] = ()  # no other token is drawn; () = any
    seed: int = 0  # the HTTP process draws a seed if the client gave none
    max_tokens: int = 16  # 0 = the sequence ends when its prompt is computed
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    prompt_lookup_num_tokens: int = 0  # most tokens that are proposed at once from earlier text; 0 = none
    logprobs: int | None = None  # n = of the sampled token and the n likeliest tokens; None = none
    grammar: str = ""  # "" = unconstrained
    # n = of each token of the prompt but the first, and the n likeliest tokens at its position; None = none
    prompt_logprobs: int | None = None
    # The answer is one vector, the pooled final states of the prompt (`Pooled`), and no token: max_tokens is 0
    pooling: Pooling | None = None

    def __post_init__(self) -> None:
        if self.pooling is not None and (self.max_tokens or self.prompt_logprobs is not None):
            raise ValueError("pooling: a request with pooling has max_tokens 0 and no prompt_logprobs")


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
    num_read: int = 0  # leading prompt positions whose log-probabilities the client has from an earlier engine
    scope: bytes = b""  # requests of equal scope share cached blocks: an HMAC of the tenant's secret and cache_salt


def pack_tokens(tokens: Iterable[int]) -> bytes:
    """Return token ids as raw uint32 in the byte order of the machine, which both processes share."""
    return array("I", tokens).tobytes()


def unpack_tokens(packed: bytes) -> "array[int]":
    """Return the token ids in the output of `pack_tokens`."""
    tokens = array("I")
    tokens.frombytes(packed)
    return tokens
