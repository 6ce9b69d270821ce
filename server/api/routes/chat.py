"""/v1/chat/completions."""

from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response

from tiercel.server.api.context import ServerContext
from tiercel.server.api.contract import GENERATION_REFUSALS, ApiRoute, Contract
from tiercel.server.api.params import ModelLimits, SamplingPlan, chat_plan
from tiercel.server.api.pipeline import GenerationPipeline, ReadCall
from tiercel.server.api.prompt import chat_work, empty_prompt
from tiercel.server.api.replies.chat import ChatChunk, ChatReply, ChatShape
from tiercel.server.api.schemas.chat import ChatFields
from tiercel.server.api.schemas.fields import read_fields
from tiercel.server.api.schemas.unsupported import refuse_unsupported_in_messages
from tiercel.server.text.chat_template import ChatTemplate


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
        return _ChatCall(fields, self._context.chat_template(), self._context), ChatShape(head), head.model


@dataclass(frozen=True, slots=True)
class _ChatCall:
    fields: ChatFields
    template: ChatTemplate
    context: ServerContext

    @property
    def num_prompts(self) -> int:
        return 1

    def plan(self, limits: ModelLimits) -> SamplingPlan:
        return chat_plan(self.fields, self.context.defaults, limits)

    async def tokenize(self, limits: ModelLimits) -> list[list[int]]:
        prompt = await self.context.in_worker(chat_work(self.fields, self.template, self.context.codec, limits))
        if not prompt.tokens:
            raise empty_prompt()
        return [prompt.tokens]
