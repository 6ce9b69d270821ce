"""The forms in which the model of this server writes calls and thoughts."""

from typing import Literal

from msgspec import Struct

from tiercel.errors import AdmissionError
from tiercel.server.api.tool_choice import ToolChoice
from tiercel.server.text.answer.formats import FORMATS, CallFormat, format_of
from tiercel.server.text.answer.reader import AnswerReader
from tiercel.server.text.answer.thoughts import END_THINK

Thoughts = Literal["none", "qwen3", "deepseek_r1"]


class AnswerStyle(Struct, frozen=True):
    """The format of calls, None if they are not parsed, and the marks of thoughts."""

    form: CallFormat | None
    thoughts: Thoughts

    @staticmethod
    def of(call_parser: str, thought_parser: str, template: str | None) -> "AnswerStyle":
        """Return the style that the settings name; "auto" is that of the chat template.

        A template that removes thoughts from earlier answers names their end, and so does its model write them.
        """
        form = format_of(template) if call_parser == "auto" else FORMATS.get(call_parser)
        match thought_parser:
            case "qwen3" | "deepseek_r1":
                return AnswerStyle(form, thought_parser)
            case "auto" if template is not None and END_THINK in template:
                return AnswerStyle(form, "qwen3")
            case _:
                return AnswerStyle(form, "none")

    def reader(self, choice: ToolChoice, *, shows_thoughts: bool) -> AnswerReader:
        """Return the reader of answers to a request. Errors: AdmissionError (400) if calls cannot be parsed."""
        if choice.mode == "required" and self.form is None:
            raise AdmissionError(
                400,
                "tool_choice: this server does not parse calls (--tool-call-parser none), so they cannot be required",
                param="tool_choice",
            )
        return AnswerReader(
            self.form if choice.mode != "none" else None,
            choice.names,
            choice.max_calls,
            has_thoughts=self.thoughts != "none",
            starts_thinking=self.thoughts == "deepseek_r1",
            shows_thoughts=shows_thoughts,
        )
