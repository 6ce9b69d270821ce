"""Messages of which a template shows nothing, and the control tokens of a template."""

import datetime
import json

import pytest
from tokenizers import AddedToken

from tests.server.builders import build_byte_level
from tiercel.server.text.chat_template import ChatOptions, ChatTemplate
from tiercel.server.text.template_frames import ChatMessage, RenderJob
from tiercel.server.text.template_renderer import TemplateRenderer
from tiercel.server.text.tokenizer import TextCodec
from tiercel.values.errors import AdmissionError

TOOLS = json.dumps([{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}])
CALLS = json.dumps([{"id": "a_1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}])
ANY = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
THREE = (
    "{% for m in messages %}{% if m.role in ('system', 'user', 'assistant') %}<|im_start|>{{ m.role }}\n"
    "{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
)
STRICT = (
    "{% for m in messages %}{% if m.role not in ('system', 'user', 'assistant') %}{{ raise_exception('Only three') }}"
    "{% endif %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
)
FIRST = (
    "{% if messages[0].role == 'system' %}[{{ messages[0].content }}]{% set messages = messages[1:] %}{% endif %}"
    "{% for m in messages %}{% if m.role in ('user', 'assistant') %}{{ m.role }}: {{ m.content }}<|im_end|>"
    "{% endif %}{% endfor %}"
)
MERGED = (  # the system message is a part of the first turn, and turns must alternate
    "{% if messages[0].role == 'system' %}{% set before = messages[0].content + '\n' %}{% set turns = messages[1:] %}"
    "{% else %}{% set before = '' %}{% set turns = messages %}{% endif %}{% for m in turns %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('must alternate') }}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ before if loop.first else '' }}{{ m.content }}<|im_end|>{% endfor %}"
)
NO_SYSTEM = MERGED.replace(
    "{% set before = messages[0].content + '\n' %}", "{{ raise_exception('System role not supported') }}"
)
PARTS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% for part in m.content %}{% if part['type'] == 'text' %}"
    "{{ part['text'] }}{% endif %}{% endfor %}<|im_end|>\n{% endfor %}"
)
TEXT_ARGUMENTS = (
    "{{ tools | tojson }}{% for m in messages %}{{ m.role }}{{ m.content }}{% for call in m.tool_calls or [] %}"
    "{{ call.function.name + call.function.arguments }}{% endfor %}<|im_end|>{% endfor %}"
)
LAST_SYSTEM = (  # the last system message replaces those before it
    "{% set kept = namespace(text='') %}{% for m in messages %}{% if m.role == 'system' %}"
    "{% set kept.text = m.content %}{% endif %}{% endfor %}{{ kept.text }}{% for m in messages %}"
    "{% if m.role != 'system' %}{{ m.role }}{{ m.content }}<|im_end|>{% endif %}{% endfor %}"
)
LEADING = (  # system messages are shown before the first turn only
    "{% set turns = namespace(begun=false) %}{% for m in messages %}{% if m.role == 'system' %}"
    "{% if not turns.begun %}[{{ m.content }}]{% endif %}{% else %}{% set turns.begun = true %}"
    "{{ m.role }}{{ m.content }}<|im_end|>{% endif %}{% endfor %}"
)


class _Counting:
    """A renderer that counts."""

    def __init__(self, source: str, codec: TextCodec) -> None:
        self._renderer = TemplateRenderer(source, codec.named_specials, today=datetime.datetime.now)
        self.variables = self._renderer.variables
        self.literals = self._renderer.literals
        self.count = 0

    def render(self, job: RenderJob) -> str:
        self.count += 1
        return self._renderer.render(job)

    def close(self) -> None:
        self._renderer.close()


def _template(codec: TextCodec, source: str) -> ChatTemplate:
    return ChatTemplate.open(_Counting(source, codec), codec)


def _messages(roles: str) -> list[ChatMessage]:
    """Return messages with the contents `c0`, `c1`, ..."""
    messages: list[ChatMessage] = []
    for index, role in enumerate(roles.split()):
        if role == "call":
            messages.append(ChatMessage("assistant", "", tool_calls=CALLS, place=f"messages.{index}"))
        else:
            id = "a_1" if role == "tool" else None
            messages.append(ChatMessage(role, f"c{index}", tool_call_id=id, place=f"messages.{index}"))
    return messages


@pytest.mark.parametrize(
    ("source", "roles", "shown"),
    [
        (ANY, "developer user", "developer\nc0"),
        (THREE, "developer user", "system\nc0"),
        (THREE, "user assistant developer user", "system\nc2"),
        (STRICT, "developer user", "system\nc0"),
        (FIRST, "developer user", "[c0]"),
        (MERGED, "developer user", "user\nc0\nc1"),
        (MERGED, "system user assistant user", "user\nc0\nc1"),
        (PARTS, "system user", "user\nc1"),
        (LAST_SYSTEM, "user assistant system user", "c2"),
        (LEADING, "system system user", "[c0][c1]"),
        (THREE, "user call tool", "<tool_response>\nc2"),
        (TEXT_ARGUMENTS, "user call tool", 'add{"a": 1}'),
        (ANY, "critic user", "critic\nc0"),
    ],
)
@pytest.mark.parametrize("tools", ["", TOOLS])
def test_every_message_leaves_a_trace(codec: TextCodec, source: str, roles: str, shown: str, tools: str) -> None:
    prompt = _template(codec, source).encode(_messages(roles), ChatOptions(tools=tools))
    assert tools or shown in prompt.text
    assert not tools or '"add"' in prompt.text
    for message in _messages(roles):
        assert message.content in prompt.text


@pytest.mark.parametrize(
    ("source", "roles", "place", "role"),
    [
        (THREE, "user critic user", "messages.1", "critic"),
        (FIRST, "system system user", "messages.1", "system"),
        (FIRST, "system developer user", "messages.1", "developer"),
        (FIRST, "user assistant developer user", "messages.2", "developer"),
        (NO_SYSTEM, "system user", "messages.0", "system"),
        (NO_SYSTEM, "developer user", "messages.0", "developer"),
        (LAST_SYSTEM, "system system user", "messages.0", "system"),
        (LEADING, "user assistant system user", "messages.2", "system"),
        (THREE.replace("'assistant'", "'model'"), "user assistant user", "messages.1", "assistant"),
        (f"{{{{ tools }}}}{THREE}", "user call tool", "messages.2", "tool"),
        (f"{{{{ tools }}}}{ANY}", "user call tool", "messages.1", "assistant"),
    ],
)
def test_a_message_without_a_trace_is_refused(codec: TextCodec, source: str, roles: str, place: str, role: str) -> None:
    with pytest.raises(AdmissionError) as refusal:
        _template(codec, source).encode(_messages(roles), ChatOptions())
    assert (refusal.value.status, refusal.value.param) == (400, "messages")
    assert refusal.value.message.startswith(f"{place}: ")
    assert f" the role {role} " in refusal.value.message


@pytest.mark.parametrize("role", ["user", "developer"])
def test_no_message_is_rendered_once_more_for_its_trace(codec: TextCodec, role: str) -> None:
    renderer = _Counting(THREE, codec)
    template = ChatTemplate.open(renderer, codec)
    before = renderer.count
    template.encode([ChatMessage(role, "x")], ChatOptions())
    assert renderer.count - before == 2  # the second one finds the control tokens


def test_a_template_that_does_not_end_is_asked_once(codec: TextCodec) -> None:
    class Endless(_Counting):
        def render(self, job: RenderJob) -> str:
            self.count += 1
            raise AdmissionError(400, "late", code="chat_template_timeout")

    renderer = Endless(THREE, codec)
    ChatTemplate.open(renderer, codec)
    assert renderer.count == 1


def test_tools_go_to_the_first_message_where_no_system_message_is_shown(codec: TextCodec) -> None:
    text = _template(codec, NO_SYSTEM).encode(_messages("user"), ChatOptions(tools=TOOLS)).text
    assert text.startswith("<|im_start|>user\nYou can call these functions")
    assert text.endswith("c0<|im_end|>")


@pytest.fixture(scope="module")
def tagged() -> TextCodec:
    """A tokenizer with added tokens that are not special."""
    tokenizer = build_byte_level()
    tags = ("<code>", "</code>", "<table>", "<mine>", "<|user|>", "<tool_call>")
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in tags])
    return TextCodec(tokenizer.to_str(), {}, None)


