"""Fields of other servers that would change the output and that this server does not have: refused by name."""

from collections.abc import Collection, Mapping
from typing import cast

from tiercel.values.errors import AdmissionError

_GUIDED = frozenset(
    {"guided_json", "guided_regex", "guided_choice", "guided_grammar"}
    | {"guided_decoding_backend", "guided_whitespace_pattern"}
)
_REFUSED_UNLESS: dict[str, tuple[object, ...]] = {
    "function_call": ("none",),
    "echo": (False,),  # only completions have it
    "use_beam_search": (False,),
    "modalities": (["text"],),
    "logits_processors": ([],),
    "prompt_embeds": ([],),
}
_REFUSED = frozenset(
    {"functions", "audio"}
    | {"chat_template", "documents", "web_search_options", "mm_processor_kwargs", "truncate_prompt_tokens"}
    | {"kv_transfer_params", "repetition_detection", "thinking_token_budget", "logits_processor"}
    | {"logprob_token_ids"}
)


def refused_values() -> dict[str, tuple[object, ...]]:
    """Return by field the values besides null that are not refused."""
    return dict.fromkeys(_REFUSED, ()) | _REFUSED_UNLESS


def is_harmless(name: str, value: object) -> bool:
    """Return whether a field of another server has a value that changes nothing."""
    return value is None or any(_is_same(value, default) for default in _REFUSED_UNLESS.get(name, ()))


def refuse_unsupported(body: Mapping[str, object], own_fields: Collection[str] = ()) -> None:
    """Refuse a body with a field that would change the output. Errors: AdmissionError (400) naming the field."""
    for name, value in body.items():
        if value is None or name in own_fields:
            continue
        harmless = _REFUSED_UNLESS.get(name)
        is_refused = name in _REFUSED or (name.startswith("guided_") and name not in _GUIDED)
        if is_refused or (harmless is not None and not any(_is_same(value, default) for default in harmless)):
            raise AdmissionError(400, f"{name} is not supported", code="unsupported_parameter", param=name)
    response_format = body.get("response_format")
    if isinstance(response_format, dict) and response_format.get("type") == "structural_tag":  # pyright: ignore[reportUnknownMemberType] - raw JSON
        raise AdmissionError(
            400,
            "response_format: type structural_tag is not supported",
            code="unsupported_parameter",
            param="response_format",
        )


def _is_same(value: object, harmless: object) -> bool:
    """Return whether the values are equal and of one kind: 1 is not True here."""
    return value == harmless and isinstance(value, bool) == isinstance(harmless, bool)


def refuse_unsupported_in_messages(body: Mapping[str, object]) -> None:
    """Refuse sound inside messages. Errors: AdmissionError (400)."""
    messages = body.get("messages")
    if not isinstance(messages, list):
        return
    for message in cast(list[object], messages):
        if isinstance(message, dict) and cast(dict[str, object], message).get("audio"):
            raise AdmissionError(
                400, "messages: audio is not supported", code="unsupported_parameter", param="messages"
            )
