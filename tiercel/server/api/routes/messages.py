"""/v1/messages and /v1/messages/count_tokens: the API of Anthropic's clients."""

import secrets
from typing import cast

from starlette.requests import Request
from starlette.responses import Response

from tiercel.server.api.chat_call import ChatCall
from tiercel.server.api.context import ServerContext
from tiercel.server.api.contract import GENERATION_REFUSALS, ApiRoute, Contract
from tiercel.server.api.message_turns import MESSAGE_PATHS, chat_body, in_words_of_messages, prompt_body
from tiercel.server.api.middleware import record_of
from tiercel.server.api.pipeline import GenerationPipeline, ReadCall
from tiercel.server.api.replies.message_shape import MessageShape
from tiercel.server.api.replies.messages import MessageEvent, MessageReply, TokenCount
from tiercel.server.api.schemas.chat import ChatFields, placed
from tiercel.server.api.schemas.fields import read_fields
from tiercel.server.api.schemas.messages import MessagePromptFields, MessagesFields, refuse_hosted
from tiercel.server.api.schemas.unsupported import refuse_unsupported
from tiercel.server.http.answer import json_answer
from tiercel.server.http.body_budget import BodyHolding
from tiercel.server.http.message_failure import MessageFaultBody
from tiercel.server.http.watch import run_watched
from tiercel.server.tenancy.auth import tenant_of

_REFUSALS = dict.fromkeys((*GENERATION_REFUSALS, 529), MessageFaultBody)


class MessageRoutes:
    """The handlers of the messages API. A message is served as a chat completion with one choice."""

    def __init__(self, context: ServerContext, pipeline: GenerationPipeline) -> None:
        self._context = context
        self._pipeline = pipeline

    def routes(self) -> list[ApiRoute]:
        """Return the routes; all of them need a key."""
        create = Contract(
            bodies=(MessagesFields,),
            answers={200: MessageReply, **_REFUSALS},
            events=MessageEvent,
            refusals=(401,),
            takes_api_key=True,
        )
        count = Contract(
            bodies=(MessagePromptFields,), answers={200: TokenCount, **_REFUSALS}, refusals=(401,), takes_api_key=True
        )
        return [
            ApiRoute("POST", "/v1/messages", self.create, create),
            ApiRoute("POST", "/v1/messages/count_tokens", self.count, count),
        ]

    async def create(self, request: Request) -> Response:
        """Answer a conversation."""
        request_id = record_of(request.scope).request_id
        with in_words_of_messages():
            return await self._pipeline.answer(request, lambda body: self._read(body, request_id))

    async def count(self, request: Request) -> Response:
        """Return the number of tokens that the model would read."""
        tenant = tenant_of(request.scope)
        with self._context.hold_body(request) as holding:
            body = await self._context.read_object(request, holding)
            record_of(request.scope).rate_headers = lambda: self._context.admission.rate_headers(tenant)
            with self._context.admission.enter(tenant):
                return await run_watched(self._counted(body, holding), request.receive)

    async def _counted(self, body: dict[str, object], holding: BodyHolding) -> Response:
        with holding.displaceable():
            limits = await self._context.limits()
        refuse_hosted(body)
        fields = read_fields(MessagePromptFields, body)
        self._context.model_name(fields.model)
        with in_words_of_messages():
            (tokens,) = await self._call(prompt_body(fields)).tokenize(limits)
        return json_answer(TokenCount(len(tokens)))

    def _read(self, body: dict[str, object], request_id: str) -> ReadCall:
        refuse_hosted(body)
        fields = read_fields(MessagesFields, body)
        model = self._context.model_name(fields.model)
        call = self._call(chat_body(fields), fields.stop_sequences)
        call.fields.take_ignored(fields)
        return call, MessageShape(f"msg_{secrets.token_hex(16)}", model, request_id, call.reader), model

    def _call(self, body: dict[str, object], stops: list[str] | None = None) -> ChatCall:
        refuse_unsupported(body)
        messages = cast(list[dict[str, object]], body["messages"])
        places = [str(message.pop("place")) for message in messages]
        fields = read_fields(ChatFields, body)
        fields.name_schemas(MESSAGE_PATHS)
        placed(fields.messages, places)
        if stops:
            fields = fields.model_copy(update={"stop": stops})  # there may be more than in a chat request
        return ChatCall.of(fields, self._context)
