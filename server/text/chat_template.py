"""Messages to prompt tokens by the model's own template. Content never becomes control tokens."""

import datetime
import json
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import cast

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from msgspec import Struct

from tiercel.errors import AdmissionError, ConfigError
from tiercel.server.text.tokenizer import TextCodec

_NEUTRAL = "x"


class ChatMessage(Struct, frozen=True):
    """One message as a template gets it."""

    role: str
    content: str
    name: str | None = None


class ChatOptions(Struct, frozen=True, kw_only=True):
    """The end of the rendering, and the switches of the template."""

    add_generation_prompt: bool = True
    continue_final_message: bool = False
    switches: tuple[tuple[str, bool], ...] = ()


class ChatPrompt(Struct, frozen=True):
    """A rendered conversation and its token ids."""

    text: str
    tokens: list[int]


class ChatTemplate:
    """The compiled template of a model. Rendering and encoding belong in a worker thread."""

    def __init__(self, source: str, codec: TextCodec, *, today: Callable[[], datetime.datetime]) -> None:
        self._codec = codec
        environment = _environment(today)
        try:
            self._variables = meta.find_undeclared_variables(environment.parse(source))
            self._template = environment.from_string(source)
        except jinja2.TemplateError as exc:
            raise ConfigError("chat_template.syntax", f"the chat template does not compile: {exc}") from exc
        self._special_text = _any_of(codec.vocabulary.special_texts)
        self._control_text = _any_of(codec.vocabulary.control_texts)

    @property
    def switches(self) -> frozenset[str]:
        """Names that the template reads and that a request may set to true or false."""
        return frozenset(self._variables) - _RESERVED - frozenset(self._codec.named_specials)

    def encode(self, messages: Sequence[ChatMessage], options: ChatOptions) -> ChatPrompt:
        """Render and tokenise messages.

        Content without control tokens gives exactly the ids of the whole rendering. Content that spells a control token
        is encoded separately, as plain text.
        Errors: AdmissionError (400) if the template refuses the messages.
        """
        text = self._render_whole(messages, options)
        tokens = self._codec.encode(text, add_special_tokens=False)
        if not self._codec.vocabulary.controls:
            return ChatPrompt(text, tokens)
        neutral = [_neutral(message) for message in messages]
        expected = self._controls_of(neutral, options)
        if not any(map(self._is_hostile, messages)) and self._controls_in(tokens) == expected:
            return ChatPrompt(text, tokens)
        answers = [own if _is_answer(own) else bare for own, bare in zip(messages, neutral, strict=True)]
        is_safe = not any(map(self._is_hostile, answers)) and self._controls_of(answers, options) == expected
        return ChatPrompt(text, self._encode_guarded(messages, options, trusts_answers=is_safe))

    def _is_hostile(self, message: ChatMessage) -> bool:
        """Return whether a message spells a control token that its role must not write.

        Messages of the assistant may spell control tokens that are not special: models write `<think>`, and templates
        remove it again.
        """
        pattern = self._special_text if _is_answer(message) else self._control_text
        return pattern is not None and bool(pattern.search(message.content) or pattern.search(message.name or ""))

    def _controls_of(self, messages: Sequence[ChatMessage], options: ChatOptions) -> list[int]:
        """Return the control tokens of a rendering, in order."""
        text = self._render_whole(messages, options)
        return self._controls_in(self._codec.encode(text, add_special_tokens=False))

    def _controls_in(self, tokens: Sequence[int]) -> list[int]:
        controls = self._codec.vocabulary.controls
        return [token for token in tokens if token in controls]

    def _encode_guarded(
        self, messages: Sequence[ChatMessage], options: ChatOptions, *, trusts_answers: bool
    ) -> list[int]:
        """Wrap contents in unguessable marks, render, and encode the text between the marks as plain text.

        With `trusts_answers` the assistant's messages are not wrapped: templates remove thoughts from earlier answers,
        which they could not do between marks.
        """
        nonce = secrets.token_hex(16)
        begin, end = f"{nonce}b", f"{nonce}e"
        marked = [
            message if trusts_answers and _is_answer(message) else _marked(message, begin, end) for message in messages
        ]
        text = self._render_whole(marked, options)
        tokens: list[int] = []
        is_content = False
        for part in re.split(f"({begin}|{end})", text):
            if part in (begin, end):
                if is_content == (part == begin):
                    raise _unguardable()
                is_content = part == begin
            elif is_content:
                tokens += self._encode_content(part)
            elif part:
                tokens += self._codec.encode(part, add_special_tokens=False)
        if is_content:
            raise _unguardable()
        return tokens

    def _encode_content(self, text: str) -> list[int]:
        tokens = self._codec.encode_plain(text)
        if self._controls_in(tokens):
            raise _unguardable()
        return tokens

    def _render_whole(self, messages: Sequence[ChatMessage], options: ChatOptions) -> str:
        """Render messages; with `continue_final_message` only up to the end of the last content.

        The end is found by a mark appended to the content. If the template trims contents, the space after the mark is
        gone; then the trailing white space of the content is dropped too.
        """
        if not options.continue_final_message:
            return self._render(messages, options)
        mark, last = secrets.token_hex(16), messages[-1]
        marked = ChatMessage(last.role, f"{last.content}{mark} ", last.name)
        text = self._render([*messages[:-1], marked], options)
        end = text.rfind(mark)
        if end < 0:
            raise AdmissionError(
                400, "The chat template does not show the final message unchanged.", param="continue_final_message"
            )
        return text[:end] if text.startswith(f"{mark} ", end) else text[:end].rstrip()

    def _render(self, messages: Sequence[ChatMessage], options: ChatOptions) -> str:
        try:
            return self._template.render(
                {
                    **self._codec.named_specials,
                    **dict(options.switches),
                    "messages": [_as_dict(message) for message in messages],
                    "tools": None,
                    "documents": None,
                    "add_generation_prompt": options.add_generation_prompt,
                }
            )
        except _RefusedByTemplate as exc:
            raise AdmissionError(400, f"The chat template refuses the messages: {exc}", param="messages") from exc
        except (jinja2.TemplateError, ArithmeticError, LookupError, TypeError, ValueError, AttributeError) as exc:
            raise AdmissionError(400, "The chat template cannot render these messages.", param="messages") from exc


