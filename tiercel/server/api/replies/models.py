"""Answers of /v1/models, in the shape of OpenAI and in that of Anthropic."""

from typing import Literal

from msgspec import Struct


class ModelCard(Struct, frozen=True, kw_only=True):
    """One name that the server answers to."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: Literal["tiercel"] = "tiercel"
    root: str
    parent: None = None
    max_model_len: int | None  # tokens; null until the engine has loaded
    permission: list[None] = []


class ModelList(Struct, frozen=True, kw_only=True):
    """Every name that the server answers to."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class MessageModel(Struct, frozen=True, kw_only=True, tag_field="type", tag="model"):
    """One name that the server answers to, as Anthropic's clients read it."""

    id: str
    display_name: str
    created_at: str  # RFC 3339: the start of the server
    lifecycle: Literal["active"] = "active"
    max_input_tokens: int | None  # null until the engine has loaded
    max_tokens: int | None


class MessageModelList(Struct, frozen=True, kw_only=True):
    """Every name that the server answers to, on one page."""

    data: list[MessageModel]
    first_id: str
    last_id: str
    has_more: Literal[False] = False
