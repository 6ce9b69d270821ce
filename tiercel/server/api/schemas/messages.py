"""The bodies of /v1/messages and /v1/messages/count_tokens.

Source: https://docs.claude.com/en/api/messages.
"""

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field

from tiercel.server.api.schemas.fields import MAX_MESSAGES, Fields, Finite, Flag, Integer, Word
from tiercel.server.api.schemas.sampling import INT64_MAX, INT64_MIN, StopText, Timeout
from tiercel.values.errors import AdmissionError

MAX_STOP_SEQUENCES = 16
MAX_MESSAGE_TOOLS = 128

_REFUSED = frozenset({"container", "context_management", "inference_geo", "mcp_servers"})

Blocks = str | list[dict[str, object]]
"""A text or content blocks. `message_turns` checks the blocks, so that an error can name their type."""


class TurnFields(Fields):
    """One message."""

    role: Literal["user", "assistant", "system"]
    content: Blocks


class ThinkingFields(Fields):
    """Whether the model thinks before it answers."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[Integer, Field(ge=1024)] | None = None  # ignored: `max_tokens` limits thoughts and answer
    display: Literal["summarized", "omitted"] | None = None  # omitted: thoughts are not sent


class MessageToolFields(Fields):
    """A function that the client can call for the model."""

    name: Word
    description: str | None = None
    input_schema: dict[str, object]
    type: Literal["custom"] | None = None  # others are refused before, with their names
    strict: Flag | None = None
    cache_control: dict[str, object] | None = None  # ignored: prefixes are cached anyway


class MessageToolChoice(Fields):
    """Whether the model must or may use tools, or one of them."""

    type: Literal["auto", "any", "tool", "none"]
    name: Word | None = None
    disable_parallel_tool_use: Flag | None = None


class OutputFormat(Fields):
    """The JSON schema that the answer must match."""

    type: Literal["json_schema"]
    schema_: Annotated[dict[str, object], Field(alias="schema")]


class OutputConfig(Fields):
    """The form and the effort of the answer."""

    format: OutputFormat | None = None
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None


class MessageMetadata(Fields):
    """Ignored: the key decides whose request it is."""

    user_id: str | None = None


class MessagePromptFields(Fields):
    """The fields that decide what the model reads: the body of /v1/messages/count_tokens."""

    model: str | None = None
    messages: Annotated[
        list[TurnFields],
        Field(
            min_length=1,
            max_length=MAX_MESSAGES,
            description="The conversation: text, tool_use, tool_result and thinking blocks. A last message of the"
            " assistant is continued.",
        ),
    ]
    system: Annotated[Blocks | None, Field(description="The system prompt, as text or as text blocks.")] = None
    tools: Annotated[
        Annotated[list[MessageToolFields], Field(max_length=MAX_MESSAGE_TOOLS)] | None,
        Field(description="Functions of the client. Tools that run at Anthropic are refused."),
    ] = None
    tool_choice: Annotated[
        MessageToolChoice | None,
        Field(description="Whether functions are called; disable_parallel_tool_use: one call at most."),
    ] = None
    thinking: Annotated[
        ThinkingFields | None,
        Field(
            description="enabled and disabled set the template's switch enable_thinking, adaptive leaves it."
            " budget_tokens is ignored: max_tokens limits thoughts and answer together. display omitted: thoughts are"
            " not sent."
        ),
    ] = None
    output_config: Annotated[
        OutputConfig | None,
        Field(description="format: a JSON schema for the answer. effort: the template's reasoning_effort."),
    ] = None
    cache_control: Annotated[dict[str, object] | None, Field(description="Ignored: every prefix is cached.")] = None


class MessagesFields(MessagePromptFields):
    """The body of /v1/messages. The last fields are our own."""

    max_tokens: Annotated[Integer, Field(ge=1, description="Maximum number of output tokens, thoughts included.")]
    stop_sequences: Annotated[
        Annotated[list[StopText], Field(max_length=MAX_STOP_SEQUENCES)] | None,
        Field(description="Texts that end the answer and are not part of it."),
    ] = None
    temperature: Annotated[Finite, Field(ge=0, le=1)] | None = None
    top_p: Annotated[Finite, Field(ge=0, le=1)] | None = None
    top_k: Annotated[Integer, Field(ge=-1, le=2**31 - 1)] | None = None
    stream: Flag | None = None
    metadata: Annotated[MessageMetadata | None, Field(description="Ignored: the key decides whose request it is.")] = (
        None
    )
    service_tier: Annotated[
        Literal["auto", "standard_only"] | None, Field(description="Ignored: the key decides about the service.")
    ] = None
    seed: Annotated[Integer, Field(ge=INT64_MIN, le=INT64_MAX)] | None = None
    cache_salt: Word | None = None
    priority: Annotated[Integer, Field(ge=-(2**31), le=2**31 - 1)] | None = None  # a lower number goes first
    timeout: Timeout | None = None


def refuse_hosted(body: Mapping[str, object]) -> None:
    """Refuse what only Anthropic's own servers can do. Errors: AdmissionError (400) naming the field or the tool."""
    if body.get("thread") is not None:  # Anthropic's SDK goes on without threads when it reads this code
        raise AdmissionError(
            400,
            "thread is not supported: send the whole conversation in messages",
            code="thread_unsupported_request",
            param="thread",
        )
    for name in sorted(_REFUSED.intersection(body)):
        if body[name] is not None:
            raise AdmissionError(400, f"{name} is not supported", code="unsupported_parameter", param=name)
    tools = body.get("tools")
    for tool in tools if isinstance(tools, list) else ():  # pyright: ignore[reportUnknownVariableType] - raw JSON
        kind: object = tool.get("type") if isinstance(tool, dict) else None  # pyright: ignore[reportUnknownMemberType,reportUnknownVariableType]
        if kind not in (None, "custom"):
            shown = kind[:64] if isinstance(kind, str) else "that is not a text"
            raise AdmissionError(
                400,
                f"tools: a tool of type {shown} runs at Anthropic; only custom tools are supported",
                code="unsupported_parameter",
                param="tools",
            )
