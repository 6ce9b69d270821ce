"""Predict the speed of decoding from the bytes that a step reads and from measured rates of the machine."""

from dataclasses import dataclass
from typing import Literal

BoundBy = Literal["reading memory", "multiplying"]


@dataclass(frozen=True, slots=True)
class DecodeWork:
    """The work of one decode step, apart from the number of its sequences."""

    weights_bytes: int  # read at most once by every step: the embedding is not, unless the head shares it
    flops_per_token: float  # 2 for each weight that a token is multiplied by
    kv_token_bytes: int
    expert_bytes: int = 0  # of the weights: those of a mixture's experts
    skipped_share: float = 0.0  # of the experts of a layer: those that one token does not choose

    def read_bytes(self, streams: int) -> float:
        """Return the weights that a step reads, as if every token chose its experts independently of the others."""
        return self.weights_bytes - self.expert_bytes * self.skipped_share**streams


@dataclass(frozen=True, slots=True)
class DecodePrediction:
    """A speed that the rates allow. A step does other work, too, but weights that fit in a cache are read faster."""

    tokens_per_s: float  # of all streams together
    bound_by: BoundBy


def predict_decode(
    work: DecodeWork, streams: int, context_tokens: int, read_bytes_per_s: float, flops_per_s: float
) -> DecodePrediction:
    """Return the speed of a step with one token for each of `streams` sequences of `context_tokens`.

    A step takes as long as the slower of its two parts: reading the weights once and the KV of every sequence, or
    multiplying every token by the weights.
    """
    read_s = (work.read_bytes(streams) + streams * context_tokens * work.kv_token_bytes) / read_bytes_per_s
    multiply_s = streams * work.flops_per_token / flops_per_s
    return DecodePrediction(
        streams / max(read_s, multiply_s), "reading memory" if read_s >= multiply_s else "multiplying"
    )
