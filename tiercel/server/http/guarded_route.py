"""A route behind a guard."""

from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import Scope

RouteGuard = Callable[[Request], Awaitable[None]]


class GuardedRoute(Route):
    """Asks a guard first, and passes the parts of the path to the handler by name. HEAD is answered wherever GET is.

    FastAPI's route reads from the handler's signature what a body and dependencies are. Ours read bodies themselves,
    and a hundred routes would take 25 ms to build.
    """

    def __init__(
        self,
        path: str,
        handler: Callable[..., Awaitable[Response]],
        method: str = "GET",
        guard: RouteGuard | None = None,
    ) -> None:
        async def answer(request: Request) -> Response:
            if guard is not None:
                await guard(request)
            return await handler(request, **request.path_params)

        super().__init__(path, answer, methods=[method], name=handler.__name__)

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """Tell whether the path and the method are those of this route, which the layers around find in the scope."""
        match, found = super().matches(scope)
        return match, found if match is Match.NONE else {**found, "route": self}