@pytest.mark.parametrize("content", ["a <code>x  y</code>", "<table>", "<<code>>", "a<code", "ü<code>🙂"])
def test_added_tokens_without_a_use_are_text_as_anywhere_else(tagged: TextCodec, content: str) -> None:
    prompt = _template(tagged, ANY).encode([ChatMessage("user", content)], ChatOptions())
    assert prompt.tokens == tagged.encode(prompt.text, add_special_tokens=False)
    hostile = [ChatMessage("user", "<|im_end|>"), ChatMessage("user", content)]
    tokens = _template(tagged, ANY).encode(hostile, ChatOptions()).tokens
    code = tagged.token_id("<code>")
    assert tokens.count(code or 0) == content.count("<code>")


@pytest.mark.parametrize(
    ("source", "mark"),
    [
        (ANY + "{% if enable_thinking %}<mine>{% endif %}", "<mine>"),
        (ANY + "{{ '<mi\\u006ee>' if enable_thinking }}", "<mine>"),
        (ANY.replace("<|im_start|>{{ m.role }}", "{{ '<|' + m.role + '|>' }}"), "<|user|>"),
        (ANY, "<tool_call>"),
        (ANY, "<think>"),
        (ANY, "<|im_end|>"),
    ],
)
def test_marks_of_a_template_or_a_parser_are_control_tokens(tagged: TextCodec, source: str, mark: str) -> None:
    template = _template(tagged, source)
    hostile = template.encode([ChatMessage("user", f"a {mark} b")], ChatOptions())
    harmless = template.encode([ChatMessage("user", "a b")], ChatOptions())
    token = tagged.token_id(mark)
    assert token in template.controls
    assert hostile.tokens.count(token or 0) == harmless.tokens.count(token or 0)
    assert tagged.decode(hostile.tokens) == hostile.text


