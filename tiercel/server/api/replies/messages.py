"""Answers of /v1/messages, whole and as stream events."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from tiercel.server.api.replies.usage import UsageBody

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "pause_turn"]
"""The reason for the end of a message.

`pause_turn`: its time was up; the client may send it back to have it continued.
"""


class TextBlock(Struct, frozen=True, tag_field="type", tag="text"):
    """Text for the user. It cites nothing, so it has no `citations`: some clients take null for a fault."""

    text: str


class ThinkingBlock(Struct, frozen=True, tag_field="type", tag="thinking"):
    """Thoughts before the answer. This server does not sign them."""

    thinking: str
    signature: str = ""


class ToolUseBlock(Struct, frozen=True, tag_field="type", tag="tool_use"):
    """A call of one of the client's functions."""

    id: str
    name: str
    input: Annotated[msgspec.Raw, Meta(extra_json_schema={"type": "object"})]  # as the model wrote it


NO_INPUT = msgspec.Raw(b"{}")
ContentBlock = TextBlock | ThinkingBlock | ToolUseBlock


class MessageUsage(Struct, frozen=True, kw_only=True):
    """The token counts of a message. The prompt has the sum of the input tokens."""

    input_tokens: int  # that were computed
    cache_creation_input_tokens: int = 0  # no token costs more because it is cached
    cache_read_input_tokens: int = 0
    output_tokens: int
    service_tier: Literal["standard"] = "standard"


class MessageReply(Struct, frozen=True, kw_only=True, tag_field="type", tag="message"):
    """A message of the assistant."""

    id: str
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[ContentBlock]
    stop_reason: StopReason | None
    stop_sequence: str | None = None
    usage: MessageUsage


class MessageStart(Struct, frozen=True, tag_field="type", tag="message_start"):
    """The message without content."""

    message: MessageReply


class BlockStart(Struct, frozen=True, tag_field="type", tag="content_block_start"):
    """A block without its text, thoughts or input."""

    index: int
    content_block: ContentBlock


class TextPiece(Struct, frozen=True, tag_field="type", tag="text_delta"):
    """More text."""

    text: str


class ThinkingPiece(Struct, frozen=True, tag_field="type", tag="thinking_delta"):
    """More thoughts."""

    thinking: str


class SignaturePiece(Struct, frozen=True, tag_field="type", tag="signature_delta"):
    """The end of the thoughts."""

    signature: str = ""


class InputPiece(Struct, frozen=True, tag_field="type", tag="input_json_delta"):
    """More of the JSON text of the input."""

    partial_json: str


class BlockDelta(Struct, frozen=True, tag_field="type", tag="content_block_delta"):
    """The next piece of a block."""

    index: int
    delta: TextPiece | ThinkingPiece | SignaturePiece | InputPiece


class BlockStop(Struct, frozen=True, tag_field="type", tag="content_block_stop"):
    """The end of a block."""

    index: int


class MessageEnd(Struct, frozen=True):
    """The reason for the end of the message."""

    stop_reason: StopReason
    stop_sequence: str | None


class MessageDelta(Struct, frozen=True, tag_field="type", tag="message_delta"):
    """The end of the content, and the final token counts."""

    delta: MessageEnd
    usage: MessageUsage


class MessageStop(Struct, frozen=True, tag_field="type", tag="message_stop"):
    """The last event."""


MessageEvent = MessageStart | BlockStart | BlockDelta | BlockStop | MessageDelta | MessageStop


class TokenCount(Struct, frozen=True):
    """The number of tokens of a conversation."""

    input_tokens: int


def message_usage(usage: UsageBody) -> MessageUsage:
    """Return the token counts as this API has them: cached tokens are counted apart."""
    cached = usage.cached_tokens
    return MessageUsage(
        input_tokens=usage.prompt_tokens - cached,
        cache_read_input_tokens=cached,
        output_tokens=usage.completion_tokens,
    )
