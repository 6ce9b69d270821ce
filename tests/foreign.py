"""Numbers of foreign types (numpy scalars) that an object of ours holds, in any book below it."""

import types
from array import array
from collections import deque
from enum import Enum

import numpy as np

_LEAVES = (
    *(str, bytes, bytearray, memoryview, int, float, complex, array, np.ndarray, type, type(None), Enum),
    *(types.FunctionType, types.BuiltinFunctionType, types.ModuleType, types.GeneratorType, types.CodeType),
)


def foreign_numbers(root: object) -> list[str]:
    """Return where numpy scalars are held below `root`, as paths such as `.cache._pool.taken_runs: int64`.

    Looks into objects of ours and into collections, not into arrays, whose elements are foreign by design.
    """
    found: list[str] = []
    seen: set[int] = set()
    left: list[tuple[str, object]] = [("", root)]
    while left:
        path, value = left.pop()
        if isinstance(value, np.generic):
            found.append(f"{path}: {type(value).__name__}")
            continue
        if isinstance(value, _LEAVES) or id(value) in seen:
            continue
        seen.add(id(value))
        left += _parts(path, value)
    return sorted(found)


def _parts(path: str, value: object) -> list[tuple[str, object]]:
    """Return the values that an object holds, with their paths."""
    if isinstance(value, types.MethodType):
        return [(f"{path}.__self__", value.__self__)]
    parts: list[tuple[str, object]] = []
    if isinstance(value, dict):
        for key, held in list(value.items()):
            parts += [(f"{path}.key", key), (f"{path}[{key!r}]"[:200], held)]
    elif isinstance(value, list | tuple | set | frozenset | deque):
        parts += [(f"{path}[]", held) for held in value]
    if not type(value).__module__.startswith(("tiercel.", "tests.")):
        return parts
    if isinstance(attributes := getattr(value, "__dict__", None), dict):
        parts += [(f"{path}.{name}", held) for name, held in attributes.items()]
    for kind in type(value).__mro__:
        names = kind.__dict__.get("__slots__", ())
        for name in (names,) if isinstance(names, str) else names:
            if (held := getattr(value, name, None)) is not None:
                parts.append((f"{path}.{name}", held))
    return parts
