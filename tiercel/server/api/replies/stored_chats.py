"""Stored chat completions as clients see them."""

from typing import Any, Literal

import msgspec
from msgspec import Struct, UnsetType

from tiercel.server.api.replies.chat import ChatReply, ChatReplyChoice
from tiercel.server.api.replies.usage import UsageBody

Json = dict[str, Any]  # Any: a JSON document


class StoredChatBody(Struct, frozen=True, kw_only=True):
    """A chat completion without log-probabilities and token ids, and the fields of its request."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatReplyChoice]
    service_tier: str | None
    system_fingerprint: str | UnsetType
    usage: UsageBody
    request_id: str
    metadata: dict[str, str]
    temperature: float
    top_p: float
    presence_penalty: float
    frequency_penalty: float
    seed: int | None
    tools: list[Json] | None
    tool_choice: str | Json | None
    response_format: Json | None
    input_user: str | None


class StoredChatList(Struct, frozen=True):
    """A page of stored chat completions."""

    data: list[StoredChatBody]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: Literal["list"] = "list"


class StoredMessage(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A message of the request of a stored chat completion."""

    id: str
    role: str
    content: str | None
    content_parts: list[Json] | None
    name: str | None
    refusal: str | None
    reasoning_content: str | None = None
    tool_calls: list[Json] | None = None
    function_call: Json | None = None
    tool_call_id: str | None = None


class StoredMessageList(Struct, frozen=True):
    """A page of the messages of a stored chat completion."""

    data: list[StoredMessage]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: Literal["list"] = "list"


class DeletedChat(Struct, frozen=True):
    """The answer to a deletion."""

    id: str
    object: Literal["chat.completion.deleted"] = "chat.completion.deleted"
    deleted: bool = True


def without_tokens(reply: ChatReply) -> list[ChatReplyChoice]:
    """Return the choices of an answer without log-probabilities and token ids."""
    return [msgspec.structs.replace(choice, logprobs=None, token_ids=None) for choice in reply.choices]
