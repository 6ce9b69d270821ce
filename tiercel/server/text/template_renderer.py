"""Rendering of a chat template by jinja2, in a sandbox."""

import datetime
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import cast

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tiercel.server.text.template_frames import ChatMessage, RenderJob
from tiercel.values.errors import AdmissionError, ConfigError

_FAILURES = (
    *(jinja2.TemplateError, ArithmeticError, LookupError, TypeError, ValueError, AttributeError),
    RecursionError,
)
_SHOWN = 120  # letters of a line of a template


class TemplateRenderer:
    """A compiled template. A rendering may take any time: `TemplatePool` renders in a process that can be killed."""

    def __init__(
        self,
        source: str,
        specials: Mapping[str, str],
        tool_source: str | None = None,
        *,
        today: Callable[[], datetime.datetime],
    ) -> None:
        """Compile a template. `tool_source`: see `TemplateSource.tool_text`. Errors: ConfigError."""
        self._specials = specials
        environment = _environment(today)
        sources = (source,) if tool_source is None else (source, tool_source)
        try:
            trees = [environment.parse(text) for text in sources]
            self.variables = frozenset[str]().union(*map(meta.find_undeclared_variables, trees))
            self.literals = frozenset(text for tree in trees for text in _literals(tree))
            self._template, *_ = templates = [environment.from_string(text) for text in sources]
            self._tool_template = templates[-1]
        except (jinja2.TemplateError, MemoryError, RecursionError) as exc:
            raise ConfigError(
                "chat_template.syntax", f"the chat template does not compile: {_fault_of(exc, sources)}"
            ) from exc

    def render(self, job: RenderJob) -> str:
        """Return the rendered conversation. Errors: AdmissionError (400)."""
        values = {
            **self._specials,
            **job.switches,
            "messages": [_as_dict(message, job) for message in job.messages],
            "tools": json.loads(job.tools) if job.tools else None,
            "documents": None,
            "add_generation_prompt": job.add_generation_prompt,
        }
        parts: list[str] = []
        letters = 0
        has_tools = bool(job.tools) or any(one.tool_calls or one.role == "tool" for one in job.messages)
        template = self._tool_template if has_tools else self._template
        try:
            for part in template.generate(values):
                letters += len(part)
                if letters > job.max_letters:
                    raise _refusal("The chat template writes too much text.", "chat_template_limit")
                parts.append(part)
            return "".join(parts)
        except _RefusedByTemplate as exc:
            raise _refusal(f"The chat template refuses the messages: {exc}") from exc
        except MemoryError as exc:
            parts.clear()
            raise _refusal("The chat template needs too much memory.", "chat_template_limit") from exc
        except _FAILURES as exc:
            raise _refusal("The chat template cannot render these messages.") from exc

    def close(self) -> None:
        """Do nothing: there is no process."""


def _fault_of(error: BaseException, sources: Sequence[str]) -> str:
    """Return why a template does not compile, in our words: jinja's own sentences are about its parser."""
    if isinstance(error, MemoryError):
        return "it needs too much memory"
    if isinstance(error, RecursionError):
        return "it nests too deep"
    if not isinstance(error, jinja2.TemplateSyntaxError):
        return "it is no valid Jinja"
    is_unknown = isinstance(error, jinja2.TemplateAssertionError)
    what = "a filter or a test that does not exist" if is_unknown else "no valid Jinja"
    source = sources[0] if error.source is None and len(sources) == 1 else error.source
    lines = (source or "").splitlines()
    shown = f": {lines[error.lineno - 1].strip()[:_SHOWN]}" if 0 < error.lineno <= len(lines) else ""
    return f"line {error.lineno} has {what}{shown}"


def _refusal(message: str, code: str = "invalid_value") -> AdmissionError:
    return AdmissionError(400, message, code=code, param="messages")


class _RefusedByTemplate(Exception):
    """The template called `raise_exception`."""


def _raise_exception(message: str) -> None:
    raise _RefusedByTemplate(str(message)[:500])


def _literals(tree: nodes.Template) -> Iterator[str]:
    """Yield the texts that a template has in itself: between its tags, and as constants."""
    for node in tree.find_all((nodes.TemplateData, nodes.Const)):
        text: object = node.data if isinstance(node, nodes.TemplateData) else node.value
        if isinstance(text, str):
            yield text


def _as_dict(message: ChatMessage, job: RenderJob) -> dict[str, object]:
    has_parts = message.role in job.part_roles
    content = [{"type": "text", "text": message.content}] if has_parts else message.content
    fields: dict[str, object] = {"role": message.role, "content": content}
    if message.name is not None:
        fields["name"] = message.name
    if message.tool_calls:
        calls = cast(list[dict[str, dict[str, object]]], json.loads(message.tool_calls))
        if job.has_text_arguments:
            for call in calls:
                arguments = call["function"]["arguments"]
                call["function"]["arguments"] = arguments if isinstance(arguments, str) else _to_json(arguments)
        fields["tool_calls"] = calls
    if message.tool_call_id is not None:
        fields["tool_call_id"] = message.tool_call_id
    if message.thoughts is not None:
        fields["reasoning_content"] = message.thoughts
    return fields


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
