"""Sizes and lengths: powers of 1024, and how people write them."""

import re

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB

_LENGTH = re.compile(r"(\d+(?:\.\d+)?)\s*([kKmM]?)")
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([kKmMgGtT])(?:[iI]?[bB])?)?")
_POWER_BY_LETTER = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def parse_length(text: str) -> int:
    """Return the token count in a text as vLLM reads it: `4096`, `8k` (8,000), `8K` (8,192).

    Errors: ValueError if the text is not a token count.
    """
    match = _LENGTH.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"not a length: {text!r} (write 4096, 8k or 8K)")
    number, letter = match.groups()
    base = 1024 if letter.isupper() else 1000
    return int(float(number) * base ** _POWER_BY_LETTER[letter.lower()])


def parse_bytes(text: str) -> int:
    """Return the bytes in a text such as `512M` or `2GiB`, in powers of 1024; a number without a unit is bytes.

    Errors: ValueError if the text is not a size.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"not a size: {text!r} (write 1073741824, 512M or 2GiB)")
    number, letter = match.groups()
    return int(float(number) * 1024 ** _POWER_BY_LETTER[(letter or "").lower()])


def write_bytes(count: int) -> str:
    """Return a size in the shortest exact form that `parse_bytes` reads: `4G`, `1500`."""
    for letter, unit in (("G", GIB), ("M", MIB), ("K", KIB)):
        if count and count % unit == 0:
            return f"{count // unit}{letter}"
    return f"{count}"


def show_bytes(count: int) -> str:
    """Return a size for people: `3.7 MiB`."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.1f} {unit}" if unit != "B" else f"{count} B"
        size /= 1024
    return f"{size:.1f} TiB"