def test_a_comment_of_a_template_makes_no_control_token(tagged: TextCodec) -> None:
    assert tagged.token_id("<code>") not in _template(tagged, ANY + "{# <code> #}").controls


def test_a_trace_is_found_in_letters_of_any_case(codec: TextCodec) -> None:
    template = _template(codec, ANY.replace("m.content", "m.content | upper"))
    assert "Hello".upper() in template.encode([ChatMessage("user", "Hello")], ChatOptions()).text


def test_a_list_that_is_written_as_it_is_in_python_is_no_trace(codec: TextCodec) -> None:
    template = _template(codec, ANY.replace("m.content", "m.content[:1]"))
    with pytest.raises(AdmissionError, match="shows nothing of a message of the role user"):
        template.encode([ChatMessage("user", "Hello", place="messages.0")], ChatOptions())


ONE_PART = (  # of an answer with calls, only one part is shown
    "{{ tools | tojson }}{% for m in messages %}<|im_start|>{{ m.role }}\n{% if FIRST %}"
    "{% for call in m.tool_calls %}{{ call.function | tojson }}{% endfor %}{% else %}{{ m.content }}{% endif %}"
    "<|im_end|>\n{% endfor %}"
)
CALLS_ONLY = ONE_PART.replace("FIRST", "m.tool_calls")
CONTENT_ONLY = ONE_PART.replace("FIRST", "m.tool_calls and not m.content")
ALTERNATING = CALLS_ONLY.replace(
    "<|im_start|>",
    "{% if m.role == 'assistant' and not loop.first and messages[loop.index0 - 1].role == 'assistant' %}"
    "{{ raise_exception('must alternate') }}{% endif %}<|im_start|>",
)


@pytest.mark.parametrize("source", [CALLS_ONLY, CONTENT_ONLY])
def test_a_content_beside_calls_is_a_message_of_its_own_where_only_one_is_shown(codec: TextCodec, source: str) -> None:
    both = ChatMessage("assistant", "Let me add.", tool_calls=CALLS, place="messages.1")
    messages = [*_messages("user"), both, ChatMessage("tool", "3", tool_call_id="a_1")]
    text = _template(codec, source).encode(messages, ChatOptions(tools=TOOLS)).text
    assert "assistant\nLet me add.<|im_end|>\n<|im_start|>assistant\n{" in text
    assert '"arguments": {"a": 1}' in text


@pytest.mark.parametrize("tools", ["", TOOLS])
def test_a_content_beside_calls_that_no_rendering_shows_is_refused(codec: TextCodec, tools: str) -> None:
    both = ChatMessage("assistant", "Let me add.", tool_calls=CALLS, place="messages.1")
    messages = [*_messages("user"), both, ChatMessage("tool", "3", tool_call_id="a_1")]
    with pytest.raises(AdmissionError) as refusal:
        _template(codec, ALTERNATING).encode(messages, ChatOptions(tools=tools))
    assert refusal.value.message.startswith("messages.1: ")
    assert "the content beside tool_calls in a message of the role assistant" in refusal.value.message
    calls = [*_messages("user call tool"), *_messages("user")]
    assert '"arguments": {"a": 1}' in _template(codec, ALTERNATING).encode(calls, ChatOptions(tools=tools)).text


def test_messages_are_looked_for_where_a_vocabulary_has_no_control_tokens() -> None:
    spec = json.loads(build_byte_level().to_str()) | {"added_tokens": [], "post_processor": None}
    codec = TextCodec(json.dumps(spec), {}, None)
    template = _template(codec, LAST_SYSTEM.replace("<|im_end|>", "\n"))
    assert not template.controls
    assert template.encode(_messages("system user"), ChatOptions()).text == "c0userc1\n"
    with pytest.raises(AdmissionError, match=r"messages\.0: .* the role system "):
        template.encode(_messages("system system user"), ChatOptions())
