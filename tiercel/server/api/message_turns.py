"""A request to /v1/messages as a chat request: its turns, tools and settings in the words of the chat API."""

import re
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import cast

from tiercel.server.api.renamed import renaming
from tiercel.server.api.schemas.messages import Blocks, MessagePromptFields, MessagesFields
from tiercel.server.api.schemas.structured import SchemaPaths
from tiercel.values.errors import AdmissionError

Message = dict[str, object]

_NAMES = {
    "stop": "stop_sequences",
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
    "chat_template_kwargs": "thinking",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
}
MESSAGE_PATHS = SchemaPaths("output_config.format.schema", "tools.{}.input_schema")

_EFFORTS = {"xhigh": "high", "max": "high"}  # templates know low, medium and high
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def in_words_of_messages() -> AbstractContextManager[None]:
    """Rename the chat API's fields in refusals to those of this API."""
    return renaming(_NAMES)


def prompt_body(fields: MessagePromptFields) -> dict[str, object]:
    """Return the fields of the chat API that decide what the model reads. Errors: AdmissionError (400)."""
    messages = chat_messages(fields)
    continues = messages[-1]["role"] == "assistant"
    if continues and "tool_calls" in messages[-1]:
        raise _refusal("the last message has a tool_use block: a message with its tool_result must follow")
    body: dict[str, object] = {
        "model": fields.model,
        "messages": messages,
        "add_generation_prompt": not continues,
        "continue_final_message": continues,
    }
    if fields.thinking is not None and fields.thinking.type != "adaptive":
        body["chat_template_kwargs"] = {"enable_thinking": fields.thinking.type == "enabled"}
    if fields.thinking is not None and fields.thinking.display == "omitted":
        body["include_reasoning"] = False
    if fields.output_config is not None and fields.output_config.effort is not None:
        body["reasoning_effort"] = _EFFORTS.get(fields.output_config.effort, fields.output_config.effort)
    if fields.tools:
        body["tools"] = [
            {
                "type": "function",
                "function": _set(
                    name=tool.name, description=tool.description, parameters=tool.input_schema, strict=tool.strict
                ),
            }
            for tool in fields.tools
        ]
    choice = fields.tool_choice
    if choice is not None:
        if choice.type == "tool" and choice.name is None:
            raise AdmissionError(400, "tool_choice.name is required with type tool", param="tool_choice")
        named: object = {"type": "function", "function": {"name": choice.name}}
        body["tool_choice"] = _CHOICES.get(choice.type, named)
        if choice.disable_parallel_tool_use is not None:
            body["parallel_tool_calls"] = not choice.disable_parallel_tool_use
    return body


def chat_body(fields: MessagesFields) -> dict[str, object]:
    """Return the request as the body of a chat request. Errors: AdmissionError (400)."""
    form = None if fields.output_config is None else fields.output_config.format
    return prompt_body(fields) | _set(
        max_tokens=fields.max_tokens,
        temperature=fields.temperature,
        top_p=fields.top_p,
        top_k=fields.top_k,
        stream=fields.stream,
        stream_options={"include_usage": True} if fields.stream else None,
        seed=fields.seed,
        cache_salt=fields.cache_salt,
        priority=fields.priority,
        timeout=fields.timeout,
        response_format=None
        if form is None
        else {"type": "json_schema", "json_schema": {"name": "output", "schema": form.schema_, "strict": True}},
    )


def chat_messages(fields: MessagePromptFields) -> list[Message]:
    """Return the conversation as messages of the chat API; turns of one role that follow each other become one.

    Each has its `place` in the request, for errors: that of its first turn.
    Errors: AdmissionError (400) naming a block that is wrong or not supported.
    """
    turns = _Turns()
    if fields.system:
        turns.add_texts("system", _texts(fields.system, "system"))
    for number, turn in enumerate(fields.messages):
        place = turns.place = f"messages.{number}"
        if isinstance(turn.content, str) or turn.role == "system":
            turns.add_texts(turn.role, _texts(turn.content, place))
        else:
            if turn.role == "assistant" or not turn.content:
                turns.add_texts(turn.role, [])  # an empty turn is a turn
            for index, block in enumerate(turn.content):
                turns.add_block(turn.role, block, f"{place}.content.{index}")
    for message in turns.messages:  # growing one text would copy it for each block
        if isinstance(thoughts := message.get("reasoning_content"), list):
            message["reasoning_content"] = "\n".join(cast(list[str], thoughts))
    return turns.messages


