"""The formats in which models write calls of functions."""

from collections.abc import Sequence

from msgspec import Struct


class CallFormat(Struct, frozen=True, kw_only=True):
    """A way to write calls: JSON objects with a name and arguments, between marks."""

    name: str
    opening: str = ""  # the mark before a call, or before a list of calls
    closing: str = ""  # the mark behind a call; it may be missing
    separator: str = ""  # between calls that have no marks
    starts_bare: bool = False  # an answer that starts with a call needs no mark
    has_lists: bool = False  # calls may be in a JSON list
    has_heads: bool = False  # the name may stand before the arguments, outside the JSON
    head_marks: Sequence[str] = ()  # behind that name
    arguments_key: str = "arguments"  # as the model writes it
    id_letters: int = 0  # letters and digits of an id of a call; 0 = as OpenAI's
    template_marks: Sequence[str] = ()  # a chat template of this format has one of these
    other_marks: Sequence[str] = ()  # one with one of these has another format with the same opening mark

    @property
    def marks(self) -> frozenset[str]:
        """The texts between which a call is written."""
        return frozenset(mark for mark in (self.opening, self.closing, *self.head_marks) if mark)


HERMES = CallFormat(
    name="hermes",
    opening="<tool_call>",
    closing="</tool_call>",
    template_marks=("<tool_call>",),
    other_marks=("<function=", "<arg_key>", "<parameter"),
)
"""Hermes, Qwen 2.5 and Qwen 3: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""

LLAMA3 = CallFormat(
    name="llama3_json",
    opening="<|python_tag|>",
    separator=";",
    starts_bare=True,
    arguments_key="parameters",
    template_marks=("<|python_tag|>", '"parameters": dictionary of argument name and its value'),
    other_marks=("<function=",),
)
"""Llama 3: the answer is `{"name": ..., "parameters": {...}}`, with or without `<|python_tag|>`, several with `;`."""

MISTRAL = CallFormat(
    name="mistral",
    opening="[TOOL_CALLS]",
    has_lists=True,
    has_heads=True,
    head_marks=("[CALL_ID]", "[ARGS]"),
    id_letters=9,  # its templates refuse others
    template_marks=("[TOOL_CALLS]",),
)
"""Mistral: `[TOOL_CALLS] [{"name": ..., "arguments": {...}}]`, and since 2025 `[TOOL_CALLS]name{...}`."""

JSON = CallFormat(name="json", starts_bare=True, has_lists=True)
"""The answer is a call or a list of calls in JSON, without marks."""

FORMATS = {one.name: one for one in (HERMES, LLAMA3, MISTRAL, JSON)}
"""The formats by the names that `--tool-call-parser` takes."""
