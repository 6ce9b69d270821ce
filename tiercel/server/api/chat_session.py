"""One chat completion with `store`, from its request to its place in the store."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import msgspec
from msgspec import UnsetType
from msgspec.structs import replace
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tiercel.server.api.begun import BegunAnswer
from tiercel.server.api.chat_call import ChatCall
from tiercel.server.api.generation_config import SamplingDefaults
from tiercel.server.api.object_store import ObjectStore
from tiercel.server.api.params import ModelLimits, SamplingPlan
from tiercel.server.api.replies.chat import ChatChunk, ChatReply, ChatShape
from tiercel.server.api.replies.head import ReplyHead
from tiercel.server.api.replies.hole import HOLE, hole
from tiercel.server.api.replies.stored_chats import Json, StoredChatBody, StoredMessage, without_tokens
from tiercel.server.api.replies.usage import UsageBody, usage_body
from tiercel.server.api.schemas.chat import ChatFields, MessageFields
from tiercel.server.api.schemas.tools import CalledFunctionFields
from tiercel.server.api.stored_chat import StoredChat, message_id
from tiercel.server.client.choice_text import ChoiceDelta
from tiercel.server.text.answer.reader import AnswerReader

_MAX_LETTER_BYTES = 4
_MESSAGE_BYTES = 512  # of a message while it is encoded, beside its texts


class ChatKeeper:
    """Writes one chat completion to the store. A completion that is evicted while it is generated is not stored."""

    def __init__(
        self,
        store: ObjectStore,
        tenant: str,
        head: ReplyHead,
        fields: ChatFields,
        body: Mapping[str, object],
        request_id: str,
        defaults: SamplingDefaults,
    ) -> None:
        """`body`: that `fields` were read from. `defaults`: those in force where `fields` name nothing."""
        self._store = store
        self._tenant = tenant
        self._head = head
        self._fields = fields
        self._request_id = request_id
        self._defaults = defaults
        self._asked = {name: body.get(name) for name in ("tools", "tool_choice", "response_format")}
        self._messages: list[bytes] = []
        self.is_over = False

    @property
    def expanded_bytes(self) -> int:
        """The memory of the messages as they are stored."""
        return sum(map(_message_bytes, self._fields.messages))

    @property
    def most_bytes(self) -> int:
        """The most memory that a completion may have."""
        return self._store.object_bytes

    def encode(self) -> None:
        """Encode the messages, and what else the completion repeats of the request. For workers."""
        messages = self._fields.messages
        self._messages = [_encoded(self._head.id, index, message) for index, message in enumerate(messages)]
        self._asked = {name: msgspec.Raw(msgspec.json.encode(value)) for name, value in self._asked.items()}

    def begin(self) -> None:
        """Store the completion without an answer. From here on only the store has its messages."""
        messages, self._messages = self._messages, []
        metadata = self._fields.metadata or {}
        self._fields = self._fields.model_copy(update={"messages": []})
        self._store.put(self._tenant, StoredChat(self._head.id, self._head.model, metadata, messages))

    def end(self, reply: ChatReply) -> None:
        """Store the completion with its answer."""
        self.is_over = True
        chat = self._store.get(self._tenant, StoredChat, reply.id)
        if chat is None:
            return
        fields, defaults = self._fields, self._defaults
        body = StoredChatBody(
            id=reply.id,
            created=reply.created,
            model=reply.model,
            choices=without_tokens(reply),
            service_tier=reply.service_tier,
            system_fingerprint=reply.system_fingerprint,
            usage=reply.usage,
            request_id=self._request_id,
            metadata=hole(dict[str, str]),
            temperature=defaults.temperature if fields.temperature is None else fields.temperature,
            top_p=defaults.top_p if fields.top_p is None else fields.top_p,
            presence_penalty=fields.presence_penalty or 0.0,
            frequency_penalty=fields.frequency_penalty or 0.0,
            seed=fields.seed,
            tools=cast(list[Json] | None, self._asked["tools"]),
            tool_choice=cast(str | None, self._asked["tool_choice"]),
            response_format=cast(Json | None, self._asked["response_format"]),
            input_user=fields.user,
        )
        before, after = msgspec.json.encode(body).split(HOLE)
        self._store.put(self._tenant, chat.ended(before, after))

    def drop(self) -> None:
        """Forget the completion."""
        self._store.remove(self._tenant, StoredChat, self._head.id)


@dataclass(frozen=True, slots=True)
class KeptChatCall:
    """A chat request whose messages are encoded for the store."""

    call: ChatCall
    keeper: ChatKeeper

    @property
    def fields(self) -> ChatFields:
        return self.call.fields

    @property
    def num_prompts(self) -> int:
        return self.call.num_prompts

    @property
    def field(self) -> str:
        return self.call.field

    @property
    def expanded_bytes(self) -> int:
        return self.call.expanded_bytes + self.keeper.expanded_bytes

    def plan(self, limits: ModelLimits) -> SamplingPlan:
        return self.call.plan(limits)

    async def tokenize(self, limits: ModelLimits) -> list[list[int]]:
        prompts = await self.call.tokenize(limits)
        await self.call.context.in_worker(self.keeper.encode)
        return prompts


class KeptChatShape(ChatShape):
    """A `ChatShape` that gives the whole answer to the store, also that of a stream.

    The text of a stream is collected as long as the store can have room for it.
    """

    def __init__(self, head: ReplyHead, reader: AnswerReader, keeper: ChatKeeper) -> None:
        super().__init__(head, reader)
        self._on_reply = keeper.end
        self._room_bytes = keeper.most_bytes
        self._texts: dict[int, bytearray] = {}
        self._last: dict[int, ChoiceDelta] = {}
        self._is_closed = False

    @property
    def has_frames(self) -> bool:
        """False: the text of every delta is collected."""
        return False

    @property
    def is_whole(self) -> bool:
        """Whether a stream has ended, and its text has been collected."""
        return self._is_closed and self._room_bytes >= 0

    def chunks(self, delta: ChoiceDelta, usage: UsageBody | UnsetType | None) -> list[ChatChunk]:
        """Return the parts of a delta, and keep its text."""
        text = delta.text.encode()
        self._room_bytes -= len(text)
        if self._room_bytes >= 0:
            self._texts.setdefault(delta.choice, bytearray()).extend(text)
            self._last[delta.choice] = delta
        else:
            self._texts.clear()
        return super().chunks(delta, usage)

    def closing(self, usage: UsageBody | None) -> bytes:
        """Return the last events."""
        self._is_closed = True
        return super().closing(usage)

    def reply(self, choices: Sequence[ChoiceDelta], usage: UsageBody) -> ChatReply:
        """Return the whole answer, and give it to the store."""
        reply = super().reply(choices, usage)
        self._on_reply(reply)
        return reply

    def end_stream(self, usage: UsageBody) -> None:
        """Give the answer of a stream, which is whole, to the store."""
        choices = [replace(self._last[index], text=text.decode()) for index, text in sorted(self._texts.items())]
        self._texts, self._last = {}, {}
        self.reply(choices, usage)


class KeptChat(Response):
    """The answer to a request with `store`. If it fails, or the client leaves before its end, nothing is stored."""

    def __init__(self, answer: Response, begun: BegunAnswer, shape: KeptChatShape, keeper: ChatKeeper) -> None:
        super().__init__()
        self._answer = answer
        self._begun = begun
        self._shape = shape
        self._keeper = keeper

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._keeper.begin()
        try:
            await self._answer(scope, receive, send)
            if self._shape.is_whole:
                await self._begun.generation.settle()  # only then the cached tokens are known
        finally:
            if self._shape.is_whole:
                usage = self._begun.generation.usage()
                self._shape.end_stream(usage_body(usage, with_details=self._begun.rules.with_details))
            if not self._keeper.is_over:
                self._keeper.drop()


def _encoded(chat: str, index: int, message: MessageFields) -> bytes:
    content = message.content
    called = message.function_call
    calls = message.tool_calls or []
    return msgspec.json.encode(
        StoredMessage(
            id=message_id(chat, index),
            role=message.role,
            content=content if isinstance(content, str) else None,
            content_parts=content if isinstance(content, list) else None,
            name=message.name,
            refusal=message.refusal,
            reasoning_content=message.reasoning_content or message.reasoning,
            tool_calls=[{"id": call.id, "type": call.type, "function": _called(call.function)} for call in calls]
            or None,
            function_call=None if called is None else _called(called),
            tool_call_id=message.tool_call_id,
        )
    )


def _called(function: CalledFunctionFields) -> dict[str, str]:
    arguments = function.arguments
    text = arguments if isinstance(arguments, str) else msgspec.json.encode(arguments).decode()
    return {"name": function.name, "arguments": text}


def _message_bytes(message: MessageFields) -> int:
    content = message.content
    texts = [message.refusal, message.reasoning_content, message.reasoning]
    parts = content if isinstance(content, list) else [{"text": content}]
    texts += [value for part in parts for value in part.values() if isinstance(value, str)]
    texts += [str(call.function.arguments) for call in message.tool_calls or ()]
    return _MESSAGE_BYTES * (1 + len(parts)) + sum(map(_text_bytes, filter(None, texts)))


def _text_bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text) * _MAX_LETTER_BYTES
