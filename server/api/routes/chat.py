"""/v1/chat/completions."""

from starlette.requests import Request
from starlette.responses import Response

from tiercel.server.api.chat_call import ChatCall
from tiercel.server.api.context import ServerContext
from tiercel.server.api.contract import GENERATION_REFUSALS, ApiRoute, Contract
from tiercel.server.api.pipeline import GenerationPipeline, ReadCall
from tiercel.server.api.replies.chat import ChatChunk, ChatReply, ChatShape
from tiercel.server.api.schemas.chat import ChatFields
from tiercel.server.api.schemas.fields import read_fields
from tiercel.server.api.schemas.unsupported import refuse_unsupported_in_messages


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
        """Answer a conversation."""
        return await self._pipeline.answer(request, self._read)

    def _read(self, body: dict[str, object]) -> ReadCall:
        refuse_unsupported_in_messages(body)
        fields = read_fields(ChatFields, body)
        head = self._pipeline.head(fields, "chatcmpl-", with_logprobs=bool(fields.logprobs))
        call = ChatCall.of(fields, self._context)
        return call, ChatShape(head, call.reader), head.model
