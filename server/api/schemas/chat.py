"""The body of /v1/chat/completions, and the text of its messages."""

import re
from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field

from tiercel.errors import AdmissionError
from tiercel.server.api.schemas.fields import MAX_MESSAGES, Fields, Flag, Integer, Word
from tiercel.server.api.schemas.sampling import SamplingFields


class MessageFields(Fields):
    """One message. `message_text` checks the parts of its content, so that an error can name their type."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[dict[str, object]] | None = None
    name: Word | None = None


class ChatTemplateFields(Fields):
    """The fields that decide how messages are rendered."""

    messages: Annotated[list[MessageFields], Field(min_length=1, max_length=MAX_MESSAGES)]
    add_generation_prompt: Flag = True
    continue_final_message: Flag = False
    chat_template_kwargs: dict[str, object] | None = None


class ChatFields(SamplingFields, ChatTemplateFields):
    """The body of /v1/chat/completions."""

    max_completion_tokens: Integer | None = None
    logprobs: Flag | None = None
    top_logprobs: Annotated[Integer, Field(ge=0)] | None = None


def message_text(message: MessageFields) -> str:
    """Return the content of one message as text; parts are joined by line ends.

    Errors: AdmissionError (400) naming the type of a part that is not text.
    """
    content = message.content
    if content is None:
        if message.role == "assistant":
            return ""
        raise AdmissionError(400, f"messages: content of a {message.role} message is missing", param="messages")
    if isinstance(content, str):
        return content
    return "\n".join(_part_text(part) for part in content)


def _part_text(part: Mapping[str, object]) -> str:
    kind, text = part.get("type"), part.get("text")
    if kind not in ("text", "input_text", "output_text"):
        raise AdmissionError(
            400,
            f"messages: a content part {_shown_type(kind)} is not supported",
            code="unsupported_parameter",
            param="messages",
        )
    if not isinstance(text, str):
        raise AdmissionError(400, "messages: the text of a text part is missing", param="messages")
    return text


def _shown_type(kind: object) -> str:
    if kind is None:
        return "without a type"
    if not isinstance(kind, str):
        return "whose type is not a text"
    return "of type " + (re.sub(r"[^A-Za-z0-9_.:/+-]", "?", kind[:64]) or '""')
