"""A request to the responses API as a chat request: what it means, and its prompt."""

from contextlib import AbstractContextManager
from dataclasses import dataclass

from msgspec.structs import replace

from tiercel.server.api.chat_call import ChatCall
from tiercel.server.api.params import ModelLimits, SamplingPlan, check_length
from tiercel.server.api.prompt import check_text_length, may_fit
from tiercel.server.api.renamed import renamed, renaming
from tiercel.server.api.response_input import ResponseInput
from tiercel.server.api.schemas.chat import ChatFields, MessageFields
from tiercel.server.api.schemas.structured import SchemaPaths
from tiercel.server.text.chat_template import ChatPrompt
from tiercel.values.errors import AdmissionError

_NAMES = {
    "max_completion_tokens": "max_output_tokens",
    "messages": "input",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "verbosity": "text.verbosity",
}

RESPONSE_PATHS = SchemaPaths("text.format.schema", "tools.{}.parameters")


def as_responses_say(refusal: AdmissionError) -> AdmissionError:
    """Return a refusal with the chat API's field as the responses API names it."""
    return renamed(refusal, _NAMES)


def in_our_words() -> AbstractContextManager[None]:
    """Rename the chat API's fields in refusals to those of the responses API."""
    return renaming(_NAMES)


_HEAD_COPIES = 3  # of the instructions: in the response, and in the events before the first delta


class MessageTurns:
    """The messages of a conversation, of which the oldest turns may be left out. A turn begins with a user's message.

    Messages before the first turn stay.
    """

    def __init__(self, messages: list[MessageFields]) -> None:
        self._messages = messages
        self._starts = [index for index, message in enumerate(messages) if message.role == "user"] or [0]

    @property
    def num_turns(self) -> int:
        """Number of turns, at least one."""
        return len(self._starts)

    def without_oldest(self, turns: int) -> list[MessageFields]:
        """Return the messages without so many of the oldest turns."""
        if not turns:
            return self._messages
        return [*self._messages[: self._starts[0]], *self._messages[self._starts[turns] :]]

    def letters(self) -> int:
        """Return the number of characters of all messages."""
        return sum(map(_letters, self._messages))

    def letters_of(self, turn: int) -> int:
        """Return the number of characters of one turn, which is not the last one."""
        return sum(map(_letters, self._messages[self._starts[turn] : self._starts[turn + 1]]))


@dataclass(frozen=True, slots=True)
class ResponseCall:
    """A response to be generated, whose messages are those of `input`; those of `chat` stand in for them.

    `truncates`: the oldest turns are left out of a conversation that is too long. `is_stored`: its items are encoded.
    """

    chat: ChatCall
    input: ResponseInput
    truncates: bool
    is_stored: bool

    @property
    def fields(self) -> ChatFields:
        """The fields of the chat request, but for its messages."""
        return self.chat.fields

    @property
    def num_prompts(self) -> int:
        return 1

    @property
    def field(self) -> str:
        return "input"

    @property
    def expanded_bytes(self) -> int:
        return self.input.expanded_bytes

    def plan(self, limits: ModelLimits) -> SamplingPlan:
        with in_our_words():
            plan = self.chat.plan(limits)
        return replace(plan, max_tokens_field="max_output_tokens", held_bytes=_HEAD_COPIES * self.input.head_bytes)

    async def tokenize(self, limits: ModelLimits) -> list[list[int]]:
        with in_our_words():
            try:
                prompt = await self._shortened(limits) if self.truncates else await self._whole(limits)
            finally:
                self.input.abandon()
            return [self.chat.begin(prompt)]

    async def _whole(self, limits: ModelLimits) -> ChatPrompt:
        return await self.chat.context.in_worker(lambda: self.chat.render(self._messages(limits), limits))

    def _messages(self, limits: ModelLimits) -> list[MessageFields]:
        """Return the messages. A conversation that cannot fit is not decoded."""
        if not self.truncates:
            check_text_length(self.input.least_letters, self.chat.context.codec, limits)
        messages = self.input.messages()
        if self.is_stored:
            self.input.encode()
        return messages

    async def _shortened(self, limits: ModelLimits) -> ChatPrompt:
        """Return the prompt of the conversation without as many of its oldest turns as necessary, but the last one.

        System messages before the first turn stay. Each attempt is work of its own, so that others get their turn.
        Errors: AdmissionError (400) if the last turn alone is too long.
        """
        turns = await self.chat.context.in_worker(lambda: self._possible(limits))
        fewest, most = 0, turns.num_turns - 1  # number of turns to leave out
        prompt: ChatPrompt | None = None
        while fewest <= most:
            dropped = (fewest + most) // 2 if prompt is not None or fewest else 0
            try:
                prompt = await self._fitting(turns.without_oldest(dropped), limits)
                most = dropped - 1
            except AdmissionError as exc:
                if exc.code != "context_length_exceeded" or (dropped == most and prompt is None):
                    raise
                fewest = dropped + 1
        assert prompt is not None  # otherwise the last refusal was raised
        return prompt

    def _possible(self, limits: ModelLimits) -> MessageTurns:
        """Return the messages without the oldest turns that cannot fit, as their number of characters shows."""
        turns = MessageTurns(self._messages(limits))
        letters = turns.letters()
        dropped = 0
        while dropped < turns.num_turns - 1 and not may_fit(letters, self.chat.context.codec, limits):
            letters -= turns.letters_of(dropped)
            dropped += 1
        return MessageTurns(turns.without_oldest(dropped)) if dropped else turns

    async def _fitting(self, messages: list[MessageFields], limits: ModelLimits) -> ChatPrompt:
        prompt = await self.chat.context.in_worker(lambda: self.chat.render(messages, limits))
        check_length(len(prompt.tokens), self.fields.max_completion_tokens, "max_output_tokens", limits)
        return prompt


def _letters(message: MessageFields) -> int:
    texts = (message.content, message.reasoning_content)
    return sum(len(text) for text in texts if isinstance(text, str))
