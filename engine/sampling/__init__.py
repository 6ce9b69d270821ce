"""Sampling: from logits to one token a row, on the device, without ever waiting for it."""

from tiercel.engine.sampling.sampled import Logprobs, Sampled, token_logprobs
from tiercel.engine.sampling.sampler import Sampler, open_sampler

__all__ = ["Logprobs", "Sampled", "Sampler", "open_sampler", "token_logprobs"]
