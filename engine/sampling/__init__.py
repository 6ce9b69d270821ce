"""Sampling: from logits to one token a row, on the device, without ever waiting for it."""

from engine.sampling.sampled import Logprobs, Sampled, token_logprobs
from engine.sampling.sampler import Sampler

__all__ = ["Logprobs", "Sampled", "Sampler", "token_logprobs"]
