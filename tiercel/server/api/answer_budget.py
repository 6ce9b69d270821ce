"""The memory of whole answers with log-probabilities, estimated and limited before they are computed."""

from collections.abc import Callable, Sequence

from tiercel.server.api.hold import Hold
from tiercel.server.client.logprobs import logprobs_bytes
from tiercel.values.errors import AdmissionError
from tiercel.values.request import SamplingParams

ANSWERS = 4
"""The number of answers of the largest size that may be under way."""

_TEXT_BYTES = 16  # of a token: its text, once as it is collected and once as JSON
_PARSED_BYTES = 24  # of a token of an answer with calls or thoughts: its parts, once in pieces and once as JSON texts
_OBJECT_BYTES = 250  # of a log-probability in an event: the objects, and its JSON
_MAX_LETTER_BYTES = 4
_SHOWN_TOKEN_BYTES = 16  # of a token that an answer repeats: its place in a list, and its number in JSON
_RETRY_S = 5


def answer_bytes(params: Sequence[SamplingParams], choices: int, *, is_parsed: bool = False) -> int:
    """Return the largest memory of the outputs: `params` of each prompt, with as many choices each."""
    text_bytes = _TEXT_BYTES + (_PARSED_BYTES if is_parsed else 0)
    return (
        sum(
            one.max_tokens * (text_bytes + (0 if one.logprobs is None else logprobs_bytes(one.logprobs)))
            for one in params
        )
        * choices
    )


def prompt_bytes(params: Sequence[SamplingParams], lengths: Sequence[int], *, in_events: bool = False) -> int:
    """Return the memory of the log-probabilities of prompts of these lengths in tokens, one set for each prompt.

    `in_events`: the first event of a choice has them all, as objects.
    """
    return sum(
        length * (logprobs_bytes(one.prompt_logprobs) + (_OBJECT_BYTES * (1 + one.prompt_logprobs) if in_events else 0))
        for one, length in zip(params, lengths, strict=True)
        if one.prompt_logprobs is not None
    )


def repeated_bytes(texts: Sequence[str], tokens: int, choices: int) -> int:
    """Return the memory of prompts that the answer repeats for each choice: their texts, and so many tokens."""
    return (sum(map(len, texts)) * _MAX_LETTER_BYTES + tokens * _SHOWN_TOKEN_BYTES) * choices


class AnswerBudget:
    """The memory of all whole answers with log-probabilities that are under way.

    Answers without log-probabilities are not reserved: a token costs a few bytes, and the engine's speed limits them.
    """

    def __init__(self, limit_bytes: Callable[[], int], on_refused: Callable[[], None]) -> None:
        self._limit_bytes = limit_bytes  # of one answer
        self._on_refused = on_refused
        self._held_bytes = 0

    @property
    def held_bytes(self) -> int:
        """The bytes that are reserved now."""
        return self._held_bytes

    def check_prompts(
        self, params: Sequence[SamplingParams], lengths: Sequence[int], *, in_events: bool = False
    ) -> None:
        """Refuse log-probabilities of prompts, of these lengths in tokens, that are too large alone.

        Errors: AdmissionError (400) naming the fields and the limit.
        """
        size, limit = prompt_bytes(params, lengths, in_events=in_events), self._limit_bytes()
        if size > limit:
            count = max(one.prompt_logprobs or 0 for one in params)
            raise AdmissionError(
                400,
                f"The log-probabilities of the prompt take {size} bytes of memory: {sum(lengths)} tokens with {count}"
                f" log-probabilities each. An answer can take {limit} bytes (--max-answer-bytes). Please reduce"
                f" prompt_logprobs, or logprobs if echo is set, or the length of the prompt"
                f"{', or set stream to false' if in_events else ''}.",
                code="answer_too_large",
                param="prompt_logprobs",
            )

    def check_repeated(self, size: int, choices: int, field: str) -> None:
        """Refuse prompts that are repeated in the answer and too large alone. Errors: AdmissionError (400)."""
        limit = self._limit_bytes()
        if size > limit:
            raise AdmissionError(
                400,
                f"{field}: the prompts, repeated for {choices} choices, take {size} bytes of memory. An answer can take"
                f" {limit} bytes (--max-answer-bytes). Please reduce n or the prompts, or leave {field} out.",
                code="answer_too_large",
                param=field,
            )

    def check(
        self, params: Sequence[SamplingParams], choices: int, max_tokens_field: str, *, is_parsed: bool = False
    ) -> None:
        """Refuse outputs that are too large alone. Errors: AdmissionError (400) naming the fields and the limit."""
        size, limit = answer_bytes(params, choices, is_parsed=is_parsed), self._limit_bytes()
        if size <= limit:
            return
        logprobs = max((one.logprobs for one in params if one.logprobs is not None), default=None)
        sequences, longest = choices * len(params), max(one.max_tokens for one in params)
        has_logprobs = logprobs is not None
        alternatives = f" with {logprobs} log-probabilities each" if has_logprobs else ""
        fields = [*(["logprobs"] if has_logprobs else []), max_tokens_field, "n", "the number of prompts"]
        raise AdmissionError(
            400,
            f"The answer can take {size} bytes of memory: {sequences} sequences of up to {longest}"
            f" tokens{alternatives}. An answer that is not streamed can take {limit} bytes (--max-answer-bytes)."
            f" Please reduce {', '.join(fields[:-1])} or {fields[-1]}, or set stream to true.",
            code="answer_too_large",
            param="logprobs" if has_logprobs else max_tokens_field,
        )

    def reserve(
        self,
        params: Sequence[SamplingParams],
        choices: int,
        lengths: Sequence[int],
        other_bytes: int = 0,
        *,
        is_parsed: bool = False,
        in_events: bool = False,
    ) -> Hold:
        """Reserve the memory of an answer to prompts of these lengths in tokens. `choices`: 0 for a stream, whose
        outputs are not kept. `other_bytes`: of vectors and repeated prompts. Errors: as of `reserve_bytes`.
        """
        has_logprobs = any(one.logprobs is not None for one in params)
        size = answer_bytes(params, choices, is_parsed=is_parsed) if has_logprobs else 0
        return self.reserve_bytes(size + prompt_bytes(params, lengths, in_events=in_events) + other_bytes)

    def reserve_bytes(self, size: int) -> Hold:
        """Reserve so much memory. Errors: AdmissionError (503) with Retry-After if there is too little."""
        if size and self._held_bytes + size > ANSWERS * self._limit_bytes():
            self._on_refused()
            raise AdmissionError(
                503,
                "The server holds too many large answers: with log-probabilities, vectors or repeated prompts. Please"
                " try again later, or set stream to true.",
                code="overloaded",
                kind="server_error",
                retry_after_s=_RETRY_S,
            )
        self._held_bytes += size

        def release() -> None:
            self._held_bytes -= size

        return Hold(release)
