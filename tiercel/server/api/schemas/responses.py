"""The body of /v1/responses, and what its fields mean for the chat API."""

from collections.abc import Collection, Mapping
from typing import Annotated, Literal, cast

from pydantic import Field, SkipValidation

from tiercel.server.api.schemas.fields import Fields, Flag, Integer, Metadata
from tiercel.server.api.schemas.sampling import SamplingFields
from tiercel.values.errors import AdmissionError

MAX_TOOLS = 128

ShortText = Annotated[str, Field(max_length=512)]
LOGPROBS = "message.output_text.logprobs"
Includable = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "message.input_image.image_url",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
]

_REFUSED: dict[str, str] = {
    "prompt": "prompt templates are not stored here; send instructions and input",
    "moderation": "this server has no moderation model",
    "context_management": "conversations are not compacted here; use truncation",
    "max_tokens": "use max_output_tokens",
    "max_completion_tokens": "use max_output_tokens",
    "messages": "use input",
    "response_format": "use text.format",
    "prompt_logprobs": "use /v1/completions or /v1/chat/completions",
    "return_token_ids": "use /v1/completions or /v1/chat/completions",
    "return_tokens_as_token_ids": "use /v1/completions or /v1/chat/completions",
    "functions": "use tools",
    "function_call": "use tool_choice",
}


class ReasoningFields(Fields):
    """The settings of the thoughts. A summary is never made: the model's own words are returned."""

    effort: Annotated[str, Field(max_length=32)] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class TextFields(Fields):
    """The form of the text. `chat_fields` turns `format` into `response_format`."""

    format: dict[str, object] | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ConversationRefFields(Fields):
    """A conversation, as an object."""

    id: Annotated[str, Field(max_length=128)]


class ResponseStreamOptions(Fields):
    """The options of a stream."""

    include_obfuscation: Flag | None = None


