"""Messages made from their types alone: every field of every struct filled, and one of them replaced."""

from collections.abc import Hashable, Iterator
from functools import cache
from typing import Any

import msgspec
from msgspec import inspect

from tiercel.values.request import SamplingParams

Path = tuple[str | int, ...]
"""From a message to one of its values: names of fields, `[]` for an element, `key` and `value`, numbers of variants."""

_PLAIN: dict[type, object] = {
    inspect.IntType: 3, inspect.FloatType: 2.5, inspect.BoolType: True, inspect.StrType: "text",
    inspect.BytesType: b"12345678",
}  # fmt: skip


class Scalar(msgspec.Struct, frozen=True):
    """A place of a message that holds a number, a text or bytes."""

    path: Path
    kind: type  # int | float | bool | str | bytes


def message_types(union: Any) -> tuple[type[msgspec.Struct], ...]:  # Any: a union is no type
    """Return the structs of a union of messages."""
    return getattr(union, "__args__", (union,))


def scalars_of(message: type[msgspec.Struct]) -> list[Scalar]:
    """Return every place for a scalar in messages of this type, in collections and in all variants of unions too."""
    return list(_scalars((), _info(message)))


@cache
def _info(message: type[msgspec.Struct]) -> Any:  # Any: a class of msgspec.inspect
    return inspect.type_info(message)


def _scalars(path: Path, info: Any) -> Iterator[Scalar]:  # Any: the classes of msgspec.inspect, as they come
    match info:
        case inspect.StructType():
            for field in info.fields:
                yield from _scalars((*path, field.name), field.type)
        case inspect.UnionType():
            for number, variant in enumerate(info.types):
                yield from _scalars((*path, number), variant)
        case inspect.DictType():
            yield from _scalars((*path, "key"), info.key_type)
            yield from _scalars((*path, "value"), info.value_type)
        case inspect.ListType() | inspect.VarTupleType() | inspect.SetType() | inspect.FrozenSetType():
            yield from _scalars((*path, "[]"), info.item_type)
        case inspect.TupleType():
            for number, item in enumerate(info.item_types):
                yield from _scalars((*path, number), item)
        case inspect.LiteralType():
            yield Scalar(path, type(info.values[0]))
        case inspect.EnumType() | inspect.NoneType() | inspect.AnyType() | inspect.CustomType():
            pass
        case _:
            yield Scalar(path, type(_PLAIN[type(info)]))


def make(message: type[msgspec.Struct], at: Path | None = None, value: object = None) -> Any:  # Any: a message
    """Return a message with every field filled; with `at`, `value` stands at that place."""
    return _make(_info(message), at, value)


@cache
def _whole(kind: type[msgspec.Struct]) -> Any:  # Any: an instance of `kind`
    return _make(_info(kind), ("",), None)  # a place that no struct has


def _make(info: Any, at: Path | None, value: object) -> Any:
    """Return a value of a type. `at` is None outside the way to the replaced place, and empty at it."""
    if at == ():
        return value

    def part(name: str | int, inner: Any) -> Any:
        return _make(inner, at[1:] if at and at[0] == name else None, value)

    match info:
        case inspect.StructType() if at is None:
            return _whole(info.cls)
        case inspect.StructType():
            fields = {field.name: part(field.name, field.type) for field in info.fields}
            if info.cls is SamplingParams:  # with pooling there are no outputs, and without it no pooling
                is_pooled = bool(at) and at[0] == "pooling"
                fields |= {"max_tokens": 0, "prompt_logprobs": None} if is_pooled else {"pooling": None}
            return info.cls(**fields)
        case inspect.UnionType():
            number = at[0] if at else 0
            return part(number, info.types[number])
        case inspect.DictType():
            return {part("key", info.key_type): part("value", info.value_type)}
        case inspect.ListType():
            return [part("[]", info.item_type)]
        case inspect.VarTupleType():
            return (part("[]", info.item_type),)
        case inspect.SetType() | inspect.FrozenSetType():
            item = part("[]", info.item_type)
            return {item} if isinstance(item, Hashable) else [item]  # an array is in no set
        case inspect.TupleType():
            return tuple(part(number, item) for number, item in enumerate(info.item_types))
        case inspect.LiteralType():
            return info.values[0]
        case inspect.EnumType():
            return next(iter(info.cls))
        case inspect.NoneType() | inspect.AnyType() | inspect.CustomType():
            return None
        case _:
            return _PLAIN[type(info)]
