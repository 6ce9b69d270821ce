"""Sampling: from logits to one token per row, on the device, without waiting for it."""

from tiercel.engine.sampling.grammar import Grammar, GrammarCompiler, GrammarRow, open_compiler
from tiercel.engine.sampling.grammar_rows import Failures, advance
from tiercel.engine.sampling.sampled import Logprobs, Sampled, token_logprobs
from tiercel.engine.sampling.sampler import Sampler, open_sampler
from tiercel.engine.sampling.subset import Subset

__all__ = [
    "Failures",
    "Grammar",
    "GrammarCompiler",
    "GrammarRow",
    "Logprobs",
    "Sampled",
    "Sampler",
    "Subset",
    "advance",
    "open_compiler",
    "open_sampler",
    "token_logprobs",
]