class ResponseInputFields(Fields):
    """The fields that decide what the model reads: the body of /v1/responses/input_tokens."""

    model: str | None = None
    input: Annotated[
        SkipValidation[str | list[dict[str, object]] | None],
        Field(
            description="A text, or items: `message`, `function_call`, `function_call_output`, `reasoning`, ... Without"
            " it the model reads the conversation and the instructions; if there are none, an empty message."
        ),
    ] = None  # checked by `read_items`
    instructions: Annotated[
        str | None,
        Field(description="A system message before the conversation; not carried over by `previous_response_id`."),
    ] = None
    previous_response_id: Annotated[
        Annotated[str, Field(max_length=128)] | None,
        Field(description="The conversation of a stored response goes before `input`."),
    ] = None
    conversation: Annotated[
        Annotated[str, Field(max_length=128)] | ConversationRefFields | None,
        Field(
            description="The id of a conversation, also as `{id}`: its items go before `input`, and those of the turn"
            " are added to it when the response has ended. Not with `previous_response_id`."
        ),
    ] = None
    reasoning: Annotated[
        ReasoningFields | None,
        Field(
            description="`effort` is passed to templates that read it; `summary` is ignored: thoughts are sent as such."
        ),
    ] = None
    text: Annotated[
        TextFields | None,
        Field(
            description="`format`: text, json_object or json_schema; `verbosity` is passed to templates that read it."
        ),
    ] = None
    tools: Annotated[list[dict[str, object]], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: str | dict[str, object] | None = None
    parallel_tool_calls: Annotated[
        Flag | None, Field(description="Allows several calls in one answer; as in chat.")
    ] = None
    truncation: Annotated[
        Literal["auto", "disabled"] | None,
        Field(
            description="`auto` leaves out the oldest turns of a conversation that is too long; `disabled` refuses it."
        ),
    ] = None

    @property
    def conversation_id(self) -> str | None:
        """The id of the conversation, if there is one."""
        one = self.conversation
        return one.id if isinstance(one, ConversationRefFields) else one


class ResponseFields(ResponseInputFields):
    """The body of /v1/responses, without the fields of `SamplingFields` that are passed on as they are."""

    stream: Flag | None = None
    stream_options: ResponseStreamOptions | None = None
    store: Flag | None = None
    background: Annotated[
        Flag | None,
        Field(description="Answers at once and goes on without a connection; not with `stream` or `store: false`."),
    ] = None
    include: Annotated[
        list[Includable] | None,
        Field(description="`message.output_text.logprobs` adds log-probabilities; other names of OpenAI are ignored."),
    ] = None
    metadata: Metadata | None = None
    max_output_tokens: Annotated[
        Annotated[Integer, Field(ge=1)] | None,
        Field(description="Maximum number of output tokens; by default the rest of the context."),
    ] = None
    max_tool_calls: Annotated[
        Annotated[Integer, Field(ge=0)] | None,
        Field(description="Returned, and otherwise ignored: it limits hosted tools."),
    ] = None
    top_logprobs: Annotated[Integer, Field(ge=0)] | None = None
    prompt_cache_key: Annotated[
        ShortText | None, Field(description="Returned, and otherwise ignored: cached blocks are found by their tokens.")
    ] = None
    prompt_cache_retention: Annotated[
        Annotated[str, Field(max_length=32)] | None, Field(description="Ignored: the operator configures the cache.")
    ] = None
    safety_identifier: Annotated[
        ShortText | None, Field(description="Returned, and otherwise ignored: the key decides whose request it is.")
    ] = None
    service_tier: Annotated[str, Field(max_length=32)] | None = None
    user: ShortText | None = None

    @property
    def wants_logprobs(self) -> bool:
        """Whether the text comes with log-probabilities."""
        return LOGPROBS in (self.include or ()) or bool(self.top_logprobs)


_PASSED_ON = frozenset(SamplingFields.model_fields).difference(ResponseFields.model_fields, _REFUSED, ("n",)) | {
    *("model", "temperature", "top_p", "stream")
}


def refused_names() -> Collection[str]:
    """Return the fields that are refused: of other APIs, and of this one as far as the server does not have them."""
    return _REFUSED.keys()


def refuse_foreign(body: Mapping[str, object]) -> None:
    """Refuse the fields of other APIs, and those of this one that the server does not have.

    Errors: AdmissionError (400) naming the field and what to use instead.
    """
    for name, advice in _REFUSED.items():
        if body.get(name) is not None:
            raise AdmissionError(400, f"{name} is not supported: {advice}.", code="unsupported_parameter", param=name)
    if body.get("n") not in (None, 1):
        raise AdmissionError(
            400, "n is not supported: a response has one answer.", code="unsupported_parameter", param="n"
        )


def ignored_by(body: Mapping[str, object]) -> dict[str, object]:
    """Return the fields of a body that have no effect."""
    return {name: value for name, value in body.items() if name not in _PASSED_ON | ResponseFields.model_fields.keys()}


def chat_body(fields: ResponseFields, body: Mapping[str, object]) -> dict[str, object]:
    """Return the fields of a chat body, but its messages, that mean what this body means.

    Errors: AdmissionError (400).
    """
    chat: dict[str, object] = {name: body[name] for name in _PASSED_ON if name in body}
    if fields.stream or fields.background:  # nobody waits for the whole of either in one piece
        chat |= {"stream": True, "stream_options": {"include_usage": True}}
    chat |= {"max_completion_tokens": fields.max_output_tokens, "service_tier": fields.service_tier}
    if fields.wants_logprobs:
        chat |= {"logprobs": True, "top_logprobs": fields.top_logprobs or 0}
    return {name: value for name, value in (chat | prompt_fields(fields)).items() if value is not None}


def prompt_fields(fields: ResponseInputFields) -> dict[str, object]:
    """Return the fields of a chat body that decide, with its messages, what the model reads.

    Errors: AdmissionError (400).
    """
    chat: dict[str, object] = {"model": fields.model}
    if fields.text is not None:
        chat |= {"response_format": _response_format(fields.text), "verbosity": fields.text.verbosity}
    if fields.reasoning is not None:
        chat["reasoning_effort"] = fields.reasoning.effort
    if fields.tools:
        chat |= {"tools": [_chat_tool(tool, index) for index, tool in enumerate(fields.tools)]}
        chat |= {"tool_choice": _chat_choice(fields.tool_choice), "parallel_tool_calls": fields.parallel_tool_calls}
    elif fields.tool_choice not in (None, "auto", "none"):
        raise AdmissionError(400, "tool_choice is only allowed when tools are given.", param="tool_choice")
    return chat


def _response_format(text: TextFields) -> dict[str, object] | None:
    form = text.format
    if form is None or form.get("type") == "text":
        return None
    if form.get("type") == "json_object":
        return {"type": "json_object"}
    if form.get("type") != "json_schema":
        raise AdmissionError(400, "text.format.type must be text, json_object or json_schema", param="text.format")
    if not isinstance(form.get("schema"), dict):
        raise AdmissionError(400, "text.format.schema must be an object: a JSON schema", param="text.format")
    return {"type": "json_schema", "json_schema": {name: value for name, value in form.items() if name != "type"}}


def _chat_tool(tool: Mapping[str, object], index: int) -> dict[str, object]:
    kind = tool.get("type")
    if kind != "function":
        shown = kind[:64] if isinstance(kind, str) else "without a name"
        raise AdmissionError(
            400,
            f"tools.{index}: a tool of type {shown} is not supported: this server runs no tools of its own. Use a tool"
            " of type function, which the client runs.",
            code="unsupported_parameter",
            param="tools",
        )
    if not isinstance(tool.get("name"), str):
        raise AdmissionError(400, f"tools.{index}.name must be a string", param="tools")
    names = ("name", "description", "parameters", "strict")
    return {"type": "function", "function": {name: tool[name] for name in names if tool.get(name) is not None}}


def _chat_choice(choice: str | dict[str, object] | None) -> str | dict[str, object] | None:
    if not isinstance(choice, dict):
        return choice
    if choice.get("type") == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}
    if choice.get("type") == "allowed_tools":
        tools = choice.get("tools")
        named: list[dict[str, object]] = [
            {"type": "function", "function": {"name": cast(dict[str, object], tool).get("name")}}
            for tool in (cast(list[object], tools) if isinstance(tools, list) else [])
            if isinstance(tool, dict)
        ]
        return {"type": "allowed_tools", "allowed_tools": {"mode": choice.get("mode"), "tools": named}}
    raise AdmissionError(
        400,
        "tool_choice must be none, auto, required, or an object of type function or allowed_tools",
        code="unsupported_parameter",
        param="tool_choice",
    )
