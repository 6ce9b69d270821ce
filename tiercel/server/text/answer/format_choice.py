"""The choice of the format in which a model writes calls of functions, by its chat template."""

import msgspec

from tiercel.server.text.answer.call_parser import CallParser
from tiercel.server.text.answer.event import COMPLETE, collect, parts_of
from tiercel.server.text.answer.formats import FORMATS, HERMES, JSON, CallFormat
from tiercel.server.text.template_traces import TRACED_ARGUMENTS, TRACED_NAME


def format_of(template: str | None, *, knows_tools: bool, call: str | None) -> CallFormat | None:
    """Return the format of the calls that a chat template writes; None if it is none of ours.

    `call` is an answer with a call as the template writes it (see `TemplateTraces`): the format is the one that reads
    it. If the template shows no calls, or shows them without a mark, it is the one whose mark, whole, is in the
    template. One that does not know tools gets those of `tool_prompt`.
    """
    if template is None or not knows_tools:
        return HERMES
    named = [one for one in FORMATS.values() if _is_named(template, one)]
    if call is not None:
        for one in (*named, JSON):
            if _reads(one, call):
                return one
        named = [one for one in named if not one.starts_bare and one.opening not in call]
    return named[0] if len(named) == 1 else None


def _is_named(template: str, form: CallFormat) -> bool:
    has_mark = any(mark in template for mark in form.template_marks)
    return has_mark and not any(mark in template for mark in form.other_marks)


def _reads(form: CallFormat, call: str) -> bool:
    """Return whether the parser of a format finds the call, and nothing before it."""
    answer = collect(parts_of(CallParser(form, {TRACED_NAME}), call, COMPLETE))
    if not answer.is_called or len(answer.calls) != 1:
        return False
    return msgspec.json.decode(answer.calls[0].arguments) == TRACED_ARGUMENTS
