"""Checking a body against its schema. Checks that need the model are in `params` and `prompt`."""

from collections.abc import Mapping
from typing import Annotated, TypeVar, cast

import pydantic
from pydantic import BaseModel, ConfigDict, Field

from tiercel.errors import AdmissionError

MAX_MESSAGES = 2048
MAX_PARTS = 8192  # of the contents of all messages
MAX_STOPS = 4
MAX_LOGIT_BIAS = 300
MAX_STOP_TOKEN_IDS = 256

Finite = Annotated[float, Field(allow_inf_nan=False)]
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
        lines = [f"{_path(fault['loc'])}: {fault['msg']} ({fault['type']})" for fault in faults[:10]]
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


def _path(loc: tuple[int | str, ...]) -> str:
    """Return a field's name for people, without pydantic's names for the branches of a union."""
    parts = [str(part)[:64] for part in loc if isinstance(part, int) or part.replace("_", "").isalnum()]
    return ".".join(parts) or "body"
