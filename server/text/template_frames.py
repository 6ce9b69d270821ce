"""The frames between the HTTP process and a process that renders chat templates: a length, then MessagePack."""

import socket
import struct

import msgspec
from msgspec import Struct

_LENGTH = struct.Struct("<I")
_MAX_BYTES = 512 * 1024 * 1024
_CHUNK_BYTES = 1024 * 1024


class ChatMessage(Struct, frozen=True):
    """One message as a template gets it."""

    role: str
    content: str
    name: str | None = None


class TemplateSource(Struct, frozen=True, tag="source"):
    """The template to compile, and the texts of its special tokens by name (`bos_token`, ...)."""

    text: str
    specials: dict[str, str]


class RenderJob(Struct, frozen=True, tag="render"):
    """One rendering."""

    messages: list[ChatMessage]
    switches: dict[str, bool]
    add_generation_prompt: bool
    max_letters: int  # of the result


class Compiled(Struct, frozen=True, tag="compiled"):
    """The answer to `TemplateSource`: the names that the template reads."""

    variables: list[str]


class Rendered(Struct, frozen=True, tag="rendered"):
    """The answer to `RenderJob`."""

    text: str


class TemplateFailure(Struct, frozen=True, tag="failure"):
    """The answer instead of one of the others. `code` is that of the error that the client or the operator sees."""

    message: str
    code: str


ToWorker = TemplateSource | RenderJob
FromWorker = Compiled | Rendered | TemplateFailure

_encoder = msgspec.msgpack.Encoder()
to_worker_decoder = msgspec.msgpack.Decoder(ToWorker)
from_worker_decoder = msgspec.msgpack.Decoder(FromWorker)


def encode_frame(frame: ToWorker | FromWorker) -> bytes:
    """Return a frame with its length. Errors: UnicodeEncodeError for text that is no Unicode (lone surrogates)."""
    body = _encoder.encode(frame)
    return _LENGTH.pack(len(body)) + body


def read_frame(sock: socket.socket) -> bytearray:
    """Read the body of a frame. Errors: EOFError at the end of the socket, OSError (TimeoutError as the socket's)."""
    (length,) = _LENGTH.unpack(_read(sock, _LENGTH.size))
    if length > _MAX_BYTES:
        raise EOFError(f"a frame of {length} bytes")
    return _read(sock, length)


def _read(sock: socket.socket, num_bytes: int) -> bytearray:
    found = bytearray()
    while len(found) < num_bytes:
        part = sock.recv(min(num_bytes - len(found), _CHUNK_BYTES))
        if not part:
            raise EOFError
        found += part
    return found
