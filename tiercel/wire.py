"""Frames between the HTTP process and the engine process.

A frame is a little-endian uint32 length and that many bytes of MessagePack: a tagged struct. Token ids and
sequence ids travel as raw uint32 and uint64 bytes, because one step carries hundreds of them. No pickle.
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
    """The first frame: what to load."""

    settings: EngineSettings


class Submit(Struct, frozen=True, tag="submit"):
    """Run this request. It ends in exactly one `Finished`, also when it is aborted."""

    request: Request


class Abort(Struct, frozen=True, tag="abort"):
    """End these sequences now, in whatever state they are. Unknown ids are ignored (they just finished)."""

    seqs: tuple[SeqId, ...]
    reason: FinishReason = FinishReason.ABORT  # STOP when the HTTP process found a stop string


class SetTenants(Struct, frozen=True, tag="set_tenants"):
    """Who is served from now on. Follows `Ready`, and every change of the tenants; the newest stands alone."""

    tenants: Tenants


class SetSettings(Struct, frozen=True, tag="set_settings"):
    """What the operator decided while the engine runs: the fields that may change count, from the next step on."""

    version: int
    settings: EngineSettings


class Quit(Struct, frozen=True, tag="quit"):
    """Leave with exit code 0, at once or after persisting what lies in memory for so long."""

    patience_s: float = 0.0


# engine -> HTTP process


class Loading(Struct, frozen=True, tag="loading"):
    """A stage of the start, for `/ready` and the log."""

    stage: str


class Ready(Struct, frozen=True, tag="ready", kw_only=True):
    """The engine serves. Facts that only the engine could learn."""

    max_model_len: int  # tokens, prompt and outputs together
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
    """The engine cannot start. `message` is the line for the operator; the engine exits with code 2 after it."""

    code: str
    message: str


class Report(Struct, frozen=True, tag="report", kw_only=True):
    """What one committed step brought, for all sequences together.

    `seqs` (raw uint64) and `tokens` (raw uint32) run in parallel: one new token a sequence. A sequence that
    ends in this step has its last token here and its end in `finished`.
    """

    seqs: bytes = b""
    tokens: bytes = b""
    logprobs: tuple[TokenLogprobs, ...] = ()
    firsts: tuple[FirstToken, ...] = ()  # of the tokens: the first of their sequences
    finished: tuple[Finished, ...] = ()
    gauges: Gauges | None = None


ToEngine = Start | Submit | Abort | SetTenants | SetSettings | Quit
FromEngine = Loading | Ready | Failed | Report

M = TypeVar("M", ToEngine, FromEngine)

_encoder = msgspec.msgpack.Encoder()


def encode_frame(message: ToEngine | FromEngine) -> bytes:
    """One message as length and body.

    Errors: WireError when the body is over MAX_FRAME_BYTES.
    """
    body = _encoder.encode(message)
    if len(body) > MAX_FRAME_BYTES:
        raise WireError("wire.too_large", bytes=len(body), limit=MAX_FRAME_BYTES)
    return _LENGTH.pack(len(body)) + body


class FrameReader(Generic[M]):
    """Bytes in, whole messages out; keeps what is left of a cut frame."""

    def __init__(self, union: type[M]) -> None:
        self._decoder = msgspec.msgpack.Decoder(union)
        self._buffer = bytearray()

    def feed(self, chunk: bytes) -> list[M]:
        """Add bytes; return every message that is complete. Errors: WireError."""
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
