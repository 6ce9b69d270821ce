"""A hole in an encoded body, for a part that is encoded later, piece by piece."""

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar, cast

import msgspec

HOLE = b"\x00"
"""The bytes of a hole. JSON escapes them in texts, so they are nowhere else in a body."""

T = TypeVar("T")


def hole(_kind: type[T]) -> T:
    """Return a value that is encoded as a hole, in place of one of this type."""
    return cast(T, msgspec.Raw(HOLE))


def list_pieces(entries: Iterable[T], encodable: Callable[[T], object]) -> Iterator[bytes]:
    """Yield the JSON of a list, entry by entry."""
    yield b"["
    comma = b""
    for entry in entries:
        yield comma + msgspec.json.encode(encodable(entry))
        comma = b","
    yield b"]"
