"""The text generator: everything that the embedded model was trained on.

All text comes from a seeded `random.Random`, so a seed names the text. `recall_chat` is the
main diet: codes stated in a context ("The code of Anna is 4821.") that questions ask for
later. `prose_chat` mixes small talk, sums, short facts and tiny stories.
"""

# ruff: noqa: S311 - nothing here is secret

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from random import Random

from tools.embedded.chats import (
    Chat,
    Measure,
    Message,
    assistant,
    chat_tokens,
    plain,
    rough_tokens,
    system,
    user,
)
from tools.embedded.prose import (
    UNKNOWN,
    filler_sentence,
    plain_text,
    prose_chat,
    question_and_answer,
    story,
    sums_chat,
)
from tools.embedded.recall import (
    FULL_STYLE,
    Fact,
    RecallStyle,
    made_up_name,
    recall_chat,
    recall_question,
    recall_text,
    state_facts,
)

__all__ = [
    "FULL_STYLE",
    "Chat",
    "Fact",
    "Measure",
    "Message",
    "RecallStyle",
    "assistant",
    "chat_tokens",
    "corpus",
    "filler_sentence",
    "made_up_name",
    "plain",
    "plain_text",
    "prose_chat",
    "question_and_answer",
    "recall_chat",
    "recall_question",
    "recall_text",
    "rough_tokens",
    "state_facts",
    "story",
    "sums_chat",
    "system",
    "user",
]


def corpus(seed: int, chats: int, tokens: int = 200) -> Iterator[str]:
    """Message texts of `chats` mixed chats, for building a tokenizer.

    Made-up words are left out, so that no token is spent on them.
    """
    rng = Random(seed)
    style = replace(FULL_STYLE, made_up=0.0)
    for index in range(chats):
        chat = recall_chat(rng, tokens, style) if index % 4 == 0 else prose_chat(rng, tokens)
        for message, after in zip(chat, (*chat[1:], None), strict=True):
            if after is None or after.content not in UNKNOWN:
                yield message.content
