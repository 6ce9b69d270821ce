"""Routes of the page: its files are open, the dashboard snapshot needs a key."""

from fastapi import APIRouter, Depends
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from tiercel.server.api.context import ServerContext
from tiercel.server.tenancy.auth import PageGuard, viewer_of
from tiercel.server.ui.dashboard import Dashboard
from tiercel.server.ui.static_files import read_static_files

_PAGE = "index.html"
_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
}


class UiRoutes:
    """The handlers of /ui."""

    def __init__(self, context: ServerContext) -> None:
        self._files = read_static_files()
        self._dashboard = Dashboard(context)
        self._guard = PageGuard(context.tenants)

    def router(self) -> APIRouter:
        """Return the routes; /ui/data has its guard."""
        router = APIRouter(tags=["page"], include_in_schema=False)
        router.add_api_route("/ui", self.page, methods=["GET", "HEAD"], response_model=None)
        router.add_api_route("/ui/", self.redirect, methods=["GET", "HEAD"], response_model=None)
        router.add_api_route(
            "/ui/data", self.data, methods=["GET", "HEAD"], response_model=None, dependencies=[Depends(self._guard)]
        )
        router.add_api_route("/ui/{name:path}", self.file, methods=["GET", "HEAD"], response_model=None)
        return router

    async def page(self, request: Request) -> Response:
        """Send the page."""
        return self._send(_PAGE, request)

    async def redirect(self) -> Response:
        """Redirect to /ui: the page's relative links start there."""
        return RedirectResponse("../ui", 308, _HEADERS)

    async def file(self, name: str, request: Request) -> Response:
        """Send a file of the page. Errors: HTTPException (404)."""
        return self._send(name, request)

    async def data(self, request: Request) -> Response:
        """Send the dashboard snapshot for this viewer."""
        body = self._dashboard.snapshot(viewer_of(request.scope))
        return Response(body, headers={**_HEADERS, "Cache-Control": "no-store"}, media_type="application/json")

    def _send(self, name: str, request: Request) -> Response:
        file = self._files.get(name)
        if file is None:
            raise HTTPException(404)
        headers = {**_HEADERS, "Cache-Control": "no-cache", "ETag": file.etag}
        if request.headers.get("if-none-match") == file.etag:
            return Response(status_code=304, headers=headers)
        return Response(file.body, headers=headers, media_type=file.media_type)
