"""The format of calls is the one that reads the template's own calls, or none."""

import datetime

import pytest

from tiercel.server.api.answer_style import AnswerStyle
from tiercel.server.text.answer.format_choice import format_of
from tiercel.server.text.answer.formats import CallFormat
from tiercel.server.text.chat_template import ChatTemplate
from tiercel.server.text.template_renderer import TemplateRenderer
from tiercel.server.text.template_traces import read_traces
from tiercel.server.text.tokenizer import TextCodec

LOOP = "{% for c in m.tool_calls or [] %}"
ARGUMENTS = "c.function.arguments | tojson"
PAIRS = "{% for k, v in c.function.arguments.items() %}"
JSON_CALL = '{"name": "{{ c.function.name }}", "arguments": {{ ' + ARGUMENTS + " }}}"
TEXT_CALL = "{{ c.function.name + c.function.arguments }}"
CALLS = {  # family: the format, and how its template writes a call
    "Hermes, Qwen 2.5, Granite 4": ("hermes", f"<tool_call>\n{JSON_CALL}\n</tool_call>"),
    "SmolLM3": ("hermes", f"<tool_call>{JSON_CALL}</tool_call>"),
    "QwQ": ("hermes", f"<tool_call>\n{JSON_CALL}\n</tool_call>"),
    "Llama 3": ("llama3_json", JSON_CALL.replace('arguments":', 'parameters":') + "{# #}"),
    "Mistral v3": ("mistral", f'[TOOL_CALLS][{JSON_CALL[:-1]}, "id": "{{{{ c.id }}}}"}}]'),
    "Mistral v11": ("mistral", f"[TOOL_CALLS]{{{{ c.function.name }}}}[ARGS]{{{{ {ARGUMENTS} }}}}"),
    "Mistral Small 3.2": (
        "mistral",
        f"[TOOL_CALLS]{{{{ c.function.name }}}}[CALL_ID]{{{{ c.id }}}}[ARGS]{{{{ {ARGUMENTS} }}}}",
    ),
    "a list in JSON": ("json", f"[{JSON_CALL}]"),
    "Qwen3-Coder": (
        None,
        f"<tool_call>\n<function={{{{ c.function.name }}}}>\n{PAIRS}<parameter={{{{ k }}}}>\n{{{{ v }}}}\n"
        "</parameter>\n{% endfor %}</function>\n</tool_call>",
    ),
    "GLM 4.5": (
        None,
        f"<tool_call>{{{{ c.function.name }}}}\n{PAIRS}<arg_key>{{{{ k }}}}</arg_key>\n<arg_value>{{{{ v }}}}"
        "</arg_value>\n{% endfor %}</tool_call>",
    ),
    "MiniMax M2": (
        None,
        f'<minimax:tool_call>\n<invoke name="{{{{ c.function.name }}}}">\n{PAIRS}<parameter name="{{{{ k }}}}">'
        "{{ v }}</parameter>\n{% endfor %}</invoke>\n</minimax:tool_call>",
    ),
    "MiniMax M1": (None, f"<tool_calls>\n{JSON_CALL}\n</tool_calls>"),
    "Seed-OSS": (None, "<seed:tool_call>\n<function={{ c.function.name }}>\n</function>\n</seed:tool_call>"),
    "Granite 3.3": (None, f"<|tool_call|>[{JSON_CALL}]"),
    "Phi-4-mini": (None, f"<|tool_call|>[{JSON_CALL}]<|/tool_call|>"),
    "Gemma 4": (None, "<|tool_call>call:{{ c.function.name }}{}<tool_call|>"),
    "LFM2": (None, '<|tool_call_start|>[{{ c.function.name }}(city="Rome")]<|tool_call_end|>'),
    "Nemotron Nano 2": (None, f"<TOOLCALL>[{JSON_CALL}]</TOOLCALL>"),
    "Apertus": (None, f'<|tools_prefix|>[{{"{{{{ c.function.name }}}}": {{{{ {ARGUMENTS} }}}}}}]<|tools_suffix|>'),
    "Kimi K2": (
        None,
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.{{ c.function.name }}:0"
        f"<|tool_call_argument_begin|>{{{{ {ARGUMENTS} }}}}<|tool_call_end|><|tool_calls_section_end|>",
    ),
    "DeepSeek V3.1": (
        None,
        "<\uff5ctool▁calls▁begin\uff5c><\uff5ctool▁call▁begin\uff5c>{{ c.function.name }}<\uff5ctool▁sep\uff5c>"
        "{{ c.function.arguments + '' }}<\uff5ctool▁call▁end\uff5c><\uff5ctool▁calls▁end\uff5c>",
    ),
    "gpt-oss": (
        None,
        " to=functions.{{ c.function.name }}<|channel|>commentary json<|message|>{{ " + ARGUMENTS + " }}<|call|>",
    ),
    "Functionary 3.1": (None, "<function={{ c.function.name }}>{{ c.function.arguments + '' }}</function>"),
    "Functionary 3.2": (None, "{{ c.function.name + '\\n' + c.function.arguments }}"),
    "Llama 3 pythonic": (None, '[{{ c.function.name }}(city="Rome")]'),
}


