"""The fields that all chunks and bodies of one answer share."""

from msgspec import Struct


class ReplyHead(Struct, frozen=True, kw_only=True):
    """The fields that are the same in every chunk and body of one client request."""

    id: str
    created: int
    model: str
    with_logprobs: bool
    with_details: bool
    role: str
