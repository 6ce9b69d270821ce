"""The traces that a conversation leaves in a rendering, found once with small conversations of words to look for."""

import json
import re
from collections.abc import Iterator
from typing import Protocol

from msgspec import Struct

from tiercel.server.text.template_frames import ChatMessage, RenderJob
from tiercel.values.errors import AdmissionError

_WORDS = {
    "user": "usertrace",
    "system": "systemtrace",
    "developer": "developertrace",
    "assistant": "wordtrace",
    "tool": "resulttrace",
}
_BESIDE = "besidetrace"  # a content beside calls
_FUNCTION, _ARGUMENT = "call_trace", "argumenttrace"
_CALL_ID = "trace0000"  # Mistral's templates want nine letters or digits
_MAX_LETTERS = 1024 * 1024
_TOOLS = json.dumps(
    [
        {
            "type": "function",
            "function": {
                "name": _FUNCTION,
                "description": "Traces.",
                "parameters": {"type": "object", "properties": {"word": {"type": "string", "description": "A word."}}},
            },
        }
    ]
)
_CALLS = json.dumps(
    [{"id": _CALL_ID, "type": "function", "function": {"name": _FUNCTION, "arguments": {"word": _ARGUMENT}}}]
)
_CONVERSATIONS = {
    "user": ("user", "system user"),
    "system": ("system user", "system user assistant user"),
    "later system": (
        *("user assistant system user", "lead user assistant system user", "user system user"),
        "lead system user",
    ),
    "developer": ("developer user", "developer user assistant user"),
    "later developer": ("user assistant developer user", "lead user assistant developer user", "user developer user"),
    "assistant": ("user assistant user", "system user assistant user"),
    "tool": ("user call tool", "user call tool assistant user", "system user call tool"),
}
"""For each role, conversations of which a template that knows the role accepts and shows one. `later`: templates take
these roles in the first message only, or show them nowhere else."""
_PART_IN_PYTHON = "{'type': 'text'"  # a list that the template took for a text
_TURNS = "user assistant user"
_HALF_MARK = re.compile(r"[<\[][^<>\[\]\s]*$")


class Rendering(Protocol):
    """Renders one template; see `TemplatePool`."""

    def render(self, job: RenderJob) -> str:
        """Return the rendered conversation. Errors: AdmissionError."""
        ...


class TemplateTraces(Struct, frozen=True, kw_only=True):
    """The traces that a conversation leaves in the rendering of one template.

    `roles` and `roles_with_tools` are the keys of `_CONVERSATIONS` of which a message leaves a trace in the prompt,
    without and with tools; None if the template renders none of the conversations, so that nothing is known.
    """

    roles: frozenset[str] | None
    roles_with_tools: frozenset[str] | None
    part_roles: frozenset[str] = frozenset()  # of which it shows contents that are lists of parts only
    has_text_arguments: bool = False  # it shows calls if their arguments are texts only
    shows_tools: bool | None = None  # a conversation with tools is rendered otherwise; None if it is not known
    splits_calls: bool = False  # it shows a content beside calls only as a message of its own
    call: str | None = None  # the answer that calls `TRACED_NAME` with `TRACED_ARGUMENTS`; None if it shows no calls
    before_content: str = ""  # what it writes between the beginning of an answer and the content
    between: str | None = None  # what it writes between messages and before an answer; None if it is not known
    rendered: str = ""  # all that was rendered

    def shows(self, role: str, *, is_first: bool, with_tools: bool) -> bool:
        """Return whether a message of the role leaves a trace in this place; True for roles that were not tried."""
        roles = self.roles_with_tools if with_tools else self.roles
        later = f"later {role}"
        key = later if later in _CONVERSATIONS and not is_first else role
        return roles is None or key in roles or key not in _CONVERSATIONS


TRACED_NAME = _FUNCTION
TRACED_ARGUMENTS = {"word": _ARGUMENT}


def read_traces(renderer: Rendering, *, knows_tools: bool) -> TemplateTraces:
    """Render the conversations, each with and without tools. A template that refuses a conversation does not show it.

    Cost: about 42 renderings. A template that does not end is asked no further: nothing is known of it then.
    """
    prober = _Prober(renderer)
    roles = prober.roles("")
    with_tools = prober.roles(_TOOLS) if knows_tools else roles
    if prober.is_lost:
        return TemplateTraces(roles=None, roles_with_tools=None)
    known = _TOOLS if knows_tools else ""
    call = _behind(prober.render("user assistant", known), prober.render("user call", known))
    prompt = prober.render("user", "", add_generation_prompt=True)
    before, word, _ = _behind(prompt, prober.render("user assistant", "")).partition(_WORDS["assistant"])
    return TemplateTraces(
        roles=roles,
        roles_with_tools=with_tools,
        part_roles=frozenset(prober.part_roles),
        has_text_arguments=prober.has_text_arguments,
        shows_tools=None if with_tools is None else any(map(prober.changes_with_tools, _CONVERSATIONS["user"])),
        splits_calls=prober.splits_calls(known),
        call=call if _FUNCTION in call else None,
        before_content=before if word else "",
        between=_between(prober.render(_TURNS, "", add_generation_prompt=True))
        or _between(prober.render(_TURNS, known, add_generation_prompt=True)),
        rendered=prober.plain + prober.with_tools,
    )


