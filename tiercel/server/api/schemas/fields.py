"""Checking a body against its schema. Checks that need the model are in `params` and `prompt`."""

import re
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Annotated, TypeVar, cast

import pydantic
from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, Strict
from pydantic_core import ErrorDetails

from tiercel.server.api.schemas.fault_words import fault_words
from tiercel.server.api.schemas.unsupported import is_harmless
from tiercel.values.errors import AdmissionError

MAX_MESSAGES = 2048
MAX_PARTS = 8192  # of the contents of all messages
MAX_STOPS = 4
MAX_LOGIT_BIAS = 300
MAX_STOP_TOKEN_IDS = 256
MAX_BAD_WORDS = 128
MAX_ALLOWED_TOKEN_IDS = 8192
MAX_METADATA = 16
_MAX_IGNORED = 16  # names in the header of an answer
_MAX_NAME = 64
_NO_NAME = re.compile(r"[^A-Za-z0-9_.-]")

# Types are strict, as in the OpenAI API: a text or a boolean is no number, and 1.0 is no integer.
Integer = Annotated[int, Strict()]
Finite = Annotated[float, Strict(), Field(allow_inf_nan=False)]
Flag = Annotated[bool, Strict()]
Word = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
MetadataName = Annotated[str, Field(max_length=64)]
MetadataValue = Annotated[str, Field(max_length=512)]
Metadata = Annotated[dict[MetadataName, MetadataValue], Field(max_length=MAX_METADATA)]


class Fields(BaseModel):
    """The fields of a body. Unknown fields are ignored; `unsupported` has refused those that would change the output.

    None means that the client left the field out.
    """

    model_config = ConfigDict(extra="ignore", frozen=True)
    _ignored: tuple[str, ...] = PrivateAttr(default=())

    @property
    def ignored_names(self) -> tuple[str, ...]:
        """The names of the unknown fields of the body, at most 16; letters outside of names are replaced."""
        return self._ignored

    def take_ignored(self, other: "Fields") -> None:
        """Take over the unknown fields of the body that `other` was read from."""
        self._ignored = other.ignored_names

    def add_ignored(self, name: str) -> None:
        """Note that a known field has no effect in this request."""
        self._ignored = (*self._ignored, name)

    def note_ignored(self, body: Mapping[str, object]) -> None:
        """Note which fields of the body are unknown."""
        known = type(self).model_fields
        names = (name for name, value in body.items() if name not in known and not is_harmless(name, value))
        self._ignored = tuple(_NO_NAME.sub("?", name[:_MAX_NAME]) for name in islice(names, _MAX_IGNORED))


F = TypeVar("F", bound=Fields)


def read_fields(schema: type[F], body: Mapping[str, object]) -> F:
    """Check a body against a schema.

    Errors: AdmissionError (400) with at most ten faults in its message and never the client's values.
    """
    _refuse_crowded(body)
    try:
        fields = schema.model_validate(body)
        fields.note_ignored(body)
        return fields
    except pydantic.ValidationError as exc:
        faults = exc.errors(include_url=False, include_input=False)
        lines = [f"{path}: {text}" for path, text in _described(faults)[:10]]
        param = str(faults[0]["loc"][0]) if faults and faults[0]["loc"] else None
        raise AdmissionError(400, "; ".join(lines), code="invalid_value", param=param) from exc


_MAX_ENTRIES = {
    "messages": MAX_MESSAGES,
    "logit_bias": MAX_LOGIT_BIAS,
    "stop": MAX_STOPS,
    "stop_token_ids": MAX_STOP_TOKEN_IDS,
    "bad_words": MAX_BAD_WORDS,
    "allowed_token_ids": MAX_ALLOWED_TOKEN_IDS,
    "metadata": MAX_METADATA,
    "tools": 128,  # MAX_TOOLS
}


def _refuse_crowded(body: Mapping[str, object]) -> None:
    """Check lengths before the schema, which would validate every entry, those beyond the limit included."""
    for name, limit in _MAX_ENTRIES.items():
        value = body.get(name)
        if isinstance(value, list | dict) and len(cast(list[object], value)) > limit:
            raise AdmissionError(400, f"{name}: expected at most {limit} entries", param=name)
    messages = body.get("messages")
    if isinstance(messages, list) and sum(map(_num_parts, cast(list[object], messages))) > MAX_PARTS:
        raise AdmissionError(400, f"messages: expected at most {MAX_PARTS} content parts", param="messages")


def _num_parts(message: object) -> int:
    fields = cast(dict[str, object], message) if isinstance(message, dict) else {}
    lists = (fields.get("content"), fields.get("tool_calls"))
    return sum(len(cast(list[object], one)) for one in lists if isinstance(one, list))


_BRANCH = re.compile(r"(constrained-)?str|(list|dict)\[.*\]")  # pydantic's names for the branches of a union
_NO_TYPE = ("string_type", "list_type", "dict_type")


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
        text = fault_words(fault["type"], fault.get("ctx", {}), fault["msg"])
        if branch is not None and not branches_by_place[place][branch]:
            if any(branches_by_place[place].values()):
                continue
            other = "an object" if any(name.startswith("dict") for name in branches_by_place[place]) else "a list"
            text = f"expected a string or {other}"
        described[_path(fault["loc"]), text] = None
    return list(described)


def _split(fault: ErrorDetails) -> tuple[tuple[int | str, ...], str | None, bool]:
    """Return the place of a union, its branch, and whether the fault is that the value is not of the branch's type."""
    loc = fault["loc"]
    for index, part in enumerate(loc):
        if index and isinstance(part, str) and _BRANCH.fullmatch(part):
            return loc[:index], part, index == len(loc) - 1 and fault["type"] in _NO_TYPE
    return loc, None, False


def _path(loc: tuple[int | str, ...]) -> str:
    """Return a field's name for people, without the names of branches."""
    parts = [
        str(part)[:64]
        for part in loc
        if isinstance(part, int) or (not _BRANCH.fullmatch(part) and part.replace("_", "").isalnum())
    ]
    return ".".join(parts) or "body"
