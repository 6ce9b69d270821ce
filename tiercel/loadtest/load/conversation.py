"""Conversations, most of them with a single turn: the output of datasets and the input of client processes."""

from msgspec import Struct


class Turn(Struct, frozen=True):
    """One question and the wanted length of its answer."""

    prompt: str
    input_tokens: int  # of this prompt without the turns before it, as planned
    output_tokens: int  # wanted
    think_s: float = 0.0  # pause before it is asked


class Conversation(Struct, frozen=True):
    """Turns that are asked one after another; each prompt follows the earlier questions and answers."""

    turns: tuple[Turn, ...]
    recorded_s: float | None = None  # time of arrival in a recorded trace
