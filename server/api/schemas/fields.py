"""Checking a body against its schema. Checks that need the model are in `params` and `prompt`."""

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, TypeVar, cast

import pydantic
from pydantic import BaseModel, ConfigDict, Field, Strict
from pydantic_core import ErrorDetails

from tiercel.errors import AdmissionError

MAX_MESSAGES = 2048
MAX_PARTS = 8192  # of the contents of all messages
MAX_STOPS = 4
MAX_LOGIT_BIAS = 300
MAX_STOP_TOKEN_IDS = 256

# Types are strict, as in the OpenAI API: a text or a boolean is no number, and 1.0 is no integer.
Integer = Annotated[int, Strict()]
Finite = Annotated[float, Strict(), Field(allow_inf_nan=False)]
Flag = Annotated[bool, Strict()]
Word = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]


class Fields(BaseModel):
    """The fields of a body. Unknown fields are ignored; `unsupported` has refused those that would change the output.

    None means that the client left the field out.
    """

    model_config = ConfigDict(extra="ignore", frozen=True)


F = TypeVar("F", bound=Fields)


def read_fields(schema: type[F], body: Mapping[str, object]) -> F:
    """Check a body against a schema.

    Errors: AdmissionError (400) with at most ten faults in its message and never the client's values.
    """
    _refuse_crowded(body)
    try:
        return schema.model_validate(body)
    except pydantic.ValidationError as exc:
        faults = exc.errors(include_url=False, include_context=False, include_input=False)
        lines = [f"{path}: {text}" for path, text in _described(faults)[:10]]
        param = str(faults[0]["loc"][0]) if faults and faults[0]["loc"] else None
        raise AdmissionError(400, "; ".join(lines), code="invalid_value", param=param) from exc


_MAX_ENTRIES = {
    "messages": MAX_MESSAGES,
    "logit_bias": MAX_LOGIT_BIAS,
    "stop": MAX_STOPS,
    "stop_token_ids": MAX_STOP_TOKEN_IDS,
}


def _refuse_crowded(body: Mapping[str, object]) -> None:
    """Check lengths before the schema, which would validate every entry, those beyond the limit included."""
    for name, limit in _MAX_ENTRIES.items():
        value = body.get(name)
        if isinstance(value, list | dict) and len(cast(list[object], value)) > limit:
            raise AdmissionError(400, f"{name}: at most {limit} entries (too_long)", param=name)
    messages = body.get("messages")
    if isinstance(messages, list) and sum(map(_num_parts, cast(list[object], messages))) > MAX_PARTS:
        raise AdmissionError(400, f"messages: at most {MAX_PARTS} content parts (too_long)", param="messages")


def _num_parts(message: object) -> int:
    content = cast(dict[str, object], message).get("content") if isinstance(message, dict) else None
    return len(cast(list[object], content)) if isinstance(content, list) else 0


_BRANCH = re.compile(r"(constrained-)?str|list\[.*\]")  # pydantic's names for the branches of a union
_NO_TEXT, _NO_LIST = "string_type", "list_type"
_MESSAGES = {
    "model_type": "Input should be an object",
    "dict_type": "Input should be an object",
}


def _described(faults: Sequence[ErrorDetails]) -> list[tuple[str, str]]:
    """Return the path and the description of each fault. Of a union, only the branch of the value's type counts."""
    branches_by_place: dict[tuple[int | str, ...], dict[str, bool]] = {}  # branch -> whether the value is of its type
    for fault in faults:
        place, branch, is_type = _split(fault)
        if branch is not None:
            branches = branches_by_place.setdefault(place, {})
            branches[branch] = branches.get(branch, True) and not is_type
    described: dict[tuple[str, str], None] = {}
    for fault in faults:
        place, branch, _ = _split(fault)
        text = f"{_MESSAGES.get(fault['type'], fault['msg'])} ({fault['type']})"
        if branch is not None and not branches_by_place[place][branch]:
            if any(branches_by_place[place].values()):
                continue
            text = "Input should be a string or a list (type)"
        described[_path(fault["loc"]), text] = None
    return list(described)


def _split(fault: ErrorDetails) -> tuple[tuple[int | str, ...], str | None, bool]:
    """Return the place of a union, its branch, and whether the fault is that the value is not of the branch's type."""
    loc = fault["loc"]
    for index, part in enumerate(loc):
        if index and isinstance(part, str) and _BRANCH.fullmatch(part):
            return loc[:index], part, index == len(loc) - 1 and fault["type"] in (_NO_TEXT, _NO_LIST)
    return loc, None, False


def _path(loc: tuple[int | str, ...]) -> str:
    """Return a field's name for people, without the names of branches."""
    parts = [
        str(part)[:64]
        for part in loc
        if isinstance(part, int) or (not _BRANCH.fullmatch(part) and part.replace("_", "").isalnum())
    ]
    return ".".join(parts) or "body"
