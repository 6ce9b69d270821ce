"""The prompts of a request, checked and tokenised."""

import contextlib
from collections.abc import Callable, Generator, Sequence
from typing import TypeGuard, cast

from msgspec.structs import replace

from tiercel.server.api.conversation import read_messages, tools_json
from tiercel.server.api.params import ModelLimits, too_long
from tiercel.server.api.schemas.chat import ChatTemplateFields
from tiercel.server.text.chat_template import ChatOptions, ChatPrompt, ChatTemplate, read_switches
from tiercel.server.text.tokenizer import LongTextError, TextCodec, Truncation
from tiercel.values.errors import AdmissionError
from tiercel.values.request import MAX_BAD_WORD_TOKENS, SamplingParams

MAX_PROMPTS = 4096
"""Maximum number of prompts of a completion: the default of --max-num-queued-reqs."""

_MAX_SHRINKING = 4  # factor by which a normaliser may shorten a text
_SHOWN_BELOW = 10**12  # a longer number is not repeated in an error


def split_prompts(prompt: object, field: str = "prompt", most: int = MAX_PROMPTS) -> list[str] | list[list[int]]:
    """Return the prompts of a request: one or several, texts or token ids.

    Errors: AdmissionError (400).
    """
    if isinstance(prompt, str) and prompt:
        return [prompt]
    if not isinstance(prompt, list) or not prompt:
        raise empty_prompt(field) if prompt in (None, "", []) else _wrong_prompt(field)
    entries = cast(list[object], prompt)
    if are_tokens(entries):
        return [entries]
    if len(entries) > most:
        raise AdmissionError(400, f"{field}: at most {most} {field}s per request", param=field)
    if _are_texts(entries):
        if not all(entries):
            raise empty_prompt(field)
        return entries
    lists: list[list[int]] = []
    for entry in entries:
        if not isinstance(entry, list):
            raise _wrong_prompt(field)
        tokens = cast(list[object], entry)
        if not tokens:
            raise empty_prompt(field)
        if not are_tokens(tokens):
            raise _wrong_prompt(field)
        lists.append(tokens)
    return lists


def are_tokens(entries: list[object]) -> TypeGuard[list[int]]:
    """Return whether all entries are integers and there is at least one."""
    return set(map(type, entries)) == {int}


def _are_texts(entries: list[object]) -> TypeGuard[list[str]]:
    return all(isinstance(entry, str) for entry in entries)


def empty_prompt(field: str = "prompt") -> AdmissionError:
    """Return the refusal of a prompt without tokens."""
    return AdmissionError(
        400, f"The {field} must not be empty: a text or a list of token ids is required.", param=field
    )


def _wrong_prompt(field: str) -> AdmissionError:
    return AdmissionError(
        400, f"{field} must be a string, a list of strings, a list of token ids or a list of such lists", param=field
    )


def encode_texts(
    codec: TextCodec,
    texts: Sequence[str],
    limits: ModelLimits,
    *,
    add_special_tokens: bool,
    field: str = "prompt",
    most_tokens: int | None = None,
    truncation: Truncation | None = None,
) -> list[list[int]]:
    """Tokenise prompts. Texts that are certainly too long are refused before. Errors: AdmissionError (400).

    `most_tokens` of a long text are counted; None: as many as a sequence can have.
    """
    most = limits.longest if most_tokens is None else most_tokens
    with refusing_long_texts(limits, most):
        prompts = [
            codec.framed(encode_text(codec, text, most), add_special_tokens=add_special_tokens, truncation=truncation)
            for text in texts
        ]
    if add_special_tokens:
        codec.warn_of_double_bos(prompts)
    if not all(prompts):
        raise empty_prompt(field)
    check_tokens(prompts, limits, field)
    return prompts


def encode_text(codec: TextCodec, text: str, most_tokens: int) -> list[int]:
    """Return the tokens of a text without those that the tokenizer adds. Errors: LongTextError."""
    if (at_least := least_tokens(len(text), codec)) >= most_tokens:
        raise LongTextError(at_least)
    return codec.encode(text, add_special_tokens=False, most_tokens=most_tokens)


@contextlib.contextmanager
def refusing_long_texts(limits: ModelLimits, most_tokens: int) -> Generator[None]:
    """Refuse a text whose tokens were not all counted. Errors: AdmissionError (400)."""
    try:
        yield
    except LongTextError as exc:
        if most_tokens <= limits.longest:
            raise too_long(exc.at_least, limits, at_least=True) from exc
        raise AdmissionError(
            400,
            f"The text has at least {exc.at_least} tokens; at most {most_tokens} are read, also of a text that is"
            " truncated.",
            code="context_length_exceeded",
            param="input_tokens",
        ) from exc


def encode_bad_words(words: Sequence[str], codec: TextCodec, limits: ModelLimits) -> tuple[tuple[int, ...], ...]:
    """Return the token sequences of words, as at the beginning of a text and behind a space, as in vLLM.

    Errors: AdmissionError (400) for a word of too many tokens, or of a token that the model does not have.
    """
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        plain = tuple(codec.encode(word.lstrip(), add_special_tokens=False))
        spaced = tuple(codec.encode(" " + word.lstrip(), add_special_tokens=False))
        if not plain:
            raise AdmissionError(400, "bad_words: an entry has no letters", param="bad_words")
        found[plain] = None
        if len(spaced) == len(plain) and spaced[0] != plain[0]:
            found[spaced] = None
    if any(len(tokens) > MAX_BAD_WORD_TOKENS for tokens in found):
        raise AdmissionError(400, f"bad_words: an entry has more than {MAX_BAD_WORD_TOKENS} tokens", param="bad_words")
    check_tokens([list(tokens) for tokens in found], limits, "bad_words")
    return tuple(found)


