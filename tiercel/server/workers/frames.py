"""The frames between the HTTP process and a worker process: a length, then a body that both encode themselves."""

import socket
import struct

_LENGTH = struct.Struct("<I")
_MAX_BYTES = 512 * 1024 * 1024
_CHUNK_BYTES = 1024 * 1024


def with_length(body: bytes) -> bytes:
    """Return a body as a frame."""
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
