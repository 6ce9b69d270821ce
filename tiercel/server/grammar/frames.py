"""The frames between the HTTP process and a process that checks grammars, in MessagePack."""

import msgspec
from msgspec import Struct

from tiercel.server.grammar.constraint import GrammarFormat
from tiercel.wire.encoding import encode_body


class GrammarSource(Struct, frozen=True):
    """The tokens that grammars are checked with: a tokenizer.json, and the width of the model's logits."""

    tokenizer: str  # path
    vocab_size: int


class TokenizerRead(Struct, frozen=True, tag="read"):
    """The answer to `GrammarSource`. `error` is "" if grammars can be checked."""

    error: str


class GrammarJob(Struct, frozen=True):
    """One grammar to check."""

    format: GrammarFormat
    text: str


class GrammarAccepted(Struct, frozen=True, tag="accepted"):
    """The answer for a grammar that the engine can compile and apply. `text` is an llguidance grammar.

    `approximated` names the keywords of the schema that the compiler follows only in part (see `PARTLY_ACTING`).
    """

    text: str
    approximated: tuple[str, ...] = ()


class GrammarRefused(Struct, frozen=True, tag="refused"):
    """The answer for a grammar that cannot be compiled, exceeds a limit, or that some output cannot end.

    `message` is in our own words. `keywords` are those of `PARTLY_ACTING` that are the cause, if any.
    """

    message: str
    keywords: tuple[str, ...] = ()


GrammarVerdict = GrammarAccepted | GrammarRefused

source_decoder = msgspec.msgpack.Decoder(GrammarSource)
read_decoder = msgspec.msgpack.Decoder(TokenizerRead)
job_decoder = msgspec.msgpack.Decoder(GrammarJob)
verdict_decoder = msgspec.msgpack.Decoder(GrammarVerdict)


def encode_frame(frame: GrammarSource | TokenizerRead | GrammarJob | GrammarVerdict) -> bytes:
    """Return the body of a frame. Errors: WireError for text that is no Unicode (lone surrogates)."""
    return encode_body(frame)
