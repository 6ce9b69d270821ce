"""The encoding of everything that crosses a process: MessagePack of the declared types, whatever computed the values.

Books count with numpy, devices answer with tensors and templates with strings of their own class. An expression such as
`runs - (slots[0] == 5)` turns a plain integer into a numpy scalar for ever, and no type checker sees it. MessagePack
knows none of these types, so `encode_body` makes plain values of them here, and nowhere else.
"""

import numbers

import msgspec
from msgspec import Struct

from tiercel.values.errors import WireError

# A number beyond 64 bits, nesting without end, and lone surrogates.
_UNSENDABLE = (OverflowError, RecursionError, UnicodeEncodeError)


def plain_value(value: object) -> object:
    """Return the number, text or bytes that an object of a foreign type stands for: an `enc_hook` of msgspec.

    Numpy scalars of all kinds, tensors and arrays without dimensions, fractions, and subclasses of int, float, str and
    bytes are taken. The value decides what becomes of it, not the field: a foreign bool becomes a bool.
    Errors: TypeError for anything else.
    """
    match value:
        case numbers.Integral():
            return int(value)
        case numbers.Real():
            return float(value)
        case str():
            return str.__str__(value)
        case bytes():
            return bytes(value)
        case _:
            pass
    item = getattr(value, "item", None)  # of numpy's bool, which is registered as no number, and of tensors
    if item is not None and getattr(value, "shape", None) == ():
        plain = item()
        if type(plain) in (bool, int, float):
            return plain
    raise TypeError(f"a value of type {type(value).__module__}.{type(value).__qualname__} cannot be sent")


def encode_body(message: Struct) -> bytes:
    """Return a message as the body of a frame. A peer that decodes it by its type can read every body.

    Cost:   that of msgspec alone. Only a message that holds a value of a foreign type is encoded a second time, and
            decoded once, so that a wrong field is found here and not by the peer.
    Errors: WireError if a value cannot be sent, with the type or the field; also for text that is no Unicode (lone
            surrogates).
    """
    try:
        return _encoder.encode(message)
    except TypeError:
        pass
    except _UNSENDABLE as exc:
        raise _unsendable(message, exc) from exc
    try:
        body = _foreign_encoder.encode(message)
        msgspec.msgpack.decode(body, type=type(message))
    except (TypeError, msgspec.MsgspecError, *_UNSENDABLE) as exc:
        raise _unsendable(message, exc) from exc
    return body


def _unsendable(message: Struct, error: Exception) -> WireError:
    return WireError("wire.unsendable", f"{type(message).__name__} cannot be sent: {error}")


_encoder = msgspec.msgpack.Encoder()
_foreign_encoder = msgspec.msgpack.Encoder(enc_hook=plain_value)
