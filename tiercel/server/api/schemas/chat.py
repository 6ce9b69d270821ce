"""The body of /v1/chat/completions, and the text of its messages."""

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

from pydantic import Field, PrivateAttr

from tiercel.server.api.schemas.fields import MAX_MESSAGES, Fields, Flag, Integer, Metadata, Word
from tiercel.server.api.schemas.sampling import SamplingFields
from tiercel.server.api.schemas.tools import (
    MAX_CALLS,
    MAX_ID_LETTERS,
    MAX_TOOLS,
    CalledFunctionFields,
    CallFields,
    ToolFields,
)
from tiercel.values.errors import AdmissionError

NumOutputs = Annotated[Integer, Field(json_schema_extra={"minimum": 1})]
"""A maximum number of output tokens. `params` checks it: with `prompt_logprobs` it may be 0."""


class MessageFields(Fields):
    """One message. `message_text` checks the parts of its content, so that an error can name their type.

    The role may be any that the chat template renders.
    """

    role: Annotated[str, Field(pattern=r"^[A-Za-z0-9_. -]{1,64}$")]
    content: str | list[dict[str, object]] | None = None
    name: Annotated[str, Field(min_length=1, max_length=MAX_ID_LETTERS)] | None = None
    refusal: str | None = None  # of the assistant; its text if there is no content
    tool_calls: Annotated[list[CallFields], Field(max_length=MAX_CALLS)] | None = None
    function_call: CalledFunctionFields | None = None  # the older form of `tool_calls`
    tool_call_id: Annotated[str, Field(max_length=MAX_ID_LETTERS)] | None = None
    reasoning_content: str | None = None  # for templates that show the thoughts of earlier answers
    reasoning: str | None = None  # another name for it
    prefix: Flag | None = None  # of the last message, by the assistant: continue it
    _place: str = PrivateAttr("")

    @property
    def place(self) -> str:
        """The place of the message in a request of another API, for errors; "" in a chat request."""
        return self._place

    def set_place(self, place: str) -> None:
        """Note the place of the message in its request."""
        self._place = place


class ChatTemplateFields(Fields):
    """The fields that decide how messages are rendered."""

    messages: Annotated[list[MessageFields], Field(min_length=1, max_length=MAX_MESSAGES)]
    tools: Annotated[list[ToolFields], Field(min_length=1, max_length=MAX_TOOLS)] | None = None
    reasoning_effort: Word | None = None  # for templates that read it, as the next one
    verbosity: Literal["low", "medium", "high"] | None = None
    add_generation_prompt: Flag = True
    continue_final_message: Flag = False
    add_special_tokens: Flag = False
    chat_template_kwargs: dict[str, object] | None = None


class ChatFields(SamplingFields, ChatTemplateFields):
    """The body of /v1/chat/completions."""

    max_tokens: NumOutputs | None = None
    max_completion_tokens: NumOutputs | None = None
    logprobs: Flag | None = None
    top_logprobs: Annotated[Integer, Field(ge=-1)] | None = None  # -1: the whole vocabulary
    store: Flag | None = None  # of /v1/chat/completions
    prediction: dict[str, object] | None = None  # ignored
    tool_choice: str | dict[str, object] | None = None  # checked by `read_tool_choice`
    parallel_tool_calls: Flag | None = None
    include_reasoning: Flag | None = None

    @property
    def max_outputs(self) -> int | None:
        """The maximum number of output tokens; None: the rest of the context."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def may_constrain(self) -> bool:
        """Whether a field is set from which a grammar may have to be made."""
        return bool(self.tools) or super().may_constrain


class StoredChatFields(Fields):
    """The body of POST /v1/chat/completions/{id}."""

    metadata: Annotated[
        Metadata | None, Field(description="The metadata in place of those before; null stands for none.")
    ]


def placed(messages: list[MessageFields], places: Sequence[str]) -> list[MessageFields]:
    """Note the places of messages in a request of another API, and return the messages."""
    for message, place in zip(messages, places, strict=True):
        message.set_place(place)
    return messages


def message_text(message: MessageFields) -> str:
    """Return the content of one message as text; parts are joined by line ends.

    Errors: AdmissionError (400) naming the type of a part that is not text.
    """
    content = message.content
    if content is None:
        if message.role == "assistant":
            return message.refusal or ""
        raise AdmissionError(400, f"messages: content of a {message.role} message is missing", param="messages")
    if isinstance(content, str):
        return content
    return "\n".join(_part_text(part) for part in content)


def _part_text(part: Mapping[str, object]) -> str:
    kind, text = part.get("type"), part.get("text")
    if kind == "refusal":
        kind, text = "text", part.get("refusal")
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
