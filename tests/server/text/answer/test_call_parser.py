"""Calls in answers, in every format, whatever the cuts between pieces."""

import json
import random
from collections.abc import Callable, Sequence

import pytest

from tests.seeds import fresh_seeds
from tiercel.server.text.answer.call_parser import CallParser
from tiercel.server.text.answer.event import (
    COMPLETE,
    CUT,
    AnswerEvent,
    AnswerParser,
    CallArguments,
    CallEnd,
    CallStart,
    ContentPart,
    Ending,
    ParsedAnswer,
    collect,
)
from tiercel.server.text.answer.formats import FORMATS, HERMES, JSON, LLAMA3, MISTRAL, CallFormat
from tiercel.server.text.answer.thoughts import ThoughtParser

NAMES = ("get_weather", "add", "f")
CALL = '{"name": "add", "arguments": {"a": 1, "b": [2, {"c": "}\\"]"}]}}'
ARGUMENTS = '{"a": 1, "b": [2, {"c": "}\\"]"}]}'


def _events(parser: AnswerParser, pieces: Sequence[str], ending: Ending = COMPLETE) -> list[AnswerEvent]:
    return [event for piece in pieces for event in parser.feed(piece)] + parser.finish(ending)


def _parsed(form: CallFormat, text: str, max_calls: int | None = None, ending: Ending = COMPLETE) -> ParsedAnswer:
    return collect(_events(CallParser(form, NAMES, max_calls), [text], ending))


def _calls(answer: ParsedAnswer) -> list[tuple[str, str]]:
    return [(call.name, call.arguments) for call in answer.calls]


@pytest.mark.parametrize(
    ("form", "text", "content", "calls"),
    [
        (HERMES, f"<tool_call>\n{CALL}\n</tool_call>", "", 1),
        (HERMES, f"Sure.\n<tool_call>{CALL}</tool_call>\n<tool_call>\n{CALL}\n</tool_call>\n", "Sure.\n", 2),
        (HERMES, f"\n\n<tool_call>{CALL}</tool_call> done", " done", 1),
        (HERMES, f"<tool_call>\n{CALL}", "", 1),
        (HERMES, "  plain <tool_ca", "  plain <tool_ca", 0),
        (HERMES, "\n", "\n", 0),
        (LLAMA3, CALL, "", 1),
        (LLAMA3, f"<|python_tag|>{CALL}; {CALL}", "", 2),
        (LLAMA3, '{"name": "f", "parameters": {}}', "", 1),
        (LLAMA3, f" {CALL}\n", "", 1),
        (LLAMA3, '{"answer": 5}', '{"answer": 5}', 0),
        (LLAMA3, "<|python_tag|>print(1)", "<|python_tag|>print(1)", 0),
        (LLAMA3, f"no {CALL}", f"no {CALL}", 0),
        (MISTRAL, f"[TOOL_CALLS] [{CALL}, {CALL}]", "", 2),
        (MISTRAL, f"[TOOL_CALLS]add{ARGUMENTS}[TOOL_CALLS]f{{}}", "", 2),
        (MISTRAL, f"[TOOL_CALLS]add[CALL_ID]abc[ARGS]{ARGUMENTS}", "", 1),
        (MISTRAL, f"Hm [TOOL_CALLS]{CALL}", "Hm ", 1),
        (JSON, f"[{CALL},{CALL}]", "", 2),
        (JSON, f"\n{CALL}", "", 1),
        (JSON, "[1, 2]", "[1, 2]", 0),
        (JSON, "[TOOL]", "[TOOL]", 0),
    ],
)
def test_calls_are_found(form: CallFormat, text: str, content: str, calls: int) -> None:
    answer = _parsed(form, text)
    assert (answer.content, len(answer.calls)) == (content, calls)


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "add", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "add", "name": "f", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "add"}</tool_call>',
        '<tool_call>{"arguments": {}}</tool_call>',
        '<tool_call>{"arguments": {"a": }, "name": "add"}</tool_call>',
        '<tool_call>{"name": "add" "arguments": {}}</tool_call>',
        '<tool_call>{"name": "add", "arguments": "{"}</tool_call>',
        "<tool_call></tool_call>",
        "<tool_call>add(1, 2)</tool_call>",
        "<tool_call> \n",
        "<tool_call>{",
    ],
)
def test_text_that_does_not_begin_a_call_is_content(text: str) -> None:
    answer = _parsed(HERMES, f"Well: {text}")
    assert (answer.content, answer.calls) == (f"Well: {text}", [])


