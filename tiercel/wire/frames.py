"""The frames that the HTTP process and the engine process exchange.

A frame is a little-endian uint32 length and a MessagePack body of that length, which encodes a tagged struct. Token
ids and sequence ids are raw uint32 and uint64 bytes, because a step has hundreds of them. Pickle is not used.
"""

import struct
from typing import Generic, TypeVar

import msgspec
from msgspec import Struct

from tiercel.settings.settings import EngineSettings
from tiercel.values.errors import WireError
from tiercel.values.ids import SeqId, TenantId
from tiercel.values.outcome import Finished, FinishReason, FirstToken, Gauges, Pooled, PromptReading, TokenLogprobs
from tiercel.values.rates import EngineSpeed
from tiercel.values.request import Request
from tiercel.values.tenant import Tenants
from tiercel.wire.encoding import encode_body

MAX_FRAME_BYTES = 256 * 1024 * 1024
_LENGTH = struct.Struct("<I")


# HTTP process -> engine


class Start(Struct, frozen=True, tag="start"):
    """Start with these settings. This is the first frame."""

    settings: EngineSettings
    tells_news: bool = False  # the engine is to send `EngineNews`, because fronts choose among engines


class Submit(Struct, frozen=True, tag="submit"):
    """Run a request. The engine reports exactly one `Finished` for it, also after an abort."""

    request: Request


class Abort(Struct, frozen=True, tag="abort"):
    """End sequences in any state. Unknown ids are ignored, because their sequences may have just finished."""

    seqs: tuple[SeqId, ...]
    reason: FinishReason = FinishReason.ABORT  # STOP if the HTTP process found a stop string
    if_queued: bool = False  # end them only if none of them has been admitted or has ended


class SetTenants(Struct, frozen=True, tag="set_tenants"):
    """Replace the tenants. Sent after `Ready` and after every change."""

    tenants: Tenants


class SetWeights(Struct, frozen=True, tag="set_weights"):
    """Use these weights for some tenants until the next `SetTenants`. Sent by fronts that balance several engines."""

    weights: dict[TenantId, float]


class SetSettings(Struct, frozen=True, tag="set_settings"):
    """Apply the live settings from the next step on. Other fields are ignored."""

    version: int
    settings: EngineSettings


class ReleaseDisk(Struct, frozen=True, tag="release_disk"):
    """Give up the SSD tier for good and close these inherited descriptors, which lock its folders. Serve on without it.

    The engine answers with `DiskReleased`.
    """

    lock_fds: tuple[int, ...] = ()


class Quit(Struct, frozen=True, tag="quit"):
    """Exit with code 0 after persisting blocks for up to `patience_s`."""

    patience_s: float = 0.0


# engine -> HTTP process


class Loading(Struct, frozen=True, tag="loading"):
    """The stage of the start that has begun, for `/ready` and the log."""

    stage: str


class Ready(Struct, frozen=True, tag="ready", kw_only=True):
    """The engine is ready. The fields are known only after loading the model.

    `has_grammars`: whether requests may have a grammar (`SamplingParams.grammar`). Without a readable tokenizer.json in
    the model's folder they may not, and the HTTP process refuses them; the engine would fail them one by one.
    """

    max_model_len: int  # tokens of prompt and output together
    vocab_size: int  # logits width
    block_size: int  # tokens
    blocks_total: int  # device tier
    dtype: str  # of weights; also of activations and KV where they differ
    kv_dtype: str
    device: str
    model_impl: str  # native | transformers
    weights_bytes: int
    kv_bytes: int
    load_s: float
    has_grammars: bool = True
    fingerprint: str = ""  # changes with the weights, the types of their numbers and the kernels, and with nothing else

    key_space: bytes = b""  # from which block keys are derived: the `fingerprint` of `block_key.namespace_key`
    speed: EngineSpeed = EngineSpeed()

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of all layers. `kv_bytes` includes the null block, `blocks_total` does not."""
        return self.kv_bytes // (self.blocks_total + 1)


class Failed(Struct, frozen=True, tag="failed"):
    """The engine cannot start and exits with code 2. `message` is printed for the operator."""

    code: str
    message: str


class DiskReleased(Struct, frozen=True, tag="disk_released"):
    """The answer to `ReleaseDisk`. False: a call to the disk hangs, and the volume stays open until the engine ends."""

    is_released: bool


class Report(Struct, frozen=True, tag="report", kw_only=True):
    """The results of one committed step.

    Results of prompts come before it in reports of their own, in portions.

    `seqs` (raw uint64) and `tokens` (raw uint32) are parallel: one new token per sequence. They include the last token
    of a sequence that is in `finished`.
    """

    seqs: bytes = b""
    tokens: bytes = b""
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompts: tuple[PromptReading, ...] = ()
    pooled: tuple[Pooled, ...] = ()
    firsts: tuple[FirstToken, ...] = ()  # for sequences whose first token is among `tokens`
    finished: tuple[Finished, ...] = ()
    gauges: Gauges | None = None


class EngineNews(Struct, frozen=True, tag="news", kw_only=True):
    """The facts by which fronts choose among engines, as far as they have changed since the last news.

    The first news has every key. A host sends a front that joins later all keys that the engine holds.
    """

    stored: bytes = b""  # raw uint64: heads of announced block keys, see `tiercel.values.block_key`
    dropped: bytes = b""
    served_ms: dict[TenantId, float] = {}  # service of tenants since the last news; a correction may be negative


ToEngine = Start | Submit | Abort | SetTenants | SetWeights | SetSettings | ReleaseDisk | Quit
FromEngine = Loading | Ready | Failed | DiskReleased | Report | EngineNews

M = TypeVar("M", ToEngine, FromEngine)


def encode_frame(message: ToEngine | FromEngine) -> bytes:
    """Return a message as a frame.

    Errors: WireError if a value cannot be sent, or if the body is longer than MAX_FRAME_BYTES.
    """
    return _framed(encode_body(message))


def _framed(body: bytes) -> bytes:
    if len(body) > MAX_FRAME_BYTES:
        raise WireError("wire.too_large", bytes=len(body), limit=MAX_FRAME_BYTES)
    return _LENGTH.pack(len(body)) + body


class _ReportGauges(Struct, frozen=True, tag="report"):
    """A report of which only the gauges are decoded."""

    gauges: Gauges | None = None


_gauges_decoder = msgspec.msgpack.Decoder(_ReportGauges)


def encode_report(report: Report) -> bytes:
    """Return a report as a frame whose gauges the peer can decode.

    Gauges come from all books of the engine, are sent with every step, and no client waits for them. So they are
    decoded once before they are sent: a value that MessagePack knows but the field does not have, such as a bool for a
    number, would otherwise end the connection at the peer.
    Cost:   about 1 us; 25 us for gauges of all tiers, tenants and sequences, which come every 0.25 s.
    Errors: as `encode_frame`; WireError if a gauge has not the type of its field.
    """
    body = encode_body(report)
    try:
        _gauges_decoder.decode(body)
    except msgspec.MsgspecError as exc:
        raise WireError("wire.unsendable", f"Report cannot be sent: {exc}") from exc
    return _framed(body)


class FrameReader(Generic[M]):
    """Decodes a stream of bytes into messages. Bytes of an incomplete frame are kept for the next call."""

    def __init__(self, union: type[M]) -> None:
        self._decoder = msgspec.msgpack.Decoder(union)
        self._buffer = bytearray()

    def feed(self, chunk: bytes) -> list[M]:
        """Return the messages completed by `chunk`. Errors: WireError."""
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
