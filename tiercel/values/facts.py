"""Facts by name: fingerprints, keys of blocks, and the identities of memory, volumes and measurements follow from them.

A name is written down where the fact is stated. It does not follow from an attribute or a class, so that renaming one
of them in the code changes nothing that was stored, and nothing that two processes must agree on.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import TypeAlias

Fact: TypeAlias = "str | int | float | bool | Sequence[Fact] | Facts | None"
Facts: TypeAlias = Mapping[str, Fact]


def canonical(facts: Facts) -> bytes:
    """Return facts as bytes: JSON without spaces, in the order of the names.

    Errors: TypeError for a value that is no fact, such as an object with attributes; ValueError for one that is no
            number.
    """
    return json.dumps(facts, sort_keys=True, allow_nan=False, separators=(",", ":")).encode()


def identity_of_facts(facts: Facts) -> bytes:
    """Return 32 bytes that change with any of the facts. Errors: as `canonical`."""
    return hashlib.sha256(canonical(facts)).digest()