@pytest.mark.parametrize(
    ("text", "arguments", "content", "is_called"),
    [
        ('{"name": "add", "arguments": {"a": }}</tool_call>', '{"a": }', "", False),
        ('{"name": "add", "arguments": {"a": [1}}</tool_call>ok', '{"a": [1}}', "ok", False),
        ('{"name": "add", "arguments": {"a": 1</tool_call>ok', '{"a": 1', "ok", False),
        ('{"name": "add", "arguments": {"a": 1</tool_call', '{"a": 1</tool_call', "", False),
        ('{"name": "add", "arguments": {"a": x<y}}<tool_call>', '{"a": x<y}}', "<tool_call>", False),
        ('{"name": "add", "arguments": {"a": "\\ud800"}}</tool_call>', '{"a": "\\ud800"}', "", False),
        ('{"name": "add", "arguments": {"a": 1}</tool_call>ok', '{"a": 1}', "ok", True),
        ('{"name": "add", "arguments": {"a": 1}', '{"a": 1}', "", True),
        ('{"name": "add", "arguments": {}, "more": 1}</tool_call>ok', "{}", ', "more": 1}ok', True),
        ('{"name": "add", "arguments": {}} .</tool_call>ok', "{}", " .ok", True),
    ],
)
def test_a_call_that_has_begun_stays_a_call(text: str, arguments: str, content: str, is_called: bool) -> None:
    answer = _parsed(HERMES, f"<tool_call>{text}")
    assert (answer.content, _calls(answer), answer.is_called) == (content, [("add", arguments)], is_called)


def test_arguments_that_nest_too_deep_are_no_complete_call() -> None:
    deep = '{"a":' * 70 + "1" + "}" * 71
    answer = _parsed(HERMES, '<tool_call>{"name": "add", "arguments": ' + deep + "</tool_call>")
    assert (answer.content, _calls(answer), answer.is_called) == ("", [("add", deep)], False)


def test_a_good_call_beside_a_malformed_one_is_a_call() -> None:
    answer = _parsed(HERMES, f"<tool_call>{{]</tool_call><tool_call>{CALL}</tool_call>")
    assert (answer.content, _calls(answer)) == ("<tool_call>{]</tool_call>", [("add", ARGUMENTS)])
    answer = _parsed(JSON, f"[{CALL}, 5]")
    assert (answer.content, _calls(answer)) == (", 5]", [("add", ARGUMENTS)])


def test_the_keys_may_be_in_any_order_and_the_arguments_may_be_a_string() -> None:
    answer = _parsed(JSON, '{"id": "x", "type": "function", "parameters": {"a": 1}, "name": "f"}')
    assert _calls(answer) == [("f", '{"a": 1}')]
    answer = _parsed(JSON, '{"name": "f", "arguments": "{\\"a\\": \\"\\\\u00e9\\"}"}')
    assert _calls(answer) == [("f", '{"a": "\\u00e9"}')]


def test_arguments_are_streamed_as_they_arrive() -> None:
    parser = CallParser(HERMES, NAMES)
    assert parser.feed('<tool_call>{"name": "add", "argum') == []
    assert parser.feed('ents": {"te') == [CallStart(0, "add"), CallArguments(0, '{"te')]
    assert parser.feed('xt": "a') == [CallArguments(0, 'xt": "a')]
    assert parser.feed('"}') == [CallArguments(0, '"}')]
    assert parser.feed("}</tool_") == [CallEnd(0)]
    assert parser.feed("call>") == []
    assert parser.feed("<tool_call>" + CALL)[0] == CallStart(1, "add")


@pytest.mark.parametrize("ending", [COMPLETE, CUT])
def test_a_call_that_does_not_end_is_not_complete(ending: Ending) -> None:
    parser = CallParser(HERMES, NAMES)
    text = '<tool_call>{"name": "add", "arguments": {"a": 1'
    assert parser.feed(text)[-1] == CallArguments(0, '{"a": 1')
    assert parser.finish(ending) == [CallEnd(0, is_complete=False)]


