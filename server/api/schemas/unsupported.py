"""Fields of other servers that would change the output and that this server does not have: refused by name."""

from collections.abc import Mapping

from tiercel.errors import AdmissionError

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
    """Refuse a body with a field that would change the output. Errors: AdmissionError (400) naming the field."""
    for name, value in body.items():
        if value is None:
            continue
        harmless = _REFUSED_UNLESS.get(name)
        is_refused = name in _REFUSED or name.startswith("guided_")
        if is_refused or (harmless is not None and not any(_is_same(value, default) for default in harmless)):
            raise AdmissionError(400, f"{name} is not supported", code="unsupported_parameter", param=name)


def _is_same(value: object, harmless: object) -> bool:
    """Return whether the values are equal and of one kind: 1 is not True here."""
    return value == harmless and isinstance(value, bool) == isinstance(harmless, bool)


def refuse_unsupported_in_messages(body: Mapping[str, object]) -> None:
    """Refuse tool calls, tool results and sound inside messages. Errors: AdmissionError (400)."""
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
