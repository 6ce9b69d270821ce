"""Grammars of calls: what they accept, and that the parser of the same format reads it."""

import llguidance
import pytest

from tiercel.server.api.schemas.tools import ToolFields
from tiercel.server.api.tool_choice import ToolChoice, read_tool_choice
from tiercel.server.api.tool_grammar import tool_constraint
from tiercel.server.text.answer.event import COMPLETE, collect
from tiercel.server.text.answer.formats import FORMATS, HERMES, JSON, CallFormat
from tiercel.server.text.answer.reader import AnswerReader
from tiercel.values.errors import AdmissionError

CITY = {"type": "object", "properties": {"city": {"enum": ["Rome", "Paris"]}}, "required": ["city"]}
TOOLS = [
    ToolFields.model_validate(
        {"type": "function", "function": {"name": name, "parameters": schema, "strict": is_strict}}
    )
    for name, schema, is_strict in (
        ("weather", {**CITY, "additionalProperties": False}, True),
        ("now", None, False),
    )
]
GOOD, BAD = '{"city": "Rome"}', '{"city": "Oslo"}'
TOKENIZER = llguidance.LLTokenizer("byte")


def _accepts(form: CallFormat, choice: ToolChoice, text: str, *, prompt: str | None = None) -> bool:
    reader = AnswerReader(form, choice.names, choice.max_calls, has_thoughts=prompt is not None)
    reader.begin(prompt or "")
    constraint = tool_constraint(form, choice, reader, {})
    assert constraint is not None
    matcher = llguidance.LLMatcher(TOKENIZER, constraint.text)
    assert not matcher.is_error(), matcher.get_error()
    is_read = matcher.consume_tokens(TOKENIZER.tokenize_str(text))
    return is_read and matcher.is_accepting()


def _call(form: CallFormat, name: str, arguments: str) -> str:
    text = f'{{"name": "{name}", "{form.arguments_key}": {arguments}}}'
    return f"{form.opening}\n{text}\n{form.closing}" if form.closing else text


def _whole(form: CallFormat, *calls: str) -> str:
    if form.has_lists:
        return f"{form.opening}[{', '.join(calls)}]"
    return ("\n" if form.closing else "; ").join(calls)


@pytest.mark.parametrize("form", FORMATS.values(), ids=lambda form: form.name)
def test_required_calls_are_the_whole_answer(form: CallFormat) -> None:
    choice = read_tool_choice(TOOLS, "required", None)
    good, other = _call(form, "weather", GOOD), _call(form, "now", '{"a": [1]}')
    for text, calls in ((_whole(form, good), 1), (_whole(form, good, other), 2)):
        assert _accepts(form, choice, text), text
        reader = AnswerReader(form, choice.names)
        parser = reader.parser()
        assert parser is not None
        answer = collect([*parser.feed(text), *parser.finish(COMPLETE)])
        assert (len(answer.calls), answer.content) == (calls, "")
    for text in ("", "Hello", _whole(form, _call(form, "weather", BAD)), _whole(form, _call(form, "other", "{}"))):
        assert not _accepts(form, choice, text), text
    one = read_tool_choice(TOOLS, "required", parallel=False)
    assert _accepts(form, one, _whole(form, good))
    assert not _accepts(form, one, _whole(form, good, good))


@pytest.mark.parametrize("form", FORMATS.values(), ids=lambda form: form.name)
def test_a_named_function_is_called_once(form: CallFormat) -> None:
    choice = read_tool_choice(TOOLS, {"type": "function", "function": {"name": "now"}}, None)
    call = _call(form, "now", "{}")
    assert _accepts(form, choice, _whole(form, call))
    assert not _accepts(form, choice, _whole(form, call, call))
    assert not _accepts(form, choice, _whole(form, _call(form, "weather", GOOD)))


@pytest.mark.parametrize("form", FORMATS.values(), ids=lambda form: form.name)
def test_strict_functions_are_constrained_in_free_text(form: CallFormat) -> None:
    choice = read_tool_choice(TOOLS, "auto", None)
    lead = f"{form.opening}[" if form.has_lists else ""
    assert _accepts(form, choice, "Just text, with {} and [1].")
    assert _accepts(form, choice, f"Well. {lead}{_call(form, 'weather', GOOD)} ok")
    free = _call(form, "now", '{"any": 1}')
    assert _accepts(form, choice, f"Well. {lead}{free}")
    assert not _accepts(form, choice, f"Well. {lead}{_call(form, 'weather', BAD)}")


def test_without_strict_functions_calls_are_free() -> None:
    choice = read_tool_choice(TOOLS[1:], "auto", None)
    assert tool_constraint(HERMES, choice, AnswerReader(HERMES), {}) is None


def test_the_grammar_begins_behind_the_thoughts() -> None:
    choice = read_tool_choice(TOOLS, "required", parallel=False)
    call = _whole(JSON, _call(JSON, "weather", GOOD))
    assert _accepts(JSON, choice, f"hm {{}} [</thin\n</think>\n\n{call}", prompt="<think>\n")
    assert not _accepts(JSON, choice, call, prompt="<think>\n")
    assert _accepts(JSON, choice, call, prompt="")
    assert _accepts(JSON, choice, f"<think>hm</think>{call}", prompt="")
    assert not _accepts(JSON, choice, "<think>hm</think>no", prompt="")


def test_parameters_that_are_no_object_are_refused() -> None:
    tool = ToolFields.model_validate({"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}})
    choice = read_tool_choice([tool], "required", None)
    with pytest.raises(AdmissionError, match="type object"):
        tool_constraint(HERMES, choice, AnswerReader(HERMES), {})
