"""Conversations, most of a single turn: what a dataset yields and a client process asks."""

from msgspec import Struct


class Turn(Struct, frozen=True):
    """One question and how long its answer shall be."""

    prompt: str
    input_tokens: int  # of the prompt alone, as planned
    output_tokens: int
    think_s: float = 0.0  # pause before it is asked


class Conversation(Struct, frozen=True):
    """Turns that are asked one after another, each behind what was said before."""

    turns: tuple[Turn, ...]
    recorded_s: float | None = None  # when a trace says that it began
