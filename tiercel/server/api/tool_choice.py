"""The tools of a request, and what the client wants of them."""

from collections.abc import Mapping, Sequence
from typing import Literal, cast

from msgspec import Struct

from tiercel.server.api.schemas.tools import FunctionFields, ToolFields
from tiercel.values.errors import AdmissionError

Mode = Literal["none", "auto", "required"]


class ToolChoice(Struct, frozen=True):
    """The functions that may be called. A named function is the only one, and required."""

    mode: Mode
    functions: Sequence[FunctionFields]
    max_calls: int | None  # None = any number

    @property
    def names(self) -> frozenset[str]:
        """The names of the functions."""
        return frozenset(function.name for function in self.functions)

    @property
    def needs_grammar(self) -> bool:
        """True if calls are constrained: they are required, or a function is strict."""
        return self.mode == "required" or (self.mode == "auto" and any(one.strict for one in self.functions))


_NO_TOOLS = ToolChoice("none", (), None)


def read_tool_choice(
    tools: Sequence[ToolFields] | None, choice: str | dict[str, object] | None, parallel: bool | None
) -> ToolChoice:
    """Return the choice. Without tools it must be "none"; with tools it is "auto" if the client gave none.

    Errors: AdmissionError (400) naming the field.
    """
    if not tools:
        if choice not in (None, "none"):
            raise _refusal("tool_choice is only allowed together with tools")
        return _NO_TOOLS
    by_name = {tool.function.name: tool.function for tool in tools}
    if len(by_name) < len(tools):
        raise AdmissionError(400, "tools: two functions have the same name", param="tools")
    max_calls = 1 if parallel is False else None
    match choice:
        case None | "auto":
            return ToolChoice("auto", tuple(by_name.values()), max_calls)
        case "none":
            return _NO_TOOLS
        case "required":
            return ToolChoice("required", tuple(by_name.values()), max_calls)
        case str():
            raise _refusal('tool_choice must be "none", "auto", "required" or name a function')
        case _:
            return _of_object(choice, by_name, max_calls)


def _of_object(
    choice: Mapping[str, object], by_name: Mapping[str, FunctionFields], max_calls: int | None
) -> ToolChoice:
    if choice.get("type") == "function":
        return ToolChoice("required", (_named(choice, by_name),), 1)
    if choice.get("type") == "allowed_tools":
        allowed = choice.get("allowed_tools")
        fields = cast(dict[str, object], allowed) if isinstance(allowed, dict) else {}
        mode, entries = fields.get("mode"), fields.get("tools")
        if mode in ("auto", "required") and isinstance(entries, list) and entries:
            functions = {one.name: one for one in (_named(entry, by_name) for entry in cast(list[object], entries))}
            return ToolChoice(mode, tuple(functions.values()), max_calls)
        raise _refusal('tool_choice.allowed_tools needs a mode, "auto" or "required", and a list of tools')
    raise _refusal('tool_choice.type must be "function" or "allowed_tools"')


def _named(entry: object, by_name: Mapping[str, FunctionFields]) -> FunctionFields:
    """Return the function of `{"type": "function", "function": {"name": ...}}`."""
    function = cast(dict[str, object], entry).get("function") if isinstance(entry, dict) else None
    name = cast(dict[str, object], function).get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise _refusal("tool_choice: the name of a function is missing")
    if name not in by_name:
        raise _refusal("tool_choice names a function that is not in tools")
    return by_name[name]


def _refusal(text: str) -> AdmissionError:
    return AdmissionError(400, text, param="tool_choice")
