"""Answers of the routes for operators."""

from typing import Literal

from msgspec import UNSET, Struct, UnsetType

from tiercel.server.http.failure import Fault

UnreadyStatus = Literal["loading", "restarting", "dead", "draining", "stalled"]


class HealthReply(Struct, frozen=True, kw_only=True):
    """Whether the engine serves and its steps end."""

    status: str  # ok, stalled, or the state of the engine
    stage: str | UnsetType = UNSET  # of loading
    silence_s: float | UnsetType = UNSET  # seconds of pending work without a report
    engines: dict[str, str] | UnsetType = UNSET  # of a front: the state of each engine by its address


class ReadyReply(Struct, frozen=True, kw_only=True):
    """Whether a new request would be served now."""

    status: Literal["ready"] | UnreadyStatus
    stage: str | UnsetType = UNSET
    error: Fault | UnsetType = UNSET


class VersionReply(Struct, frozen=True):
    """The version of tiercel."""

    version: str


class LoadReply(Struct, frozen=True):
    """The number of sequences that clients wait for."""

    server_load: int
