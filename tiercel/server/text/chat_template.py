"""Messages to prompt tokens by the model's own template. Content never becomes control tokens."""

import contextlib
import re
import secrets
from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from msgspec import Struct
from msgspec.structs import replace

from tiercel.server.text.answer.reader import READ_MARKS
from tiercel.server.text.marking import (
    changed_message,
    changed_tools,
    marker,
    neutral_text,
    texts_match,
    traced_message,
    traces_in,
)
from tiercel.server.text.template_frames import ChatMessage, RenderJob
from tiercel.server.text.template_traces import Rendering, TemplateTraces, read_traces
from tiercel.server.text.tokenizer import TextCodec
from tiercel.server.text.tool_prompt import PROMPT_MARKS, described
from tiercel.server.text.vocabulary import Vocabulary
from tiercel.values.errors import AdmissionError

_GROWTH = 4  # letters that a template may write for one letter of the messages: it escapes or repeats some
_FRAME_LETTERS = 1024 * 1024  # that it may write besides: 512 around each of 2,048 messages


class ChatOptions(Struct, frozen=True, kw_only=True):
    """The end of the rendering, and the switches of the template."""

    add_generation_prompt: bool = True
    continue_final_message: bool = False
    switches: tuple[tuple[str, bool | str], ...] = ()
    tools: str = ""  # see `RenderJob`
    most_tokens: int | None = None  # of the prompt


class ChatPrompt(Struct, frozen=True):
    """A rendered conversation and its token ids."""

    text: str
    tokens: list[int]


class TemplateRendering(Rendering, Protocol):
    """Renders one template; see `TemplatePool`."""

    @property
    def variables(self) -> frozenset[str]:
        """The names that the template reads."""
        ...

    @property
    def literals(self) -> frozenset[str]:
        """The texts that the template has in itself."""
        ...

    def close(self) -> None:
        """End the processes that render."""
        ...


