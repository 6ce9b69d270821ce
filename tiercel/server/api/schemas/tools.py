"""The fields that describe functions and their calls."""

from typing import Annotated, Literal

from pydantic import Field

from tiercel.server.api.schemas.fields import Fields, Flag, Word

MAX_TOOLS = 128
MAX_CALLS = 128  # of one message
MAX_TOOLS_LETTERS = 256 * 1024  # of all tools as JSON
MAX_ARGUMENTS_LETTERS = 1024 * 1024  # of one call in a message
MAX_ID_LETTERS = 256


class FunctionFields(Fields):
    """A function that the model may call."""

    name: Word
    description: str | None = None
    parameters: Annotated[
        dict[str, object] | None, Field(description="JSON Schema of the arguments. Without one: any object.")
    ] = None
    strict: Annotated[Flag | None, Field(description="Constrain the arguments of a call to the schema.")] = None


class ToolFields(Fields):
    """A tool: a function."""

    type: Literal["function"]
    function: FunctionFields


class CalledFunctionFields(Fields):
    """The function of a call."""

    name: Annotated[str, Field(min_length=1, max_length=MAX_ID_LETTERS)]
    arguments: Annotated[object, Field(description="A JSON object, or its text.")] = ""


class CallFields(Fields):
    """A call in a message of the assistant."""

    id: Annotated[str, Field(max_length=MAX_ID_LETTERS)] = ""
    type: Literal["function"] = "function"
    function: CalledFunctionFields
