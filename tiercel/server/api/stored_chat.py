"""Chat completions as they are stored: the body around the place of its metadata, and the messages of the request."""

from collections.abc import Iterator, Mapping, Sequence

import msgspec

from tiercel.server.api.object_store import StoredObject

_MESSAGE_BYTES = 64
"""Memory of a message beside its JSON."""
_ENTRY_BYTES = 256
"""Memory of one entry of the metadata beside its texts."""
_MAX_LETTER_BYTES = 4


def metadata_bytes(metadata: Mapping[str, str]) -> int:
    """Return the memory of metadata."""
    letters = sum(len(name) + len(value) for name, value in metadata.items())
    return letters * _MAX_LETTER_BYTES + _ENTRY_BYTES * len(metadata)


class StoredChat(StoredObject):
    """One chat completion. Until `is_over` there is no answer, and clients do not see it."""

    __slots__ = ("after", "before", "is_over", "messages", "metadata", "model")

    def __init__(
        self,
        id: str,
        model: str,
        metadata: Mapping[str, str],
        messages: Sequence[bytes],
        answer: tuple[bytes, bytes] | None = None,
    ) -> None:
        """`messages`: each as JSON. `answer`: the JSON of the body before and behind the value of `metadata`."""
        super().__init__(id)
        self.model = model
        self.metadata = metadata
        self.messages = tuple(messages)
        self.before, self.after = answer or (b"", b"")
        self.is_over = answer is not None

    @property
    def num_bytes(self) -> int:
        """Memory of the completion."""
        messages = sum(map(len, self.messages)) + _MESSAGE_BYTES * len(self.messages)
        answer = len(self.before) + len(self.after)
        return super().num_bytes + messages + answer + metadata_bytes(self.metadata)

    def body(self) -> Iterator[bytes]:
        """Yield the JSON of the completion, piece by piece."""
        yield self.before
        yield msgspec.json.encode(self.metadata)
        yield self.after

    def ended(self, before: bytes, after: bytes) -> "StoredChat":
        """Return this completion with its answer."""
        return StoredChat(self.id, self.model, self.metadata, self.messages, (before, after))

    def with_metadata(self, metadata: Mapping[str, str]) -> "StoredChat":
        """Return this completion, which is over, with other metadata."""
        return StoredChat(self.id, self.model, metadata, self.messages, (self.before, self.after))

    def message_id(self, index: int) -> str:
        """Return the id of a message."""
        return message_id(self.id, index)


def message_id(chat: str, index: int) -> str:
    """Return the id of a message of a completion."""
    return f"{chat}-{index}"
