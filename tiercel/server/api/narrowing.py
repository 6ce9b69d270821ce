"""The part of the schemas in /openapi.json beyond the types of fields, so that they allow nothing that is refused.

It says limits that are checked outside of the schemas, and which fields need or exclude each other.

Not said are limits of the model's context, of the chat template and of a grammar; comparisons of two fields, which
JSON Schema does not have; and that one of the nine fields that constrain an output excludes the others. Programs that
make requests of the document multiply alternatives, and schemathesis gives up beyond 16, so a body has few of them.
`tests/server/api/test_narrowing.py` compares the document with the server.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from msgspec import Struct

from tiercel.server.api.prompt import MAX_PROMPTS
from tiercel.server.api.schemas import responses, unsupported
from tiercel.server.api.schemas.conversations import MAX_ITEMS
from tiercel.server.api.schemas.embeddings import MAX_INPUTS
from tiercel.server.grammar.constraint import MAX_CHOICES_LISTED

Schema = dict[str, Any]  # Any: JSON Schema


class BodyLimits(Struct, frozen=True):
    """The limits of the model and of the settings that bodies have; None: not known yet."""

    vocab_size: int | None = None
    max_logprobs: int | None = None  # -1: no limit
    hidden_size: int | None = None
    longest: int | None = None  # tokens of a sequence
    batch_endpoints: tuple[str, ...] = ()


_NULL: Schema = {"type": "null"}
_TEXT: Schema = {"type": "string", "minLength": 1}


def narrowing(body: str, facts: BodyLimits) -> Sequence[Schema]:
    """Return the schemas that a body of this name satisfies in addition to its own."""
    make = _BY_BODY.get(body)
    return () if make is None else make(facts)


def _fields(**fields: Schema) -> Schema:
    """Return that fields satisfy these schemas. A schema of one type lets others pass, null among them."""
    return {"properties": fields}


def _given(name: str) -> Schema:
    return {"required": [name], "properties": {name: {"not": _NULL}}}


def _matches(**fields: Schema) -> Schema:
    """Return that fields are there and satisfy these schemas."""
    return {"required": list(fields), "properties": fields}


def _is(name: str, *values: object) -> Schema:
    return _matches(**{name: {"enum": list(values)}})


def _is_not(name: str, *values: object) -> Schema:
    return _matches(**{name: {"not": {"enum": list(values)}}})


def _if(condition: Schema, then: Schema) -> Schema:
    return {"if": condition, "then": then}


def _not_both(first: Schema, second: Schema) -> Schema:
    return {"not": {"allOf": [first, second]}}


def _absent(*names: str) -> Schema:
    """Return that fields are null, if they are there."""
    return {"properties": dict.fromkeys(names, _NULL)}


def _unsupported(*own: str) -> Schema:
    """Return that the fields of other servers are absent or have a value that changes nothing."""
    return {
        "properties": {
            name: {"enum": [None, *values]} for name, values in unsupported.refused_values().items() if name not in own
        }
    }


def _token(facts: BodyLimits) -> Schema:
    most = {} if facts.vocab_size is None else {"maximum": facts.vocab_size - 1}
    return {"type": "integer", "minimum": 0, **most}


def _prompts(facts: BodyLimits, most: int) -> Schema:
    tokens: Schema = {"type": "array", "minItems": 1, "items": _token(facts)}
    lists = [{"type": "array", "minItems": 1, "maxItems": most, "items": entry} for entry in (_TEXT, tokens)]
    return {"anyOf": [_TEXT, tokens, *lists]}


def _longest(facts: BodyLimits) -> Schema:
    return {} if facts.longest is None else {"maximum": facts.longest}


def _logprobs(facts: BodyLimits) -> Schema:
    if facts.max_logprobs in (None, -1):
        return {}
    return {"minimum": 0, "maximum": facts.max_logprobs}


def _choices() -> Schema:
    return {"minItems": 1, "maxItems": MAX_CHOICES_LISTED, "items": _TEXT}


def _sampling(facts: BodyLimits) -> list[Schema]:
    return [
        _fields(
            logit_bias={
                "propertyNames": {"pattern": r"^[0-9]{1,10}$"},
                "additionalProperties": {"minimum": -100, "maximum": 100},
            },
            stop_token_ids={"items": _token(facts)},
            allowed_token_ids={"items": _token(facts)},
            bad_words={"items": {"pattern": r"\S"}},
            truncate_prompt_tokens=_longest(facts),
            prompt_logprobs=_logprobs(facts),
        ),
        _fields(guided_choice=_choices()),
    ]


def _stream(**others: Schema) -> Schema:
    """Return which fields need a stream, and which exclude it."""
    streamed = {"stream": {"const": True}, "prompt_logprobs": {"enum": [None, 0]}, **others}
    return {
        "anyOf": [
            {"required": ["stream"], "properties": streamed},
            _fields(stream={"enum": [None, False]}, stream_options=_NULL),
        ]
    }


def _completion(facts: BodyLimits) -> list[Schema]:
    return [
        {"required": ["prompt"]},
        _fields(prompt=_prompts(facts, MAX_PROMPTS), logprobs=_logprobs(facts)),
        *_sampling(facts),
        _unsupported("echo", "truncate_prompt_tokens"),
        _stream(best_of={"enum": [None, 1]}),
        {
            "anyOf": [
                _fields(suffix={"enum": [None, ""]}),
                _fields(echo={"enum": [None, False]}, truncate_prompt_tokens=_NULL),
            ]
        },
    ]


def _template(_facts: BodyLimits) -> list[Schema]:
    return [
        _fields(chat_template_kwargs={"additionalProperties": {"type": "boolean"}}),
        {"anyOf": [_fields(continue_final_message={"const": False}), _is("add_generation_prompt", False)]},
    ]


_NAMED: Schema = {
    "type": "object",
    **_matches(type={"const": "function"}, function={"type": "object", **_matches(name={"type": "string"})}),
}
_ALLOWED: Schema = {
    "type": "object",
    **_matches(
        type={"const": "allowed_tools"},
        allowed_tools={
            "type": "object",
            **_matches(mode={"enum": ["auto", "required"]}, tools={"type": "array", "minItems": 1, "items": _NAMED}),
        },
    ),
}
_SOME_TOOLS = _matches(tools={"type": "array", "minItems": 1})


def _chat(facts: BodyLimits) -> list[Schema]:
    return [
        _fields(
            top_logprobs=_logprobs(facts),
            tool_choice={"anyOf": [{"enum": [None, "none", "auto", "required"]}, _NAMED, _ALLOWED]},
        ),
        *_template(facts),
        *_sampling(facts),
        _unsupported("truncate_prompt_tokens"),
        _stream(),
        {"anyOf": [_fields(top_logprobs={"enum": [None, 0]}), _is("logprobs", True)]},
        {"anyOf": [_fields(tool_choice={"enum": [None, "none"]}), _matches(tools={"type": "array"})]},
    ]


def _message(_facts: BodyLimits) -> list[Schema]:
    text = _matches(type={"enum": ["text", "input_text", "output_text"]}, text={"type": "string"})
    refusal = _matches(type={"const": "refusal"}, refusal={"type": "string"})
    return [
        _fields(content={"items": {"anyOf": [text, refusal]}}),
        _if(
            _is_not("role", "assistant"),
            {"allOf": [_given("content"), _absent("function_call"), _fields(tool_calls={"maxItems": 0})]},
        ),
        _if(_is("role", "tool"), _given("tool_call_id")),
        _if(_is("prefix", True), _is("role", "assistant")),
    ]


def _outputs(_facts: BodyLimits) -> list[Schema]:
    names = ("json", "regex", "choice", "grammar")

    def only(name: str) -> Schema:
        others = _absent(*(other for other in names if other != name))
        return {"allOf": [_given(name), others, _fields(json_object={"not": {"const": True}})]}

    return [
        _fields(choice=_choices()),
        {"anyOf": [{"allOf": [_is("json_object", True), _absent(*names)]}, *map(only, names)]},
    ]


def _format(_facts: BodyLimits) -> list[Schema]:
    schema: Schema = {"type": "object", **_matches(schema={"type": "object"})}
    return [_if(_is("type", "json_schema"), _matches(json_schema=schema))]


def _called(_facts: BodyLimits) -> list[Schema]:
    return [_fields(arguments={"type": ["object", "string"]})]


def _embedding(facts: BodyLimits) -> list[Schema]:
    dimensions = {} if facts.hidden_size is None else {"maximum": facts.hidden_size}
    return [
        _fields(input=_prompts(facts, MAX_INPUTS), dimensions=dimensions, truncate_prompt_tokens=_longest(facts)),
        _unsupported("truncate_prompt_tokens"),
    ]


def _score(facts: BodyLimits) -> list[Schema]:
    """Return the schemas of a body with pairs. That two lists have one length is not said."""
    one: Schema = {"anyOf": [{"type": "string"}, {"type": "array", "maxItems": 1}]}
    return [*_texts("text_1", "text_2")(facts), {"anyOf": [_fields(text_2={"type": "array"}), _fields(text_1=one)]}]


def _texts(*names: str) -> Callable[[BodyLimits], list[Schema]]:
    texts: Schema = {"minLength": 1, "items": _TEXT}
    return lambda facts: [
        _fields(**dict.fromkeys(names, texts), truncate_prompt_tokens=_longest(facts)),
        _unsupported("documents", "truncate_prompt_tokens"),
    ]


_ITEM: Schema = {"anyOf": [_given("type"), _given("role")]}


def _conversation(_facts: BodyLimits) -> list[Schema]:
    return [_fields(items={"maxItems": MAX_ITEMS, "items": _ITEM})]


def _responses(facts: BodyLimits) -> list[Schema]:
    named: Schema = {"type": "object", **_matches(type={"const": "function"}, name={"type": "string"})}
    allowed: Schema = {
        "type": "object",
        **_matches(
            type={"const": "allowed_tools"},
            mode={"enum": ["auto", "required"]},
            tools={"type": "array", "minItems": 1, "items": named},
        ),
    }
    word = _fields(name={"pattern": "^[A-Za-z0-9_-]{1,64}$"})
    return [
        _not_both(_given("conversation"), _given("previous_response_id")),
        _fields(
            input={"minLength": 1, "minItems": 1, "items": _ITEM},
            tools={"items": {"allOf": [named, word]}},
            tool_choice={"anyOf": [{"enum": [None, "none", "auto", "required"]}, named, allowed]},
            n={"enum": [None, 1]},
            top_logprobs=_logprobs(facts),
            **dict.fromkeys(responses.refused_names(), _NULL),
        ),
        _unsupported(),
        _if(_is_not("tool_choice", None, "none", "auto"), _SOME_TOOLS),
    ]


def _response(facts: BodyLimits) -> list[Schema]:
    alone: Schema = {"anyOf": [_is("stream", True), _is("store", False)]}
    return [*_responses(facts), _not_both(_is("background", True), alone)]


def _text_form(_facts: BodyLimits) -> list[Schema]:
    schema = _matches(type={"const": "json_schema"}, schema={"type": "object"})
    return [_fields(format={"anyOf": [_NULL, _is("type", "text", "json_object"), schema]})]


def _messages(_facts: BodyLimits) -> list[Schema]:
    choice: Schema = {"type": "object", **_is_not("type", "none")}
    return [_if(_matches(tool_choice=choice), _SOME_TOOLS)]


def _message_choice(_facts: BodyLimits) -> list[Schema]:
    return [_if(_is("type", "tool"), _given("name"))]


def _upload(_facts: BodyLimits) -> list[Schema]:
    """Return the schemas of an upload. A form has no null; both parts of the lifetime are there, or neither."""
    anchor, seconds = "expires_after[anchor]", "expires_after[seconds]"
    return [
        {"properties": {anchor: {"not": _NULL}, seconds: {"not": _NULL}}},
        {"dependentRequired": {anchor: [seconds], seconds: [anchor]}},
    ]


_BY_BODY: Mapping[str, Callable[[BodyLimits], list[Schema]]] = {
    "CompletionFields": _completion,
    "ChatFields": _chat,
    "MessageFields": _message,
    "StructuredOutputs": _outputs,
    "ResponseFormat": _format,
    "CalledFunctionFields": _called,
    "EmbeddingFields": _embedding,
    "ScoreFields": _score,
    "RerankFields": _texts("query", "documents"),
    "TextRerankFields": _texts("query", "texts"),
    "TokenizeTextFields": lambda _facts: [_unsupported()],
    "TokenizeChatFields": lambda facts: [*_template(facts), _unsupported()],
    "DetokenizeFields": lambda facts: [_fields(tokens={"items": _token(facts)})],
    "ConversationFields": _conversation,
    "ConversationItemsFields": _conversation,
    "ResponseInputFields": _responses,
    "ResponseFields": _response,
    "TextFields": _text_form,
    "MessagePromptFields": _messages,
    "MessagesFields": _messages,
    "MessageToolChoice": _message_choice,
    "FileFields": _upload,
    "BatchFields": lambda facts: [_fields(input_file_id=_TEXT, endpoint={"enum": list(facts.batch_endpoints)})],
}