def _source(call: str, before: str = "", prompt_end: str = "") -> str:
    return (
        f"{{{{ tools | tojson if tools }}}}{before}{{% for m in messages %}}<|im_start|>{{{{ m.role }}}}\n"
        f"{{{{ m.content }}}}{LOOP}{call}{{% endfor %}}<|im_end|>\n{{% endfor %}}"
        f"{{% if add_generation_prompt %}}<|im_start|>assistant\n{prompt_end}{{% endif %}}"
    )


def _format(source: str) -> CallFormat | None:
    renderer = TemplateRenderer(source, {}, today=datetime.datetime.now)
    traces = read_traces(renderer, knows_tools=True)
    assert traces.shows_tools
    return format_of(source, knows_tools=True, call=traces.call)


@pytest.mark.parametrize("family", CALLS)
def test_the_format_reads_what_the_template_writes_or_is_none(family: str) -> None:
    name, call = CALLS[family]
    before = "{# #}<|python_tag|>" if "Llama" in family else ""
    prompt_end = "<think>\n" if family in ("QwQ", "Nemotron Nano 2", "MiniMax M2") else ""
    form = _format(_source(call, before, prompt_end))
    assert (None if form is None else form.name) == name


@pytest.mark.parametrize(
    ("mark", "name"),
    [
        ("<tool_call>", "hermes"),
        ("[TOOL_CALLS]", "mistral"),
        ("<|python_tag|>", "llama3_json"),
        ("<tool_calls>", None),
        ("<|tool_call>", None),
        ("<minimax:tool_call>", None),
        ("<tool_call> <function=", None),
        ("<tool_call> [TOOL_CALLS]", None),
        ("", None),
    ],
)
def test_a_template_that_shows_no_calls_is_known_by_a_whole_mark(mark: str, name: str | None) -> None:
    form = format_of(f"{mark}{{{{ tools }}}}", knows_tools=True, call=None)
    assert (None if form is None else form.name) == name


def test_a_template_without_tools_gets_the_format_of_the_description() -> None:
    for template in (None, "{{ messages }}", "[TOOL_CALLS]"):
        form = format_of(template, knows_tools=False, call=None)
        assert form is not None
        assert form.name == "hermes"


@pytest.fixture(scope="module")
def marked() -> TextCodec:
    """A tokenizer whose marks are special tokens."""
    from tokenizers import AddedToken

    from tests.server.builders import build_byte_level

    tokenizer = build_byte_level()
    marks = ("[THINK]", "[/THINK]", "<|channel|>", "<|message|>", "<|end|>", "<think>", "<|tool_call|>", "<|unused|>")
    tokenizer.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in marks])
    return TextCodec(tokenizer.to_str(), {"bos_token": "<s>", "eos_token": "</s>"}, None)


def _style(codec: TextCodec, source: str) -> AnswerStyle:
    renderer = TemplateRenderer(source, codec.named_specials, today=datetime.datetime.now)
    return AnswerStyle.of("auto", "auto", source, ChatTemplate.open(renderer, codec))


@pytest.mark.parametrize(
    ("source", "marks"),
    [
        (_source(JSON_CALL), ()),
        (_source(JSON_CALL, "Think within [THINK] and [/THINK]."), ("[THINK]", "[/THINK]")),
        (_source(f"<|tool_call|>{JSON_CALL}"), ("<|tool_call|>",)),
        (
            "{% for m in messages %}<|im_start|>{{ m.role }}{% if m.role == 'assistant' %}<|channel|>final{% endif %}"
            "<|message|>{{ m.content }}<|end|>{% endfor %}{{ '<|im_start|>assistant' if add_generation_prompt }}",
            ("<|channel|>", "<|end|>", "<|im_start|>", "<|message|>"),
        ),
    ],
)
def test_special_tokens_that_no_parser_reads_stay_visible(
    marked: TextCodec, source: str, marks: tuple[str, ...]
) -> None:
    style = _style(marked, source)
    assert set(marks) <= set(style.foreign_marks)
    assert "<|unused|>" not in style.foreign_marks
    if not marks:
        assert style.foreign_marks == ()
