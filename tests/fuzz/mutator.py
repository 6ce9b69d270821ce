"""Mutations of bytes and of JSON documents, drawn from a seeded generator."""

import json
import random
from collections.abc import Callable, Sequence
from typing import cast

MAX_BYTES = 1 << 16  # of a mutated input
_TOKENS = (
    *(b"\0", b"\xff", b"\x00\x00\x00\x00", b"\xff\xff\xff\xff", b"\xff" * 8, b"\x7f" + b"\xff" * 7, b"\x80" * 8),
    *(
        b"{",
        b"}",
        b"[",
        b"]",
        b'"',
        b"\\",
        b":",
        b",",
        b"\n",
        b"\r\n",
        b"\r",
        b"\n\n",
        b"data: ",
        b"data:",
        b": ",
        b"#",
    ),
    *(b"null", b"true", b"NaN", b"Infinity", b"-1", b"1e999", b"9" * 30, b"\\u0000", b"\\ud800", b"\xed\xa0\x80"),
    *(b"&a", b"*a", b"!!python/object", b"---\n", b"[" * 2000, b'{"a":' * 500, b"a" * 5000, b"0" * 5000),
)
ODD_VALUES: tuple[object, ...] = (
    *(
        None,
        True,
        False,
        0,
        1,
        -1,
        2,
        0.5,
        -0.5,
        1e308,
        float("inf"),
        float("nan"),
        2**31,
        2**32,
        2**63,
        2**64,
        -(2**63),
    ),
    *(10**40, "", "x", "1", "-1", "nan", "x" * 5000, "../../etc/passwd", "/dev/zero", "\ud800", "\0", "ü🙂", "a\nb"),
    *([], {}, [None], [[]], [{}], {"a": None}, {"": ""}, [1, "a", None], list(range(500)), {"a": {"b": {"c": []}}}),
)


def mutate_bytes(rng: random.Random, text: bytes) -> bytes:
    """Return the bytes with one to eight changes: flipped, removed, repeated, replaced or inserted parts."""
    changed = bytearray(text)
    for _ in range(1 << rng.randrange(4)):
        at = rng.randrange(len(changed) + 1)
        length = min(1 << rng.randrange(9), len(changed) - at)
        match rng.randrange(7):
            case 0 if length:
                changed[at] ^= 1 << rng.randrange(8)
            case 1:
                del changed[at : at + length]
            case 2:
                changed[at:at] = changed[at : at + length] * rng.choice((1, 1, 2, 50))
            case 3:
                changed[at : at + length] = rng.randbytes(length)
            case 4:
                changed[at:at] = rng.choice(_TOKENS)
            case 5:
                changed[at : at + length] = rng.choice(_TOKENS)
            case _:
                del changed[at:]
    return bytes(changed[:MAX_BYTES])


def mutate_integer(rng: random.Random, text: bytes) -> bytes:
    """Return the bytes with one aligned integer replaced by a small, large or almost equal one."""
    width = rng.choice((1, 2, 4, 8))
    if len(text) < width:
        return text
    at = rng.randrange(len(text) // width) * width
    old = int.from_bytes(text[at : at + width], "little")
    top = 1 << 8 * width
    new = rng.choice((0, 1, old + 1, old - 1, old * 2, top - 1, top >> 1, (top >> 1) - 1, rng.randrange(top))) % top
    return text[:at] + new.to_bytes(width, "little") + text[at + width :]


def mutate_json(rng: random.Random, text: bytes) -> bytes:
    """Return a JSON document with one to four values or keys replaced, removed, added or moved.

    Bytes that are no JSON get a change of `mutate_bytes`.
    """
    try:
        value = cast(object, json.loads(text))
    except (ValueError, RecursionError):
        return mutate_bytes(rng, text)
    for _ in range(1 << rng.randrange(3)):
        value = _with_change(rng, value)
    return json.dumps(value, ensure_ascii=rng.random() < 0.5).encode("utf-8", "surrogatepass")


def mutator_of(*ways: Callable[[random.Random, bytes], bytes]) -> Callable[[random.Random, bytes], bytes]:
    """Return a mutation that chooses one of these ways each time."""
    return lambda rng, text: rng.choice(ways)(rng, text)


def _with_change(rng: random.Random, value: object) -> object:
    """Return the value with one change somewhere inside it."""
    if isinstance(value, dict) and value and rng.random() < 0.85:
        entries = dict(cast("dict[str, object]", value))
        key = rng.choice(list(entries))
        match rng.randrange(6):
            case 0:
                del entries[key]
            case 1:
                entries[str(rng.choice(ODD_VALUES))[:100]] = entries[key]
            case 2:
                entries[key] = _odd(rng)
            case _:
                entries[key] = _with_change(rng, entries[key])
        return entries
    if isinstance(value, list) and value and rng.random() < 0.85:
        items = list(cast("list[object]", value))
        at = rng.randrange(len(items))
        match rng.randrange(5):
            case 0:
                del items[at]
            case 1:
                items.insert(at, items[at])
            case 2:
                items[at] = _odd(rng)
            case _:
                items[at] = _with_change(rng, items[at])
        return items
    return _odd(rng)


def _odd(rng: random.Random) -> object:
    return rng.choice(ODD_VALUES)


def cut(rng: random.Random, text: bytes) -> Sequence[bytes]:
    """Return the bytes in pieces of random sizes."""
    pieces: list[bytes] = []
    while text:
        length = rng.randint(1, max(1, len(text)))
        pieces.append(text[:length])
        text = text[length:]
    return pieces
