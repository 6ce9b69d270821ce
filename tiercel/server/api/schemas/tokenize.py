"""The bodies of /tokenize and /detokenize."""

from pydantic import SkipValidation

from tiercel.server.api.schemas.chat import ChatTemplateFields
from tiercel.server.api.schemas.fields import Fields, Flag


class TokenizeTextFields(Fields):
    """The body of /tokenize for a text."""

    model: str | None = None
    prompt: str
    add_special_tokens: Flag = True
    return_token_strs: Flag | None = None


class TokenizeChatFields(ChatTemplateFields):
    """The body of /tokenize for a conversation."""

    model: str | None = None
    return_token_strs: Flag | None = None


class DetokenizeFields(Fields):
    """The body of /detokenize."""

    model: str | None = None
    tokens: SkipValidation[list[int]]  # checked by the route: the list can be long
