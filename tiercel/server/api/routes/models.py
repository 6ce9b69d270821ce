"""/v1/models. A client that sends the header `anthropic-version` gets Anthropic's shape."""

from datetime import UTC, datetime

from starlette.requests import Request
from starlette.responses import Response

from tiercel.server.api.context import ServerContext
from tiercel.server.api.contract import KEY_REFUSALS, ApiRoute, Contract
from tiercel.server.api.replies.models import MessageModel, MessageModelList, ModelCard, ModelList
from tiercel.server.http.answer import json_answer
from tiercel.server.http.failure import FaultBody
from tiercel.server.http.message_failure import MessageFaultBody, is_of_messages


class ModelRoutes:
    """The handlers of the model list."""

    def __init__(self, context: ServerContext) -> None:
        self._context = context

    def routes(self) -> list[ApiRoute]:
        """Return the routes; all of them need a key."""
        every = Contract(answers={200: ModelList | MessageModelList}, refusals=KEY_REFUSALS, takes_api_key=True)
        one = Contract(
            answers={200: ModelCard | MessageModel, 404: FaultBody | MessageFaultBody},
            refusals=KEY_REFUSALS,
            takes_api_key=True,
        )
        return [
            ApiRoute("GET", "/v1/models", self.models, every),
            ApiRoute("GET", "/v1/models/{name:path}", self.model, one),
        ]

    async def models(self, request: Request) -> Response:
        """List the names that this server answers to."""
        names = self._context.settings.served_model_names
        if is_of_messages(request.scope):
            models = [self._message_model(name) for name in names]
            return json_answer(MessageModelList(data=models, first_id=names[0], last_id=names[-1]))
        return json_answer(ModelList(data=[self._card(name) for name in names]))

    async def model(self, request: Request, name: str) -> Response:
        """Describe one of the names."""
        served = self._context.model_name(name)
        return json_answer(self._message_model(served) if is_of_messages(request.scope) else self._card(served))

    def _message_model(self, name: str) -> MessageModel:
        ready, created = self._context.client.status.ready, datetime.fromtimestamp(self._context.started_at, UTC)
        length = None if ready is None else ready.max_model_len
        return MessageModel(
            id=name,
            display_name=name,
            created_at=created.isoformat().replace("+00:00", "Z"),
            max_input_tokens=length,
            max_tokens=length,
        )

    def _card(self, name: str) -> ModelCard:
        ready = self._context.client.status.ready
        return ModelCard(
            id=name,
            created=self._context.started_at,
            root=self._context.settings.served_model_names[0],
            max_model_len=None if ready is None else ready.max_model_len,
        )
