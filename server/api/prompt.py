"""The prompts of a request, checked and tokenised."""

from collections.abc import Callable, Sequence
from typing import TypeGuard, cast

from tiercel.errors import AdmissionError
from tiercel.server.api.params import ModelLimits, too_long
from tiercel.server.api.schemas.chat import ChatTemplateFields, message_text
from tiercel.server.text.chat_template import ChatOptions, ChatPrompt, ChatTemplate, read_switches
from tiercel.server.text.template_frames import ChatMessage
from tiercel.server.text.tokenizer import TextCodec

MAX_PROMPTS = 64
_MAX_SHRINKING = 4  # factor by which a normaliser may shorten a text


def split_prompts(prompt: object) -> list[str] | list[list[int]]:
    """Return the prompts of a text completion: one or several, texts or token ids.

    Errors: AdmissionError (400).
    """
    if isinstance(prompt, str) and prompt:
        return [prompt]
    if not isinstance(prompt, list) or not prompt:
        raise empty_prompt() if prompt in (None, "", []) else _wrong_prompt()
    entries = cast(list[object], prompt)
    if are_tokens(entries):
        return [entries]
    if len(entries) > MAX_PROMPTS:
        raise AdmissionError(400, f"prompt: at most {MAX_PROMPTS} prompts per request", param="prompt")
    if _are_texts(entries):
        if not all(entries):
            raise empty_prompt()
        return entries
    lists: list[list[int]] = []
    for entry in entries:
        if not isinstance(entry, list):
            raise _wrong_prompt()
        tokens = cast(list[object], entry)
        if not tokens:
            raise empty_prompt()
        if not are_tokens(tokens):
            raise _wrong_prompt()
        lists.append(tokens)
    return lists


def are_tokens(entries: list[object]) -> TypeGuard[list[int]]:
    """Return whether all entries are integers and there is at least one."""
    return set(map(type, entries)) == {int}


def _are_texts(entries: list[object]) -> TypeGuard[list[str]]:
    return all(isinstance(entry, str) for entry in entries)


def empty_prompt() -> AdmissionError:
    """Return the refusal of a prompt without tokens."""
    return AdmissionError(
        400, "The prompt must not be empty: a text or a list of token ids is required.", param="prompt"
    )


def _wrong_prompt() -> AdmissionError:
    return AdmissionError(
        400, "prompt must be a string, a list of strings, a list of token ids or a list of such lists", param="prompt"
    )


def encode_texts(
    codec: TextCodec, texts: Sequence[str], limits: ModelLimits, *, add_special_tokens: bool
) -> list[list[int]]:
    """Tokenise prompts. Texts that are certainly too long are refused before. Errors: AdmissionError (400)."""
    for text in texts:
        check_text_length(len(text), codec, limits)
    prompts = [codec.encode(text, add_special_tokens=add_special_tokens) for text in texts]
    if not all(prompts):
        raise empty_prompt()
    check_tokens(prompts, limits, "prompt")
    return prompts


def check_tokens(prompts: Sequence[list[int]], limits: ModelLimits, field: str) -> None:
    """Check that every id is in the model's vocabulary, which may be smaller than the tokenizer's.

    Errors: AdmissionError (400) naming the field.
    """
    for tokens in prompts:
        if tokens and (min(tokens) < 0 or max(tokens) >= limits.vocab_size):
            raise AdmissionError(400, f"{field}: a token id is out of vocabulary", param=field)


def check_text_length(letters: int, codec: TextCodec, limits: ModelLimits) -> None:
    """Refuse a text that cannot fit into the context, without tokenising it. Errors: AdmissionError (400)."""
    at_least = letters // (codec.vocabulary.longest_bytes * _MAX_SHRINKING)
    if at_least >= limits.longest:
        raise too_long(at_least, limits, at_least=True)


def chat_work(
    fields: ChatTemplateFields, template: ChatTemplate, codec: TextCodec, limits: ModelLimits
) -> Callable[[], ChatPrompt]:
    """Check messages; return the work that renders and tokenises them, to be run by a worker.

    Errors: AdmissionError (400).
    """
    if fields.add_generation_prompt and fields.continue_final_message:
        raise AdmissionError(
            400,
            "Cannot set both `continue_final_message` and `add_generation_prompt` to True.",
            param="continue_final_message",
        )
    messages = [ChatMessage(entry.role, message_text(entry), entry.name) for entry in fields.messages]
    check_text_length(sum(len(message.content) for message in messages), codec, limits)
    options = ChatOptions(
        add_generation_prompt=fields.add_generation_prompt,
        continue_final_message=fields.continue_final_message,
        switches=read_switches(fields.chat_template_kwargs or {}, template),
    )

    def work() -> ChatPrompt:
        prompt = template.encode(messages, options)
        check_tokens([prompt.tokens], limits, "messages")
        return prompt

    return work
