"""Sampling: from logits to one token per row, on the device, without waiting for it."""

from tiercel.engine.sampling.sampled import Logprobs, Sampled, token_logprobs
from tiercel.engine.sampling.sampler import Sampler, open_sampler

__all__ = ["Logprobs", "Sampled", "Sampler", "open_sampler", "token_logprobs"]