def check_tokens(prompts: Sequence[list[int]], limits: ModelLimits, field: str) -> None:
    """Check that every id is in the model's vocabulary, which may be smaller than the tokenizer's.

    Errors: AdmissionError (400) naming the field.
    """
    for tokens in prompts:
        if tokens and (min(tokens) < 0 or max(tokens) >= limits.vocab_size):
            wrong = min(tokens) if min(tokens) < 0 else max(tokens)
            raise AdmissionError(
                400,
                f"{field}: token id {wrong if abs(wrong) < _SHOWN_BELOW else '...'} is out of vocabulary: the model has"
                f" {limits.vocab_size} tokens, 0 to {limits.vocab_size - 1}",
                param=field,
            )


def with_drawable_tokens(params: SamplingParams, codec: TextCodec) -> SamplingParams:
    """Return parameters whose `allowed_token_ids` can be drawn: ids that have a token, and are no bad word alone.

    An engine to which nothing is left draws any token. Errors: AdmissionError (400) if there is no such id.
    """
    if not params.allowed_token_ids:
        return params
    named = [token for token in params.allowed_token_ids if codec.token_name(token) is not None]
    if not named:
        raise AdmissionError(
            400, "allowed_token_ids: the tokenizer has a token for none of these ids", param="allowed_token_ids"
        )
    banned = {word[0] for word in params.bad_words if len(word) == 1}
    left = tuple(token for token in named if token not in banned)
    if not left:
        raise AdmissionError(400, "bad_words: they exclude every token of allowed_token_ids", param="bad_words")
    return replace(params, allowed_token_ids=left)


def check_text_length(letters: int, codec: TextCodec, limits: ModelLimits) -> None:
    """Refuse a text that cannot fit into the context, without tokenising it. Errors: AdmissionError (400)."""
    at_least = least_tokens(letters, codec)
    if at_least >= limits.longest:
        raise too_long(at_least, limits, at_least=True)


def may_fit(letters: int, codec: TextCodec, limits: ModelLimits) -> bool:
    """Return whether a text of so many characters may fit into the context."""
    return least_tokens(letters, codec) < limits.longest


def least_tokens(letters: int, codec: TextCodec) -> int:
    """Return the number of tokens that a text of so many characters has at least."""
    return letters // (codec.vocabulary.longest_bytes * _MAX_SHRINKING)


def chat_work(
    fields: ChatTemplateFields,
    template: ChatTemplate,
    codec: TextCodec,
    limits: ModelLimits,
    *,
    most_tokens: int | None = None,
    truncation: Truncation | None = None,
) -> Callable[[], ChatPrompt]:
    """Check messages; return the work that renders and tokenises them, to be run by a worker.

    `most_tokens` of a long conversation are counted; None: as many as a sequence can have.
    Errors: AdmissionError (400).
    """
    continues, most = _continues(fields), limits.longest if most_tokens is None else most_tokens
    messages, tools = read_messages(fields.messages), tools_json(fields.tools or ())
    with refusing_long_texts(limits, most):
        at_least = least_tokens(sum(message.letters for message in messages) + len(tools), codec)
        if at_least >= most:
            raise LongTextError(at_least)
    for message in messages:
        if any(text in message.role for text in template.control_texts):
            raise AdmissionError(400, "messages: a role spells a control token", param="messages")
    options = ChatOptions(
        add_generation_prompt=fields.add_generation_prompt and not continues,
        continue_final_message=continues,
        switches=read_switches(fields.chat_template_kwargs or {}, template) + _texts(fields, template),
        tools=tools,
        most_tokens=most,
    )

    def work() -> ChatPrompt:
        with refusing_long_texts(limits, most):
            prompt = template.encode(messages, options)
        tokens = codec.framed(prompt.tokens, add_special_tokens=fields.add_special_tokens, truncation=truncation)
        check_tokens([tokens], limits, "messages")
        return ChatPrompt(prompt.text, tokens)

    return work


def _continues(fields: ChatTemplateFields) -> bool:
    """Return whether the answer continues the last message. Errors: AdmissionError (400)."""
    *earlier, last = fields.messages
    if any(message.prefix for message in earlier) or (last.prefix and last.role != "assistant"):
        raise AdmissionError(
            400, "messages: prefix is only allowed in the last message, and there of the assistant", param="messages"
        )
    if last.prefix:
        return True
    if fields.add_generation_prompt and fields.continue_final_message:
        raise AdmissionError(
            400,
            "Cannot set both `continue_final_message` and `add_generation_prompt` to True.",
            param="continue_final_message",
        )
    return fields.continue_final_message


def _texts(fields: ChatTemplateFields, template: ChatTemplate) -> tuple[tuple[str, str], ...]:
    """Return the fields with a text that the template reads. Others are ignored."""
    values = {"reasoning_effort": fields.reasoning_effort, "verbosity": fields.verbosity}
    return tuple((name, value) for name, value in values.items() if value is not None and name in template.texts)