class ChatTemplate:
    """The template of a model: the only way from messages to a prompt. Encoding belongs in a worker thread."""

    def __init__(self, renderer: TemplateRendering, codec: TextCodec, traces: TemplateTraces) -> None:
        """See `open`."""
        self._codec = codec
        self._renderer = renderer
        self._traces = traces
        controls = _control_tokens(codec.vocabulary, renderer.literals, traces)
        self.controls = frozenset(controls.values())
        self.control_texts = frozenset(controls)
        self._plain = codec.without(controls)
        self._special_text = _any_of(codec.vocabulary.special_texts)
        self._control_text = _any_of(tuple(controls))
        self.visible_marks = _unread_marks(codec, renderer.literals, traces)

    @staticmethod
    def open(renderer: TemplateRendering, codec: TextCodec) -> "ChatTemplate":
        """Return the template that a renderer renders, and close the renderer if that fails."""
        with contextlib.ExitStack() as opened:
            opened.callback(renderer.close)
            traces = read_traces(renderer, knows_tools="tools" in renderer.variables)
            template = ChatTemplate(renderer, codec, traces)
            opened.pop_all()
        return template

    @property
    def switches(self) -> frozenset[str]:
        """Names that the template reads and that a request may set to true or false."""
        return self._renderer.variables - _RESERVED - frozenset(self._codec.named_specials)

    @property
    def knows_tools(self) -> bool:
        """True if the template shows tools. For one that does not, `tool_prompt` describes them."""
        return "tools" in self._renderer.variables and self._traces.shows_tools is not False

    @property
    def call(self) -> str | None:
        """An answer with a call, as the template writes it: see `TemplateTraces`."""
        return self._traces.call

    @property
    def texts(self) -> frozenset[str]:
        """Names of `TEXT_VARIABLES` that the template reads."""
        return self._renderer.variables & TEXT_VARIABLES

    def close(self) -> None:
        """End the processes that render."""
        self._renderer.close()

    def encode(self, messages: Sequence[ChatMessage], options: ChatOptions) -> ChatPrompt:
        """Render and tokenise messages.

        Content without control tokens gives exactly the ids of the whole rendering. Content that spells a control token
        is encoded separately, as plain text.
        Errors: AdmissionError (400) if the template refuses the messages; LongTextError.
        """
        messages = self._with_known_roles(messages, with_tools=bool(options.tools))
        if self.knows_tools and self._traces.splits_calls:
            messages = _with_calls_apart(messages, keeps_last=options.continue_final_message)
        if not self.knows_tools and (options.tools or any(map(_has_tools, messages))):
            has_system = self._traces.shows("system", is_first=True, with_tools=False)
            messages = described(messages, options.tools, has_system=has_system)
            options = replace(options, tools="")
        text = self._render_whole(messages, options)
        tokens = self._codec.encode(text, add_special_tokens=False, most_tokens=options.most_tokens)
        pattern = self._control_text
        neutral = [traced_message(message, index) for index, message in enumerate(messages)]
        bare_options = replace(options, tools=changed_tools(options.tools, neutral_text, pattern))
        traced = self._render_whole(neutral, bare_options)
        _check_traces(neutral, traced)
        if pattern is None:
            return ChatPrompt(text, tokens)
        expected = self._controls_in(self._codec.encode(traced, add_special_tokens=False))
        is_hostile = any(map(self._is_hostile, messages)) or texts_match(options.tools, pattern)
        if not is_hostile and self._controls_in(tokens) == expected:
            return ChatPrompt(text, tokens)
        answers = [
            changed_message(own, neutral_text, keeps_content=True) if _is_answer(own) else bare
            for own, bare in zip(messages, neutral, strict=True)
        ]
        is_safe = not any(map(self._is_hostile, answers)) and self._controls_of(answers, bare_options) == expected
        return ChatPrompt(text, self._encode_guarded(messages, options, trusts_answers=is_safe))

    def _with_known_roles(self, messages: Sequence[ChatMessage], *, with_tools: bool) -> Sequence[ChatMessage]:
        """Return messages whose roles the template shows: one that does not know `developer` gets `system`.

        Errors: AdmissionError (400) naming a message of which the prompt would show nothing.
        """
        traces, known = self._traces, list[ChatMessage]()
        for index, message in enumerate(messages):
            is_first = index == 0
            if message.role == "developer" and not traces.shows("developer", is_first=is_first, with_tools=with_tools):
                message = replace(message, role="system", sent_role="developer")
            is_described = message.role == "tool" and not self.knows_tools
            if not (is_described or traces.shows(message.role, is_first=is_first, with_tools=with_tools)):
                raise _unshown(message)
            known.append(message)
        return known

    def _is_hostile(self, message: ChatMessage) -> bool:
        """Return whether a message spells a control token that its role must not write.

        Contents of the assistant may spell control tokens that are not special: models write `<think>`, and templates
        remove it again.
        """
        pattern = self._control_text
        if pattern is None:
            return False
        of_content = self._special_text if _is_answer(message) else pattern
        others = (message.name, message.tool_call_id, message.thoughts)
        return (
            (of_content is not None and of_content.search(message.content) is not None)
            or any(text is not None and pattern.search(text) is not None for text in others)
            or texts_match(message.tool_calls, pattern)
        )

    def _controls_of(self, messages: Sequence[ChatMessage], options: ChatOptions) -> list[int]:
        """Return the control tokens of a rendering, in order."""
        text = self._render_whole(messages, options)
        return self._controls_in(self._codec.encode(text, add_special_tokens=False))

    def _controls_in(self, tokens: Sequence[int]) -> list[int]:
        return [token for token in tokens if token in self.controls]

    def _encode_guarded(
        self, messages: Sequence[ChatMessage], options: ChatOptions, *, trusts_answers: bool
    ) -> list[int]:
        """Wrap contents in unguessable marks, render, and encode the text between the marks as plain text.

        With `trusts_answers` the assistant's contents are not wrapped: templates remove thoughts from earlier answers,
        which they could not do between marks.
        """
        nonce = secrets.token_hex(16)
        begin, end = f"{nonce}b", f"{nonce}e"
        mark = marker(begin, end)
        marked = [
            changed_message(message, mark, keeps_content=trusts_answers and _is_answer(message)) for message in messages
        ]
        tools = changed_tools(options.tools, mark, self._control_text)
        text = self._render_whole(marked, replace(options, tools=tools))
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
        tokens = self._plain.encode(text)
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
        marked = replace(last, content=f"{last.content}{mark} ")
        text = self._render([*messages[:-1], marked], options)
        end = text.rfind(mark)
        if end < 0:
            raise AdmissionError(
                400, "The chat template does not show the final message unchanged.", param="continue_final_message"
            )
        return text[:end] if text.startswith(f"{mark} ", end) else text[:end].rstrip()

    def _render(self, messages: Sequence[ChatMessage], options: ChatOptions) -> str:
        letters = sum(message.letters for message in messages) + len(options.tools)
        job = RenderJob(
            messages=list(messages),
            switches=dict(options.switches),
            add_generation_prompt=options.add_generation_prompt,
            max_letters=_GROWTH * letters + _FRAME_LETTERS,
            tools=options.tools,
            part_roles=self._traces.part_roles,
            has_text_arguments=self._traces.has_text_arguments,
        )
        return self._renderer.render(job)


