"""Answers of /v1/conversations."""

from typing import Any, Literal

from msgspec import Struct

Json = dict[str, Any]  # Any: a JSON document


class ConversationBody(Struct, frozen=True):
    """A conversation without its items."""

    id: str
    created_at: int
    metadata: dict[str, str]
    object: Literal["conversation"] = "conversation"


class DeletedConversation(Struct, frozen=True):
    """The answer to a deletion."""

    id: str
    object: Literal["conversation.deleted"] = "conversation.deleted"
    deleted: bool = True


class ConversationItemList(Struct, frozen=True):
    """A page of the items of a conversation."""

    data: list[Json]
    first_id: str
    last_id: str
    has_more: bool
    object: Literal["list"] = "list"