_RESERVED = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "raise_exception", "strftime_now", "range", "dict"}
    | {"lipsum", "cycler", "joiner", "namespace"}
)


class _RefusedByTemplate(Exception):
    """The template called `raise_exception`."""


def _raise_exception(message: str) -> None:
    raise _RefusedByTemplate(str(message)[:500])


def _unguardable() -> AdmissionError:
    return AdmissionError(
        400, "The messages spell control tokens in a place where the chat template rewrites text.", param="messages"
    )


def _any_of(texts: Sequence[str]) -> re.Pattern[str] | None:
    longest_first = sorted(texts, key=len, reverse=True)
    return re.compile("|".join(re.escape(text) for text in longest_first)) if longest_first else None


def _is_answer(message: ChatMessage) -> bool:
    return message.role == "assistant"


def _neutral(message: ChatMessage) -> ChatMessage:
    """Return the message with its words replaced; content that is all white space stays, as templates test for it."""
    content = _NEUTRAL if message.content.strip() else message.content
    return ChatMessage(message.role, content, None if message.name is None else _NEUTRAL)


def _marked(message: ChatMessage, begin: str, end: str) -> ChatMessage:
    """Return the message with marks around its content, inside the outer white space so that trimming still works."""
    name = f"{begin}{message.name}{end}" if message.name is not None else None
    content = message.content
    core = content.strip()
    if not core:
        return ChatMessage(message.role, content, name)
    before = content[: len(content) - len(content.lstrip())]
    after = content[len(content.rstrip()) :]
    return ChatMessage(message.role, f"{before}{begin}{core}{end}{after}", name)


def _as_dict(message: ChatMessage) -> dict[str, str]:
    plain = {"role": message.role, "content": message.content}
    if message.name is not None:
        plain["name"] = message.name
    return plain


class _Generation(Extension):
    """`{% generation %}…{% endgeneration %}`, which marks the assistant's words for training: renders its body."""

    tags = {"generation"}  # noqa: RUF012 - declared so by jinja2

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment(today: Callable[[], datetime.datetime]) -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
    )
    names = cast(dict[str, object], environment.globals)  # pyright: ignore[reportUnknownMemberType] - untyped there
    names["raise_exception"] = _raise_exception

    def strftime_now(layout: str) -> str:
        return today().strftime(layout)

    names["strftime_now"] = strftime_now
    filters = cast(dict[str, object], environment.filters)  # pyright: ignore[reportUnknownMemberType] - untyped there
    filters["tojson"] = _to_json
    return environment


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON without the HTML escapes of jinja2's own filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def read_switches(values: Mapping[str, object], template: ChatTemplate) -> tuple[tuple[str, bool], ...]:
    """Check `chat_template_kwargs`: values are true or false; names that the template does not read are dropped.

    Errors: AdmissionError (400) naming the key.
    """
    switches: list[tuple[str, bool]] = []
    for name, value in values.items():
        if not isinstance(value, bool):
            raise AdmissionError(
                400, f"chat_template_kwargs.{name} must be true or false", param="chat_template_kwargs"
            )
        if name in template.switches:
            switches.append((name, value))
    return tuple(switches)