@pytest.mark.parametrize(
    ("form", "text", "content", "calls"),
    [
        (HERMES, "Sure. <tool_", "Sure. ", []),
        (HERMES, "<tool_call>", "", []),
        (HERMES, '<tool_call>\n{"name": "ad', "", []),
        (HERMES, '<tool_call>\n{"name": "add"', "", [("add", "")]),
        (HERMES, '<tool_call>\n{"name": "add", "argum', "", [("add", "")]),
        (HERMES, '<tool_call>\n{"name": "add", "arguments": "{\\"a', "", [("add", "")]),
        (HERMES, f"<tool_call>{CALL}</tool_", "", [("add", ARGUMENTS)]),
        (HERMES, f"<tool_call>{CALL}</tool_call>\n<tool", "", [("add", ARGUMENTS)]),
        (LLAMA3, '{"na', "", []),
        (LLAMA3, '{"answer": 5, "wh', '{"answer": 5, "wh', []),
        (LLAMA3, f"{CALL}; {CALL[:25]}", "", [("add", ARGUMENTS), ("add", "")]),
        (MISTRAL, "[TOOL_CALLS]ad", "", []),
        (MISTRAL, "[TOOL_CALLS]add", "", []),
        (MISTRAL, "[TOOL_CALLS]add[ARG", "", [("add", "")]),
        (MISTRAL, "[TOOL_CALLS] [", "", []),
        (JSON, f"[{CALL}, ", "", [("add", ARGUMENTS)]),
    ],
)
def test_a_cut_call_is_no_content(form: CallFormat, text: str, content: str, calls: list[tuple[str, str]]) -> None:
    answer = _parsed(form, text, ending=CUT)
    assert (answer.content, _calls(answer)) == (content, calls)


@pytest.mark.parametrize(
    ("form", "before", "between"),
    [(MISTRAL, "[TOOL_CALLS] [", ", "), (MISTRAL, "[TOOL_CALLS][", ","), (JSON, "[", ", "), (LLAMA3, "", "; ")],
)
def test_a_model_that_ends_within_its_second_call_leaves_no_text(form: CallFormat, before: str, between: str) -> None:
    """Wherever it ends behind the first call; whole and in pieces, which give the same."""
    text = f"{before}{CALL}{between}{CALL}"
    first = len(before) + len(CALL)
    for end in range(first, len(text)):
        answer = _parsed(form, text[:end])
        assert answer.content == "", text[:end]
        assert _calls(answer)[0] == ("add", ARGUMENTS)
        has_arguments = '"arguments": {' in text[first:end]
        assert len(answer.calls) == 1 + has_arguments
        assert answer.is_called == (not has_arguments or ARGUMENTS in text[first:end])
        assert collect(_events(CallParser(form, NAMES), list(text[:end]))) == answer


def test_what_a_stop_string_cuts_is_a_mark_if_the_stop_string_goes_on_with_it() -> None:
    assert _parsed(HERMES, "if a <", ending=Ending(is_cut=True, following="\n")).content == "if a <"
    assert _parsed(HERMES, "Sure. <tool_", ending=Ending(is_cut=True, following="call>")).content == "Sure. "
    assert _parsed(HERMES, "Sure. <tool_", ending=Ending(is_cut=True, following="")).content == "Sure. <tool_"
    assert _parsed(HERMES, "<tool_call>", ending=Ending(is_cut=True, following="\n")).content == ""


def test_with_one_call_allowed_the_others_are_dropped() -> None:
    text = f"<tool_call>{CALL}</tool_call><tool_call>{CALL}</tool_call>"
    answer = _parsed(HERMES, text, max_calls=1)
    assert (answer.content, len(answer.calls)) == ("", 1)


_WORDS = [
    *["<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[", "]", "{", "}", ";", ",", ":", '"', "\\"],
    *["\n", " ", "Hello", "ü🙂", "add", "f", "[ARGS]", CALL, CALL, '{"name": "f", "parameters": {}}', ARGUMENTS],
    *[
        '{"name": "add", "arguments": ',
        '"name"',
        '"arguments"',
        "<think>",
        "</think>",
        "<think",
        "1",
        "null",
        "x" * 600,
    ],
]


def _random_text(rng: random.Random) -> str:
    return "".join(rng.choice(_WORDS) for _ in range(rng.choice((1, 3, 6, 12))))