TEXT_VARIABLES = frozenset({"reasoning_effort", "verbosity"})
"""Names of fields of a request that a template may read."""

_RESERVED = TEXT_VARIABLES | frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "raise_exception", "strftime_now", "range", "dict"}
    | {"lipsum", "cycler", "joiner", "namespace"}
)


def _control_tokens(vocabulary: Vocabulary, literals: Collection[str], traces: TemplateTraces) -> dict[str, int]:
    """Return the control tokens by their text: what is special, and what the template or a parser uses as a mark."""
    text = "\0".join((*literals, traces.rendered))
    added = {
        mark: token
        for mark, token in vocabulary.added_marks.items()
        if mark in READ_MARKS or mark in PROMPT_MARKS or mark in text
    }
    return vocabulary.special_id_by_text | added


def _unread_marks(codec: TextCodec, literals: Collection[str], traces: TemplateTraces) -> frozenset[str]:
    """Return the special tokens that the template uses as marks within an answer.

    They are not those between messages, unless the template writes special tokens before a content (gpt-oss): then its
    answers consist of messages.
    """
    between = traces.between
    if between is None:
        return frozenset()
    specials = set(codec.special_texts) - set(codec.named_specials.values())
    text = "\0".join((*literals, traces.rendered))
    used = {mark for mark in specials if mark in text}
    if any(mark in traces.before_content for mark in used - READ_MARKS):
        return frozenset(used)
    return frozenset(mark for mark in used if mark not in between)


def _check_traces(neutral: Sequence[ChatMessage], rendered: str) -> None:
    """Check that each content, and the calls of each message, left a trace.

    Errors: AdmissionError (400) naming the first that did not.
    """
    contents, calls = traces_in(rendered)
    for index, message in enumerate(neutral):
        if message.content.strip() and index not in contents:
            raise _unshown(message, "the content beside tool_calls in " if index in calls else "")
        if message.tool_calls and index not in calls:
            raise _unshown(message, "the tool_calls of ")


def _with_calls_apart(messages: Sequence[ChatMessage], *, keeps_last: bool) -> list[ChatMessage]:
    """Return messages of which none has both a content and calls: the content is a message of its own before them.

    `keeps_last`: the last message stays as it is, because the answer continues it.
    """
    apart: list[ChatMessage] = []
    for index, message in enumerate(messages):
        is_last = index == len(messages) - 1
        if message.tool_calls and message.content.strip() and not (is_last and keeps_last):
            apart += [replace(message, tool_calls=""), replace(message, content="", thoughts=None)]
        else:
            apart.append(message)
    return apart


def _unshown(message: ChatMessage, part: str = "") -> AdmissionError:
    role = message.sent_role or message.role
    return AdmissionError(
        400,
        f"{message.place}: the chat template of this model shows nothing of {part}a message of the role {role} in this"
        " place",
        param=message.place.partition(".")[0],
    )


def _unguardable() -> AdmissionError:
    return AdmissionError(
        400, "The messages spell control tokens in a place where the chat template rewrites text.", param="messages"
    )


def _any_of(texts: Sequence[str]) -> re.Pattern[str] | None:
    longest_first = sorted(texts, key=len, reverse=True)
    return re.compile("|".join(re.escape(text) for text in longest_first)) if longest_first else None


def _is_answer(message: ChatMessage) -> bool:
    return message.role == "assistant"


def _has_tools(message: ChatMessage) -> bool:
    return bool(message.tool_calls) or message.role == "tool"


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
