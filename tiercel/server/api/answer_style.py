"""The forms in which the model of this server writes calls and thoughts."""

from typing import Literal

from msgspec import Struct

from tiercel.server.api.tool_choice import ToolChoice
from tiercel.server.text.answer.format_choice import format_of
from tiercel.server.text.answer.formats import FORMATS, CallFormat
from tiercel.server.text.answer.reader import AnswerReader
from tiercel.server.text.answer.thoughts import END_THINK, THINK
from tiercel.server.text.chat_template import ChatTemplate
from tiercel.values.errors import AdmissionError

Thoughts = Literal["none", "qwen3", "deepseek_r1"]


class AnswerStyle(Struct, frozen=True):
    """The format of calls, None if they are not parsed, and the marks of thoughts."""

    form: CallFormat | None
    thoughts: Thoughts
    unread_marks: frozenset[str] = frozenset()  # special tokens of the template within answers
    is_unknown: bool = False  # the template has a format of calls that is none of ours

    @staticmethod
    def of(call_parser: str, thought_parser: str, source: str | None, template: ChatTemplate | None) -> "AnswerStyle":
        """Return the style that the settings name; "auto" is that of the chat template, of which `source` is the text.

        A template that removes thoughts from earlier answers names their end, and so does its model write them.
        """
        form = FORMATS.get(call_parser)
        is_auto = call_parser == "auto"
        if is_auto:
            form = format_of(
                source,
                knows_tools=template is not None and template.knows_tools,
                call=None if template is None else template.call,
            )
        marks = frozenset[str]() if template is None else template.visible_marks
        thoughts: Thoughts
        match thought_parser:
            case "qwen3" | "deepseek_r1":
                thoughts = thought_parser
            case "auto" if source is not None and END_THINK in source:
                thoughts = "qwen3"
            case _:
                thoughts = "none"
        return AnswerStyle(form, thoughts, marks, is_auto and form is None)

    @property
    def notes(self) -> list[str]:
        """Sentences for the operator about what no parser reads."""
        notes: list[str] = []
        if self.is_unknown:
            notes.append("the chat template writes tool calls in a format that is not known: they are content")
        if self.foreign_marks:
            shown = " ".join(self.foreign_marks)
            notes.append(f"no parser reads these special tokens of the chat template, they stay visible: {shown}")
        return notes

    @property
    def read_marks(self) -> frozenset[str]:
        """The marks of the parsers."""
        of_calls = frozenset[str]() if self.form is None else self.form.marks
        return of_calls | (frozenset[str]() if self.thoughts == "none" else {THINK, END_THINK})

    @property
    def foreign_marks(self) -> tuple[str, ...]:
        """Special tokens of the template within answers that no parser reads: they stay visible in the content."""
        return tuple(sorted(self.unread_marks - self.read_marks))

    def reader(self, choice: ToolChoice, *, shows_thoughts: bool) -> AnswerReader:
        """Return the reader of answers to a request. Errors: AdmissionError (400) if calls cannot be parsed."""
        if choice.mode == "required" and self.form is None:
            raise AdmissionError(
                400,
                "tool_choice: this server does not parse the calls of this model (--tool-call-parser none, or a format"
                " that is not known), so they cannot be required",
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
