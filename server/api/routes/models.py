"""/v1/models."""

from starlette.responses import Response

from tiercel.server.api.context import ServerContext
from tiercel.server.api.contract import KEY_REFUSALS, ApiRoute, Contract
from tiercel.server.api.replies.models import ModelCard, ModelList
from tiercel.server.http.answer import json_answer


class ModelRoutes:
    """The handlers of the model list."""

    def __init__(self, context: ServerContext) -> None:
        self._context = context

    def routes(self) -> list[ApiRoute]:
        """Return the routes; all of them need a key."""
        every = Contract(answers={200: ModelList}, refusals=KEY_REFUSALS, takes_api_key=True)
        one = Contract(answers={200: ModelCard}, refusals=(*KEY_REFUSALS, 404), takes_api_key=True)
        return [
            ApiRoute("GET", "/v1/models", self.models, every),
            ApiRoute("GET", "/v1/models/{name:path}", self.model, one),
        ]

    async def models(self) -> Response:
        """List the names that this server answers to."""
        names = self._context.settings.served_model_names
        return json_answer(ModelList(data=[self._card(name) for name in names]))

    async def model(self, name: str) -> Response:
        """Describe one of the names."""
        return json_answer(self._card(self._context.model_name(name)))

    def _card(self, name: str) -> ModelCard:
        ready = self._context.client.status.ready
        return ModelCard(
            id=name,
            created=self._context.started_at,
            root=self._context.settings.served_model_names[0],
            max_model_len=None if ready is None else ready.max_model_len,
        )
