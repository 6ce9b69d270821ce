"""What clients may send: shapes and ranges that need no model. What depends on the model is in `params`."""

from collections.abc import Mapping
from typing import Annotated, Literal, TypeVar, cast

import pydantic
from pydantic import BaseModel, ConfigDict, Field

from tiercel.errors import AdmissionError

INT64_MIN = -(2**63)
INT64_MAX = 2**63 - 1
MAX_MESSAGES = 2048
MAX_PARTS = 8192  # of the contents of all messages
MAX_STOPS = 4
MAX_STOP_LETTERS = 256
MAX_LOGIT_BIAS = 300
MAX_CHOICES = 8
MAX_STOP_TOKEN_IDS = 256

Finite = Annotated[float, Field(allow_inf_nan=False)]
StopText = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LETTERS)]
Word = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]


class Fields(BaseModel):
    """Unknown fields are ignored; those that would change the output are refused by name before."""

    model_config = ConfigDict(extra="ignore", frozen=True)


class StreamOptions(Fields):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class SamplingFields(Fields):
    """Fields that chat and text completions share. None = the client left it out."""

    model: str | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    temperature: Annotated[Finite, Field(ge=0, le=100)] | None = None
    top_p: Annotated[Finite, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None
    min_p: Annotated[Finite, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[Finite, Field(gt=0, le=100)] | None = None
    presence_penalty: Annotated[Finite, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[Finite, Field(ge=-2, le=2)] | None = None
    logit_bias: Annotated[dict[str, Finite], Field(max_length=MAX_LOGIT_BIAS)] | None = None
    seed: Annotated[int, Field(ge=INT64_MIN, le=INT64_MAX)] | None = None
    max_tokens: int | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    stop: StopText | Annotated[list[StopText], Field(max_length=MAX_STOPS)] | None = None
    stop_token_ids: Annotated[list[int], Field(max_length=MAX_STOP_TOKEN_IDS)] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: Word | None = None
    priority: Annotated[int, Field(ge=-(2**31), le=2**31 - 1)] | None = None  # lower goes first
    user: str | None = None  # says nothing of who pays: the key does


class MessageFields(Fields):
    """`content` stays raw here: its parts are checked one by one, with their type in the message."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[dict[str, object]] | None = None
    name: Word | None = None


class ChatTemplateFields(Fields):
    """Fields that decide how messages are rendered."""

    messages: Annotated[list[MessageFields], Field(min_length=1, max_length=MAX_MESSAGES)]
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, object] | None = None


class ChatFields(SamplingFields, ChatTemplateFields):
    """The body of /v1/chat/completions."""

    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0)] | None = None


class CompletionFields(SamplingFields):
    """The body of /v1/completions; `prompt` is checked by hand, token lists can be long."""

    prompt: object = None
    logprobs: Annotated[int, Field(ge=0)] | None = None
    add_special_tokens: bool = True


class TokenizeTextFields(Fields):
    model: str | None = None
    prompt: str
    add_special_tokens: bool = True
    return_token_strs: bool | None = None


class TokenizeChatFields(ChatTemplateFields):
    model: str | None = None
    add_special_tokens: bool = False
    return_token_strs: bool | None = None


class DetokenizeFields(Fields):
    """`tokens` is checked by hand, as `prompt` is."""

    model: str | None = None
    tokens: object = None


F = TypeVar("F", bound=Fields)


def read_fields(shape: type[F], body: Mapping[str, object]) -> F:
    """Check a body against a shape.

    Errors: AdmissionError (400) with at most ten faults in its message and never the client's values.
    """
    _refuse_crowded(body)
    try:
        return shape.model_validate(body)
    except pydantic.ValidationError as exc:
        faults = exc.errors(include_url=False, include_context=False, include_input=False)
        lines = [f"{_path(fault['loc'])}: {fault['msg']} ({fault['type']})" for fault in faults[:10]]
        param = str(faults[0]["loc"][0]) if faults and faults[0]["loc"] else None
        raise AdmissionError(400, "; ".join(lines), code="invalid_value", param=param) from exc


_MOST_ENTRIES = {
    "messages": MAX_MESSAGES,
    "logit_bias": MAX_LOGIT_BIAS,
    "stop": MAX_STOPS,
    "stop_token_ids": MAX_STOP_TOKEN_IDS,
}


def _refuse_crowded(body: Mapping[str, object]) -> None:
    """Lengths first: the check of a shape walks every entry, those beyond the limit included."""
    for name, most in _MOST_ENTRIES.items():
        value = body.get(name)
        if isinstance(value, list | dict) and len(cast(list[object], value)) > most:
            raise AdmissionError(400, f"{name}: at most {most} entries (too_long)", param=name)
    messages = body.get("messages")
    if isinstance(messages, list) and sum(map(_num_parts, cast(list[object], messages))) > MAX_PARTS:
        raise AdmissionError(400, f"messages: at most {MAX_PARTS} content parts (too_long)", param="messages")


def _num_parts(message: object) -> int:
    content = cast(dict[str, object], message).get("content") if isinstance(message, dict) else None
    return len(cast(list[object], content)) if isinstance(content, list) else 0


def _path(loc: tuple[int | str, ...]) -> str:
    """A field's name for people, without pydantic's names for the branches of a union."""
    parts = [str(part)[:64] for part in loc if isinstance(part, int) or part.replace("_", "").isalnum()]
    return ".".join(parts) or "body"


_REFUSED_UNLESS: dict[str, tuple[object, ...]] = {
    "tool_choice": ("none",),
    "function_call": ("none",),
    "response_format": ({"type": "text"},),
    "echo": (False,),
    "best_of": (1,),
    "suffix": ("",),
    "use_beam_search": (False,),
    "bad_words": ([],),
    "modalities": (["text"],),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "logits_processors": ([],),
}
_REFUSED = frozenset(
    {"tools", "functions", "prompt_logprobs", "structured_outputs", "allowed_token_ids", "prompt_embeds", "audio"}
    | {"chat_template", "documents", "web_search_options", "mm_processor_kwargs", "truncate_prompt_tokens"}
    | {"kv_transfer_params", "repetition_detection", "thinking_token_budget", "logits_processor"}
)


def refuse_unsupported(body: Mapping[str, object]) -> None:
    """Fields that would change the output and that we do not serve are refused by name.

    Errors: AdmissionError (400) naming the field.
    """
    for name, value in body.items():
        if value is None:
            continue
        harmless = _REFUSED_UNLESS.get(name)
        is_refused = name in _REFUSED or name.startswith("guided_")
        if is_refused or (harmless is not None and not any(_is_same(value, one) for one in harmless)):
            raise AdmissionError(400, f"{name} is not supported", code="unsupported_parameter", param=name)


def _is_same(value: object, harmless: object) -> bool:
    """Equal, and not a number that merely equals a truth value."""
    return value == harmless and isinstance(value, bool) == isinstance(harmless, bool)


def refuse_unsupported_in_messages(body: Mapping[str, object]) -> None:
    """Tool calls, tool results, images and sound inside messages are refused by name.

    Errors: AdmissionError (400).
    """
    messages = body.get("messages")
    if not isinstance(messages, list):
        return
    for message in messages:  # pyright: ignore[reportUnknownVariableType] - raw JSON
        if not isinstance(message, dict):
            continue
        for name in ("tool_calls", "function_call", "audio"):
            if message.get(name):  # pyright: ignore[reportUnknownMemberType]
                raise _refused_in_message(name)
        if message.get("role") in ("tool", "function"):  # pyright: ignore[reportUnknownMemberType]
            raise _refused_in_message(f"role {message['role']}")


def _refused_in_message(what: str) -> AdmissionError:
    return AdmissionError(400, f"messages: {what} is not supported", code="unsupported_parameter", param="messages")


def message_text(message: MessageFields) -> str:
    """The content of one message as text; parts are joined by line ends.

    Errors: AdmissionError (400) naming the type of a part that is not text.
    """
    content = message.content
    if content is None:
        if message.role == "assistant":
            return ""
        raise AdmissionError(400, f"messages: content of a {message.role} message is missing", param="messages")
    if isinstance(content, str):
        return content
    return "\n".join(_part_text(part) for part in content)


def _part_text(part: Mapping[str, object]) -> str:
    kind, text = part.get("type"), part.get("text")
    if kind not in ("text", "input_text", "output_text"):
        shown = kind[:64] if isinstance(kind, str) and kind.replace("_", "").isalnum() else "without a type"
        raise AdmissionError(
            400, f"messages: content part {shown} is not supported", code="unsupported_parameter", param="messages"
        )
    if not isinstance(text, str):
        raise AdmissionError(400, "messages: a text part has no text", param="messages")
    return text
