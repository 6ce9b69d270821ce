"""Answers of /v1/models."""

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
