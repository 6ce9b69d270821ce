"""Routes of the page: its files are open, the dashboard snapshot needs a key."""

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response

from tiercel.server.api.context import ServerContext
from tiercel.server.http.admin_listener import AdminListener
from tiercel.server.http.guarded_route import GuardedRoute
from tiercel.server.tenancy.auth import PageGuard, viewer_of
from tiercel.server.ui.dashboard import Dashboard
from tiercel.server.ui.past import ServerPast
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

    def __init__(self, context: ServerContext, past: ServerPast, admin: AdminListener | None = None) -> None:
        """`admin` is the listener that alone serves the page, if there is one."""
        self._context = context
        self._past = past
        self._admin = admin
        self._files = read_static_files()
        self._dashboard = Dashboard(context)
        self._guard = PageGuard(context.tenants)

    def routes(self) -> list[GuardedRoute]:
        """Return the routes; /ui/data and /ui/past have their guard."""
        return [
            GuardedRoute("/", self.root),
            GuardedRoute("/ui", self.page),
            GuardedRoute("/ui/", self.redirect),
            GuardedRoute("/ui/data", self.data, guard=self._guard),
            GuardedRoute("/ui/past", self.past, guard=self._guard),
            GuardedRoute("/ui/{name:path}", self.file),
        ]

    async def root(self, request: Request) -> Response:
        """Redirect a browser to the page; tell other clients in one line what this is."""
        has_page = self._admin is None or self._admin.has(request.scope)
        headers = {"Vary": "Accept"}
        prefix = self._context.settings.root_path
        if has_page and "text/html" in request.headers.get("accept", ""):
            return RedirectResponse(f"{prefix}/ui", 307, headers)
        page = f", a dashboard at {prefix}/ui" if has_page else ""
        name = self._context.settings.served_model_names[0]
        return PlainTextResponse(
            f"tiercel serves {name}: an OpenAI-compatible API at {prefix}/v1{page}.\n", 200, headers
        )

    async def page(self, request: Request) -> Response:
        """Send the page."""
        return self._send(_PAGE, request)

    async def redirect(self, _: Request) -> Response:
        """Redirect to /ui: the page's relative links start there."""
        return RedirectResponse("../ui", 308, _HEADERS)

    async def file(self, request: Request, name: str) -> Response:
        """Send a file of the page. Errors: HTTPException (404)."""
        return self._send(name, request)

    async def data(self, request: Request) -> Response:
        """Send the dashboard snapshot for this viewer."""
        body = self._dashboard.snapshot(viewer_of(request.scope))
        return Response(body, headers={**_HEADERS, "Cache-Control": "no-store"}, media_type="application/json")

    async def past(self, request: Request) -> Response:
        """Send the last ten minutes for this viewer."""
        body = msgspec.json.encode(self._past.snapshot(is_operator=viewer_of(request.scope).is_operator))
        return Response(body, headers={**_HEADERS, "Cache-Control": "no-store"}, media_type="application/json")

    def _send(self, name: str, request: Request) -> Response:
        file = self._files.get(name)
        if file is None:
            raise HTTPException(404)
        headers = {**_HEADERS, "Cache-Control": "no-cache", "ETag": file.etag}
        if request.headers.get("if-none-match") == file.etag:
            return Response(status_code=304, headers=headers)
        return Response(file.body, headers=headers, media_type=file.media_type)