def _behind(one: str | None, other: str | None) -> str:
    """Return the end of the second text, from the first mark or letter that differs; "" if one was not rendered."""
    if one is None or other is None:
        return ""
    same = next((place for place, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), len(one))
    half = _HALF_MARK.search(other, 0, same)
    return other[same if half is None else half.start() :]


def _between(turns: str | None) -> str | None:
    """Return a rendering of `_TURNS` behind the first content, which may have a system message before it."""
    return None if turns is None else turns.partition(_WORDS["user"])[2]


class _Prober:
    """Renders conversations of words, and keeps what was rendered."""

    def __init__(self, renderer: Rendering) -> None:
        self._renderer = renderer
        self.part_roles: set[str] = set()
        self.has_text_arguments = False
        self.plain = ""
        self.with_tools = ""
        self.is_lost = False  # a rendering did not end

    def roles(self, tools: str) -> frozenset[str] | None:
        """Return the roles of which a message leaves a trace; None if no conversation was rendered."""
        shown: set[str] = set()
        is_rendered = False
        for key in _CONVERSATIONS:
            for text in self._texts(key, tools):
                is_rendered = True
                if _has_word(key, text):
                    shown.add(key)
                    break
            else:
                if self._shows_parts(key, tools) or (key == "tool" and self._shows_text_arguments(tools)):
                    shown.add(key)
        return frozenset(shown) if is_rendered else None

    def changes_with_tools(self, conversation: str) -> bool:
        """Return whether a conversation is rendered with tools, and otherwise than without."""
        text = self.render(conversation, _TOOLS)
        return text is not None and text != self.render(conversation, "")

    def splits_calls(self, tools: str) -> bool:
        """Return whether a content and calls both leave a trace only if the content is a message of its own."""
        together = self.render("user both tool assistant user", tools)
        apart = self.render("user beside call tool assistant user", tools)
        return _has_both(apart) and not _has_both(together)

    def _shows_parts(self, key: str, tools: str) -> bool:
        """Return whether contents that are lists of parts leave a trace, and note the role if so."""
        role = key.removeprefix("later ")
        if role in self.part_roles:
            return False
        self.part_roles.add(role)
        if any(_has_word(key, text) and _PART_IN_PYTHON not in text for text in self._texts(key, tools)):
            return True
        self.part_roles.discard(role)
        return False

    def _shows_text_arguments(self, tools: str) -> bool:
        """Return whether results of calls whose arguments are texts leave a trace, and note it if so."""
        if self.has_text_arguments:
            return False
        self.has_text_arguments = True
        if any(_has_word("tool", text) for text in self._texts("tool", tools)):
            return True
        self.has_text_arguments = False
        return False

    def _texts(self, key: str, tools: str) -> Iterator[str]:
        for conversation in _CONVERSATIONS[key]:
            text = self.render(conversation, tools)
            if text is not None:
                yield text

    def render(self, conversation: str, tools: str, *, add_generation_prompt: bool = False) -> str | None:
        """Return a rendered conversation; None if the template refuses it."""
        if self.is_lost:
            return None
        job = RenderJob(
            messages=[_message(kind) for kind in conversation.split()],
            switches={},
            add_generation_prompt=add_generation_prompt,
            max_letters=_MAX_LETTERS,
            tools=tools,
            part_roles=frozenset(self.part_roles),
            has_text_arguments=self.has_text_arguments,
        )
        try:
            text = self._renderer.render(job)
        except AdmissionError as exc:
            self.is_lost = exc.code in ("chat_template_timeout", "chat_template_failed")
            return None
        if tools:
            self.with_tools += text
        else:
            self.plain += text
        return text


def _has_word(key: str, text: str) -> bool:
    """Return whether a rendering has the word of a role, in letters of any case."""
    return _WORDS[key.removeprefix("later ")] in text.lower()


def _has_both(text: str | None) -> bool:
    """Return whether a rendering has a content beside calls, and the calls."""
    return text is not None and _BESIDE in text.lower() and _ARGUMENT in text.lower()


def _message(kind: str) -> ChatMessage:
    match kind:
        case "call":
            return ChatMessage("assistant", "", tool_calls=_CALLS)
        case "both":
            return ChatMessage("assistant", _BESIDE, tool_calls=_CALLS)
        case "beside":
            return ChatMessage("assistant", _BESIDE)
        case "tool":
            return ChatMessage("tool", _WORDS["tool"], _FUNCTION, tool_call_id=_CALL_ID)
        case "lead":
            return ChatMessage("system", "leadtrace")
        case role:
            return ChatMessage(role, _WORDS[role])