def _cut(rng: random.Random, text: str) -> list[str]:
    cuts = sorted(rng.randrange(len(text) + 1) for _ in range(rng.choice((1, 2, 5, 20))))
    return [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def _parsers() -> list[Callable[[], AnswerParser]]:
    makers: list[Callable[[], AnswerParser]] = []
    for form in FORMATS.values():
        makers.append(lambda form=form: CallParser(form, NAMES))
        makers.append(lambda form=form: CallParser(form, NAMES, 1))
        for is_thinking in (False, True):
            makers.append(
                lambda form=form, is_thinking=is_thinking: ThoughtParser(
                    CallParser(form, NAMES), is_thinking=is_thinking
                )
            )
    makers.append(lambda: ThoughtParser(None, is_thinking=False))
    return makers


@pytest.mark.parametrize("seed", [*range(8), *fresh_seeds(2)])
@pytest.mark.sampled(4)
def test_cuts_make_no_difference(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(25):
        text = _random_text(rng)
        for make in _parsers():
            whole = collect(_events(make(), [text]))
            pieces = _cut(rng, text)
            assert collect(_events(make(), pieces)) == whole, (seed, pieces)
            assert collect(_events(make(), list(text))) == whole, (seed, text)
            if whole.is_called:
                assert all(isinstance(json.loads(call.arguments), dict) for call in whole.calls), (seed, text)
            assert collect(_events(make(), pieces, CUT)) == collect(_events(make(), [text], CUT)), (seed, pieces)


@pytest.mark.parametrize("form", FORMATS.values(), ids=lambda form: form.name)
def test_every_cut_in_two_makes_no_difference(form: CallFormat) -> None:
    text = f"Sure. <tool_call>\n{CALL}\n</tool_call> [TOOL_CALLS] [{CALL}, {CALL}] [TOOL_CALLS]f{{}}"
    text += f"<|python_tag|>{CALL}; 5"
    for whole_text in (text, text.removeprefix("Sure. "), f"{CALL};{CALL}", f"[{CALL} , {CALL}]x"):
        whole = _parsed(form, whole_text)
        for cut in range(len(whole_text)):
            parts = _events(CallParser(form, NAMES), [whole_text[:cut], whole_text[cut:]])
            assert collect(parts) == whole, cut


def _is_beginning(cut: ParsedAnswer, whole: ParsedAnswer) -> bool:
    """Return whether each part of a cut answer is the beginning of the same part of the whole answer.

    A call that is cut before its arguments may have turned out to be none.
    """
    calls = _calls(cut)
    if calls and not calls[-1][1] and len(calls) > len(whole.calls):
        calls.pop()
    return (
        whole.content.startswith(cut.content)
        and whole.thoughts.startswith(cut.thoughts)
        and len(calls) <= len(whole.calls)
        and all(
            name == of.name and of.arguments.startswith(text)
            for (name, text), of in zip(calls, whole.calls, strict=False)
        )
    )


@pytest.mark.parametrize("seed", [*range(4), *fresh_seeds(2)])
def test_a_cut_answer_is_the_beginning_of_the_whole_one(seed: int) -> None:
    """So no mark of a call or of thoughts becomes content at a cut, wherever it is."""
    rng = random.Random(seed)
    for _ in range(10):
        text = _random_text(rng)
        for make in _parsers():
            whole = collect(_events(make(), [text]))
            for length in range(0, len(text), 1 if len(text) < 200 else 37):
                cut = collect(_events(make(), [text[:length]], CUT))
                assert _is_beginning(cut, whole), (seed, text, length)


@pytest.mark.parametrize("seed", [*range(6), *fresh_seeds(2)])
def test_nothing_of_an_answer_without_calls_is_lost(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(100):
        text = _random_text(rng)
        for form in FORMATS.values():
            answer = _parsed(form, text)
            if not answer.calls:
                assert answer.content == text, (seed, form.name, text)


@pytest.mark.slow
def test_a_call_of_many_pieces_is_read_in_linear_time() -> None:
    """Every character is looked at a bounded number of times: 400,000 pieces would not end otherwise."""
    parser = CallParser(HERMES, NAMES)
    parser.feed('<tool_call>{"name": "f", "arguments": {"a": "')
    for _ in range(400_000):
        parser.feed("x")
    events = parser.feed('"}}</tool_call>')
    assert events[-1] == CallEnd(0)


def test_thoughts_are_split_off() -> None:
    def parsed(text: str, *, is_thinking: bool = False, shows_thoughts: bool = True) -> ParsedAnswer:
        rest = CallParser(HERMES, NAMES)
        parser = ThoughtParser(rest, is_thinking=is_thinking, shows_thoughts=shows_thoughts)
        return collect(_events(parser, list(text)))

    assert parsed("<think>\nhm\n\n</think>\n\nyes") == ParsedAnswer("yes", "hm", [])
    assert parsed("\nhm\n</think>\n\nyes", is_thinking=True) == ParsedAnswer("yes", "hm", [])
    assert parsed("yes </think>") == ParsedAnswer("yes </think>", "", [])
    assert parsed("<think>never ends") == ParsedAnswer("", "never ends", [])
    assert parsed("<think>a</think>b", shows_thoughts=False) == ParsedAnswer("b", "", [])
    answer = parsed(f"<think>use <tool_call></think>\n<tool_call>{CALL}</tool_call>")
    assert (answer.content, answer.thoughts, len(answer.calls)) == ("", "use <tool_call>", 1)


def test_content_of_a_plain_answer_is_shown_at_once() -> None:
    assert CallParser(HERMES, NAMES).feed("Hello <") == [ContentPart("Hello ")]
    assert CallParser(LLAMA3, NAMES).feed("Hello") == [ContentPart("Hello")]
