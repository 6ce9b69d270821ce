"""/v1/chat/completions."""

from starlette.requests import Request
from starlette.responses import Response

from tiercel.server.api.chat_call import ChatCall
from tiercel.server.api.chat_session import ChatKeeper, KeptChat, KeptChatCall, KeptChatShape
from tiercel.server.api.context import ServerContext
from tiercel.server.api.contract import GENERATION_REFUSALS, ApiRoute, Contract
from tiercel.server.api.middleware import record_of
from tiercel.server.api.pipeline import GenerationPipeline, ReadCall
from tiercel.server.api.replies.chat import ChatChunk, ChatReply, ChatShape
from tiercel.server.api.schemas.chat import ChatFields
from tiercel.server.api.schemas.fields import read_fields
from tiercel.server.api.schemas.unsupported import refuse_unsupported_in_messages
from tiercel.server.tenancy.auth import tenant_of


class ChatRoutes:
    """The handlers of the chat API."""

    def __init__(self, context: ServerContext, pipeline: GenerationPipeline) -> None:
        self._context = context
        self._pipeline = pipeline

    def routes(self) -> list[ApiRoute]:
        """Return the routes; all of them need a key."""
        contract = Contract(
            bodies=(ChatFields,), answers={200: ChatReply}, events=ChatChunk, refusals=GENERATION_REFUSALS
        )
        return [ApiRoute("POST", "/v1/chat/completions", self.chat, contract)]

    async def chat(self, request: Request) -> Response:
        """Answer a conversation. With `store`, the completion is stored."""
        context = self._context
        kept: list[tuple[KeptChatShape, ChatKeeper]] = []

        def read(body: dict[str, object]) -> ReadCall:
            refuse_unsupported_in_messages(body)
            fields = read_fields(ChatFields, body)
            head = self._pipeline.head(fields, "chatcmpl-", with_logprobs=bool(fields.logprobs))
            call = ChatCall.of(fields, context)
            if fields.store and not context.store.keeps_any:
                fields.add_ignored("store")
            if not fields.store or not context.store.keeps_any:
                return call, ChatShape(head, call.reader), head.model
            tenant, request_id = tenant_of(request.scope).name, record_of(request.scope).request_id
            keeper = ChatKeeper(context.store, tenant, head, fields, body, request_id, context.defaults)
            shape = KeptChatShape(head, call.reader, keeper)
            kept.append((shape, keeper))
            return KeptChatCall(call, keeper), shape, head.model

        begun = await self._pipeline.begin(request, read, ("truncate_prompt_tokens",))
        answer = self._pipeline.answer_of(begun)
        return KeptChat(answer, begun, *kept[0]) if kept else answer
