"""The bodies of /v1/conversations."""

from typing import Annotated

from pydantic import Field, SkipValidation

from tiercel.server.api.schemas.fields import Fields, Metadata

MAX_ITEMS = 20
"""Maximum number of items that a request adds, as in OpenAI's API."""

Items = SkipValidation[list[dict[str, object]]]  # checked by `read_items`
_ITEMS = "Up to 20 items as in `input` of /v1/responses: `message`, `function_call`, `function_call_output`, ..."


class ConversationFields(Fields):
    """The body of POST /v1/conversations."""

    items: Annotated[Items | None, Field(description=_ITEMS)] = None
    metadata: Annotated[Metadata | None, Field(description="Stored and returned.")] = None


class ConversationUpdateFields(Fields):
    """The body of POST /v1/conversations/{id}."""

    metadata: Annotated[
        Metadata | None, Field(description="The metadata in place of those before; null stands for none.")
    ]


class ConversationItemsFields(Fields):
    """The body of POST /v1/conversations/{id}/items."""

    items: Annotated[Items, Field(description=_ITEMS)]
