"""The fields that truncate prompts, as in vLLM."""

from typing import Annotated, Literal

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from tiercel.server.api.schemas.fault_words import OWN
from tiercel.server.api.schemas.fields import Fields, Integer

INT64_MAX = 2**63 - 1


def _leaves_tokens(count: int) -> int:
    if count == 0:
        raise PydanticCustomError(OWN, "expected -1, or at least 1")
    return count


class TruncationFields(Fields):
    """The fields of bodies whose prompts may be truncated."""

    truncate_prompt_tokens: (
        Annotated[
            Integer,
            Field(ge=-1, le=INT64_MAX, json_schema_extra={"not": {"const": 0}}),
            AfterValidator(_leaves_tokens),
        ]
        | None
    ) = None
    truncation_side: Literal["left", "right"] | None = None
