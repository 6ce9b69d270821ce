"""The frames between the HTTP process and a process that renders chat templates, in MessagePack."""

import msgspec
from msgspec import Struct

from tiercel.wire.encoding import encode_body


class ChatMessage(Struct, frozen=True):
    """One message as a template gets it.

    `tool_calls` is a JSON list of calls in OpenAI's shape, whose arguments are objects; "" if there are none.
    """

    role: str
    content: str
    name: str | None = None
    tool_calls: str = ""
    tool_call_id: str | None = None
    thoughts: str | None = None  # of an earlier answer: `reasoning_content`
    place: str = "messages"  # of the message in the request, for errors
    sent_role: str = ""  # the role in the request, for errors; "" = the same

    @property
    def letters(self) -> int:
        """Number of characters."""
        others = (self.name, self.tool_calls, self.tool_call_id, self.thoughts)
        return len(self.content) + sum(len(text) for text in others if text)


class TemplateSource(Struct, frozen=True):
    """The template to compile, and the texts of its special tokens by name (`bos_token`, ...)."""

    text: str
    specials: dict[str, str]
    tool_text: str | None = None  # of the template that renders conversations with tools; None: the same


class RenderJob(Struct, frozen=True):
    """One rendering."""

    messages: list[ChatMessage]
    switches: dict[str, bool | str]
    add_generation_prompt: bool
    max_letters: int  # of the result
    tools: str = ""  # a JSON list of functions in OpenAI's shape; "" if there are none
    part_roles: frozenset[str] = frozenset()  # roles whose contents are lists of parts, not texts
    has_text_arguments: bool = False  # arguments of calls are JSON as a text, not objects


class Compiled(Struct, frozen=True, tag="compiled"):
    """The answer to `TemplateSource`: the names that the template reads, and the texts in it."""

    variables: list[str]
    literals: list[str]


class Rendered(Struct, frozen=True, tag="rendered"):
    """The answer to `RenderJob`."""

    text: str


class TemplateFailure(Struct, frozen=True, tag="failure"):
    """The answer instead of one of the others. `code` is that of the error that the client or the operator sees."""

    message: str
    code: str


source_decoder = msgspec.msgpack.Decoder(TemplateSource)
job_decoder = msgspec.msgpack.Decoder(RenderJob)
opened_decoder = msgspec.msgpack.Decoder(Compiled | TemplateFailure)
rendering_decoder = msgspec.msgpack.Decoder(Rendered | TemplateFailure)


def encode_frame(frame: TemplateSource | RenderJob | Compiled | Rendered | TemplateFailure) -> bytes:
    """Return the body of a frame. Errors: WireError for text that is no Unicode (lone surrogates)."""
    return encode_body(frame)