class _Turns:
    """The messages of a conversation while its blocks are read."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.place = "system"  # of the turn that is being read
        self._calls: set[str] = set()  # ids of tool_use blocks

    def add_texts(self, role: str, texts: list[str]) -> None:
        """Add text."""
        parts = [{"type": "text", "text": text} for text in texts]
        self._list(self._last(role), "content").extend(parts)

    def add_block(self, role: str, block: Mapping[str, object], place: str) -> None:
        """Add a block of one turn. Errors: AdmissionError (400)."""
        match role, block.get("type"):
            case _, "text":
                self.add_texts(role, [_text(block, "text", place)])
            case "assistant", "thinking":
                if thought := _text(block, "thinking", place):
                    self._list(self._last(role), "reasoning_content").append(thought)
                else:
                    self._last(role)
            case "assistant", "redacted_thinking":
                self._last(role)  # nobody here can read it
            case "assistant", "tool_use":
                self._add_call(block, place)
            case "user", "tool_result":
                self._add_result(block, place)
            case _, kind:
                raise _unsupported(role, kind, place)

    def _add_call(self, block: Mapping[str, object], place: str) -> None:
        id, arguments = _text(block, "id", place), block.get("input")
        if not isinstance(arguments, dict):
            raise _refusal(f"{place}: input must be an object")
        self._calls.add(id)
        function: dict[str, object] = {"name": _text(block, "name", place), "arguments": cast(object, arguments)}
        self._list(self._last("assistant"), "tool_calls").append({"id": id, "type": "function", "function": function})

    def _add_result(self, block: Mapping[str, object], place: str) -> None:
        id, content = _text(block, "tool_use_id", place), block.get("content")
        if id not in self._calls:
            raise _refusal(f"{place}: no tool_use block before it has the id in tool_use_id")
        texts = [] if content is None else _texts(content, place)
        self.messages.append({"role": "tool", "tool_call_id": id, "content": "\n".join(texts), "place": self.place})

    def _last(self, role: str) -> Message:
        """Return the last message if it has this role, otherwise a new one."""
        if not self.messages or self.messages[-1]["role"] != role:
            self.messages.append({"role": role, "content": [], "place": self.place})
        return self.messages[-1]

    @staticmethod
    def _list(message: Message, name: str) -> list[object]:
        return cast(list[object], message.setdefault(name, []))


def _texts(content: Blocks | object, place: str) -> list[str]:
    """Return the texts of a content that may have text blocks only. Errors: AdmissionError (400)."""
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list):
        raise _refusal(f"{place}: content must be a text or a list of blocks")
    texts: list[str] = []
    for index, block in enumerate(cast(list[object], content)):
        where = f"{place}.content.{index}"
        if not isinstance(block, dict):
            raise _refusal(f"{where}: a block must be an object")
        entry = cast(dict[str, object], block)
        if entry.get("type") != "text":
            raise _unsupported("this", entry.get("type"), where)
        texts.append(_text(entry, "text", where))
    return texts


def _text(block: Mapping[str, object], name: str, place: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise _refusal(f"{place}: {name} must be a text")
    return value


def _set(**values: object) -> dict[str, object]:
    """Return the values that are not None."""
    return {name: value for name, value in values.items() if value is not None}


def _refusal(message: str) -> AdmissionError:
    return AdmissionError(400, message, param="messages")


def _unsupported(role: str, kind: object, place: str) -> AdmissionError:
    shown = re.sub(r"[^A-Za-z0-9_.-]", "?", kind[:64]) if isinstance(kind, str) else "that is not a text"
    holder = "here" if role == "this" else f"in a {role} message"
    return AdmissionError(
        400,
        f"{place}: a block of type {shown} is not supported {holder}",
        code="unsupported_parameter",
        param="messages",
    )
