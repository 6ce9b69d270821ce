"""A request to the responses API as a chat request: what it means, and its prompt."""

import contextlib
import dataclasses
from collections.abc import Generator
from dataclasses import dataclass

from msgspec.structs import replace

from tiercel.errors import AdmissionError
from tiercel.server.api.chat_call import ChatCall
from tiercel.server.api.params import ModelLimits, SamplingPlan, check_length
from tiercel.server.api.schemas.chat import ChatFields, MessageFields

_NAMES = {
    "max_completion_tokens": "max_output_tokens",
    "messages": "input",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "verbosity": "text.verbosity",
}


def renamed(refusal: AdmissionError) -> AdmissionError:
    """Return a refusal with the chat API's field as the responses API names it."""
    name = _NAMES.get(refusal.param or "")
    if name is None:
        return refusal
    return AdmissionError(
        refusal.status,
        refusal.message.replace(refusal.param or "", name),
        code=refusal.code,
        kind=refusal.kind,
        param=name,
        retry_after_s=refusal.retry_after_s,
    )


@contextlib.contextmanager
def in_our_words() -> Generator[None]:
    """Rename the chat API's fields in refusals to those of the responses API."""
    try:
        yield
    except AdmissionError as exc:
        raise renamed(exc) from exc


@dataclass(frozen=True, slots=True)
class ResponseCall:
    """A response to be generated. `truncates`: the oldest turns are left out of a conversation that is too long."""

    chat: ChatCall
    truncates: bool

    @property
    def fields(self) -> ChatFields:
        """The fields of the chat request."""
        return self.chat.fields

    @property
    def num_prompts(self) -> int:
        return 1

    def plan(self, limits: ModelLimits) -> SamplingPlan:
        with in_our_words():
            plan = self.chat.plan(limits)
        return replace(plan, max_tokens_field="max_output_tokens")

    async def tokenize(self, limits: ModelLimits) -> list[list[int]]:
        with in_our_words():
            return [await self._shortened(limits)] if self.truncates else await self.chat.tokenize(limits)

    async def _shortened(self, limits: ModelLimits) -> list[int]:
        """Return the tokens of the conversation without as many of its oldest turns as necessary, but the last one.

        System messages before the first turn stay. Errors: AdmissionError (400) if the last turn alone is too long.
        """
        messages = self.fields.messages
        starts = [index for index, message in enumerate(messages) if message.role == "user"] or [0]
        fewest, most = 0, len(starts) - 1  # number of turns to leave out
        tokens: list[int] = []
        while fewest <= most:
            dropped = (fewest + most) // 2 if tokens or fewest else 0
            kept = messages if dropped == 0 else [*messages[: starts[0]], *messages[starts[dropped] :]]
            try:
                tokens = await self._fitting(kept, limits)
                most = dropped - 1
            except AdmissionError as exc:
                if exc.code != "context_length_exceeded" or (dropped == most and not tokens):
                    raise
                fewest = dropped + 1
        return tokens

    async def _fitting(self, messages: list[MessageFields], limits: ModelLimits) -> list[int]:
        shortened = dataclasses.replace(self.chat, fields=self.fields.model_copy(update={"messages": messages}))
        (tokens,) = await shortened.tokenize(limits)
        check_length(len(tokens), self.fields.max_completion_tokens, "max_output_tokens", limits)
        return tokens
