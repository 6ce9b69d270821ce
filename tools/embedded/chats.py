"""The value types that the grammar produces: a message and a chat."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Role = Literal["system", "user", "assistant", "text"]
"""The roles of a chat; "text" is plain text outside any chat, for completions."""

Measure = Callable[[str], int]
"""Counts (or estimates) the tokens of a text."""


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a chat."""

    role: Role
    content: str


Chat = tuple[Message, ...]


def user(content: str) -> Message:
    """A message of the user."""
    return Message("user", content)


def assistant(content: str) -> Message:
    """A message of the assistant, the text that the model learns to write."""
    return Message("assistant", content)


def system(content: str) -> Message:
    """A system message."""
    return Message("system", content)


def plain(content: str) -> Message:
    """Plain text outside any chat."""
    return Message("text", content)


def rough_tokens(text: str) -> int:
    """Estimate the tokens of grammar text: one a word, one a digit, one a punctuation mark."""
    marks = sum(map(text.count, ".,?!:'\n"))
    digits = sum(map(text.count, "0123456789"))
    return text.count(" ") + 1 + digits + marks


TURN_TOKENS = 5
"""What the chat template adds to each message: markers, the role and line ends."""


def chat_tokens(chat: Chat, measure: Measure = rough_tokens) -> int:
    """Count (or estimate) the tokens of a chat as the chat template renders it."""
    return sum(measure(message.content) + TURN_TOKENS for message in chat)
