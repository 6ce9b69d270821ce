"""Sampling: from logits to one token per row, on the device, without waiting for it."""

from tiercel.engine.sampling.grammar import Grammar, GrammarCompiler, GrammarRow, open_compiler
from tiercel.engine.sampling.grammar_rows import Failures, advance
from tiercel.engine.sampling.row import DrawColumn
from tiercel.engine.sampling.sampled import Logprobs, Sampled, token_logprobs
from tiercel.engine.sampling.sampler import DrawPlan, Sampler, open_sampler
from tiercel.engine.sampling.subset import Subset
from tiercel.engine.sampling.upload import CopyLink, HostLink

__all__ = [
    "CopyLink",
    "DrawColumn",
    "DrawPlan",
    "Failures",
    "Grammar",
    "GrammarCompiler",
    "GrammarRow",
    "HostLink",
    "Logprobs",
    "Sampled",
    "Sampler",
    "Subset",
    "advance",
    "open_compiler",
    "open_sampler",
    "token_logprobs",
]
