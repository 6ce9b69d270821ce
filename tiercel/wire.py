"""Frames between the HTTP process and the engine process.

A frame is a little-endian uint32 length and a MessagePack body of that length: a tagged struct. Token ids and
sequence ids are sent as raw uint32 and uint64 bytes, because one step carries hundreds of them. Pickle is not used.
"""

import struct
from typing import Generic, TypeVar

import msgspec
from msgspec import Struct

from tiercel.errors import WireError
from tiercel.ids import SeqId
from tiercel.outcome import Finished, FinishReason, FirstToken, Gauges, TokenLogprobs
from tiercel.request import Request
from tiercel.settings import EngineSettings
from tiercel.tenant import Tenants

MAX_FRAME_BYTES = 256 * 1024 * 1024
_LENGTH = struct.Struct("<I")


# HTTP process -> engine


class Start(Struct, frozen=True, tag="start"):
    """The first frame: the settings to start with."""

    settings: EngineSettings


class Submit(Struct, frozen=True, tag="submit"):
    """Run a request. It ends in exactly one `Finished`, also if it is aborted."""

    request: Request


class Abort(Struct, frozen=True, tag="abort"):
    """End sequences now, in any state. Unknown ids are ignored: their sequences have just finished."""

    seqs: tuple[SeqId, ...]
    reason: FinishReason = FinishReason.ABORT  # STOP if the HTTP process found a stop string


class SetTenants(Struct, frozen=True, tag="set_tenants"):
    """Replace all tenants. Sent after `Ready` and at every change of the tenants; it replaces earlier ones."""

    tenants: Tenants


class SetSettings(Struct, frozen=True, tag="set_settings"):
    """Change the live settings from the next step on; the other fields are ignored."""

    version: int
    settings: EngineSettings


class Quit(Struct, frozen=True, tag="quit"):
    """Exit with code 0, after persisting blocks for at most `patience_s`."""

    patience_s: float = 0.0


# engine -> HTTP process


class Loading(Struct, frozen=True, tag="loading"):
    """A stage of the start has begun; for `/ready` and the log."""

    stage: str


class Ready(Struct, frozen=True, tag="ready", kw_only=True):
    """The engine serves. Carries the facts that only the engine knows."""

    max_model_len: int  # tokens of prompt and output together
    vocab_size: int  # logits width
    block_size: int  # tokens
    blocks_total: int  # device tier
    dtype: str
    device: str
    model_impl: str  # native | transformers
    weights_bytes: int
    kv_bytes: int
    load_s: float

    @property
    def block_bytes(self) -> int:
        """One block of all layers. The device tier has one more than it counts: the null block."""
        return self.kv_bytes // (self.blocks_total + 1)


class Failed(Struct, frozen=True, tag="failed"):
    """The engine cannot start and exits with code 2. `message` is the line for the operator."""

    code: str
    message: str


class Report(Struct, frozen=True, tag="report", kw_only=True):
    """The results of one committed step for all its sequences.

    `seqs` (raw uint64) and `tokens` (raw uint32) are parallel: one new token per sequence. The last token of a sequence
    that ends in this step is here, too; its end is in `finished`.
    """

    seqs: bytes = b""
    tokens: bytes = b""
    logprobs: tuple[TokenLogprobs, ...] = ()
    firsts: tuple[FirstToken, ...] = ()  # for sequences whose first token is among `tokens`
    finished: tuple[Finished, ...] = ()
    gauges: Gauges | None = None


ToEngine = Start | Submit | Abort | SetTenants | SetSettings | Quit
FromEngine = Loading | Ready | Failed | Report

M = TypeVar("M", ToEngine, FromEngine)

_encoder = msgspec.msgpack.Encoder()


def encode_frame(message: ToEngine | FromEngine) -> bytes:
    """Return a message as a frame.

    Errors: WireError if the body is longer than MAX_FRAME_BYTES.
    """
    body = _encoder.encode(message)
    if len(body) > MAX_FRAME_BYTES:
        raise WireError("wire.too_large", bytes=len(body), limit=MAX_FRAME_BYTES)
    return _LENGTH.pack(len(body)) + body


class FrameReader(Generic[M]):
    """Decoder of a stream of bytes into messages. It keeps the bytes of an incomplete frame."""

    def __init__(self, union: type[M]) -> None:
        self._decoder = msgspec.msgpack.Decoder(union)
        self._buffer = bytearray()

    def feed(self, chunk: bytes) -> list[M]:
        """Add bytes and return every complete message. Errors: WireError."""
        self._buffer += chunk
        messages: list[M] = []
        start = 0
        while len(self._buffer) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer, start)
            if length > MAX_FRAME_BYTES:
                raise WireError("wire.too_large", bytes=length, limit=MAX_FRAME_BYTES)
            body = start + _LENGTH.size
            if len(self._buffer) < body + length:
                break
            try:
                messages.append(self._decoder.decode(self._buffer[body : body + length]))
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
                raise WireError("wire.unreadable", reason=str(exc)) from exc
            start = body + length
        del self._buffer[:start]
        return messages
