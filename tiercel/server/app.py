"""The ASGI application: routes and layers put together."""

from collections.abc import Callable, Coroutine
from typing import cast

from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response

from tiercel import __version__
from tiercel.server.api.body_limit import BodyLimit
from tiercel.server.api.context import ServerContext
from tiercel.server.api.contract import ApiRoute
from tiercel.server.api.middleware import ErrorBoundary, RequestAccounting
from tiercel.server.api.narrowing import BodyLimits
from tiercel.server.api.openapi import DocumentedApp
from tiercel.server.api.params import ModelLimits
from tiercel.server.api.pipeline import GenerationPipeline
from tiercel.server.api.routes.admin import AdminRoutes
from tiercel.server.api.routes.batches import BatchRoutes
from tiercel.server.api.routes.chat import ChatRoutes
from tiercel.server.api.routes.completions import CompletionRoutes
from tiercel.server.api.routes.conversations import ConversationRoutes
from tiercel.server.api.routes.embeddings import EmbeddingRoutes
from tiercel.server.api.routes.files import FileRoutes
from tiercel.server.api.routes.message_batches import MessageBatchRoutes
from tiercel.server.api.routes.messages import MessageRoutes
from tiercel.server.api.routes.models import ModelRoutes
from tiercel.server.api.routes.operations import OperationsRoutes
from tiercel.server.api.routes.responses import ResponseRoutes
from tiercel.server.api.routes.stored_chats import StoredChatRoutes
from tiercel.server.api.routes.tokenize import TokenizeRoutes
from tiercel.server.batch.line import BATCH_ENDPOINTS
from tiercel.server.batch.upload_form import FORM_BYTES
from tiercel.server.http.admin_listener import AdminElsewhere, AdminListener, is_for_operator
from tiercel.server.http.failure import http_error, on_admission_error
from tiercel.server.http.guarded_route import RouteGuard
from tiercel.server.http.host import HostCheck, accepted_hosts
from tiercel.server.http.root_path import RootPath, check_root_path
from tiercel.server.tenancy.auth import AdminGuard, Guard, MessagesGuard, MetricsGuard, ModelsGuard
from tiercel.server.ui.past import ServerPast
from tiercel.server.ui.routes import UiRoutes
from tiercel.settings.exposure import admin_host
from tiercel.values.errors import AdmissionError


def create_app(
    context: ServerContext, admin: AdminListener | None = None, past: ServerPast | None = None
) -> DocumentedApp:
    """Return the routes and pure ASGI layers of one server; the application holds no state of its own.

    `admin` is the second listener, if there is one. `past` is the history that the dashboard begins with, which the
    caller keeps up to date. Errors: ConfigError.
    """
    settings = context.settings
    has_docs = not settings.disable_fastapi_docs
    app = DocumentedApp(
        title="tiercel",
        version=__version__,
        docs_url="/docs" if has_docs else None,
        redoc_url=None,
        openapi_url="/openapi.json" if has_docs else None,
        middleware=_layers(context, admin),
        exception_handlers={AdmissionError: on_admission_error, HTTPException: _http_errors(admin)},
        redirect_slashes=False,
    )
    pipeline, operations = GenerationPipeline(context), OperationsRoutes(context)
    generation = [
        *ChatRoutes(context, pipeline).routes(),
        *CompletionRoutes(context, pipeline).routes(),
        *ResponseRoutes(context, pipeline).routes(),
        *StoredChatRoutes(context).routes(),
        *ConversationRoutes(context).routes(),
    ]
    key, admin_key, metrics_key = Guard(context.tenants), AdminGuard(context.tenants), MetricsGuard(context.tenants)
    message_key, models_key = MessagesGuard(context.tenants), ModelsGuard(context.tenants)
    families: list[tuple[str, RouteGuard | None, list[ApiRoute]]] = [
        ("operations", None, operations.open_routes()),
        ("operations", metrics_key, operations.metrics_routes()),
        ("operations", key, operations.guarded_routes()),
        ("openai", key, generation),
        ("openai", models_key, ModelRoutes(context).routes()),
        ("anthropic", message_key, MessageRoutes(context, pipeline).routes()),
        ("anthropic", message_key, MessageBatchRoutes(context).routes()),
        ("embeddings", key, EmbeddingRoutes(context, pipeline).routes()),
        ("text", key, TokenizeRoutes(context).routes()),
        ("admin", admin_key, AdminRoutes(context).routes()),
    ]
    app.read_facts = lambda: _body_limits(context)
    others = [route for _, _, routes in families for route in routes]
    families.append(("files", key, [*FileRoutes(context).routes(), *BatchRoutes(context, others).routes()]))
    for tag, guard, routes in families:
        app.add(tag, routes, guard)
    app.router.routes += UiRoutes(context, past or ServerPast(context), admin).routes()
    paths = [route.path for _, _, routes in families for route in routes]
    check_root_path(settings.root_path, [*paths, "/ui/data", "/docs", "/openapi.json"])
    return app


def _body_limits(context: ServerContext) -> BodyLimits:
    """Return the limits of bodies that the document shows."""
    ready = context.client.status.ready
    limits = None if ready is None else ModelLimits.of(ready, context.settings)
    return BodyLimits(
        vocab_size=None if ready is None else ready.vocab_size,
        max_logprobs=context.settings.max_logprobs,
        hidden_size=context.pooling.hidden_size,
        longest=None if limits is None else limits.longest,
        batch_endpoints=tuple(BATCH_ENDPOINTS),
    )


def _http_errors(admin: AdminListener | None) -> Callable[[Request, Exception], Coroutine[None, None, Response]]:
    """Return the handler of refusals by the framework, whose own `Allow` header knows one of the routes of a path."""

    async def answer(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        app = cast(DocumentedApp, request.app)
        is_public = admin is not None and not admin.has(request.scope)
        routes = [path for path in app.paths if not (is_public and is_for_operator(path))]
        return http_error(request, error, routes, app.methods_of(request.scope) if error.status_code == 405 else ())

    return answer


def _layers(context: ServerContext, admin: AdminListener | None) -> list[Middleware]:
    """Return the layers, the outermost first."""
    settings = context.settings
    layers = [Middleware(RootPath, prefix=settings.root_path)] if settings.root_path else []
    layers += [
        Middleware(
            RequestAccounting,
            metrics=context.metrics,
            clock=context.clock,
            wall_s=context.wall_s,
            traces=context.traces,
            echo_id=settings.enable_request_id_headers,
            log_requests=settings.enable_log_requests,
        ),
        Middleware(ErrorBoundary),
    ]
    names = settings.allowed_hosts
    public = accepted_hosts(names, None if settings.uds is not None else settings.host)
    private = None if admin is None else accepted_hosts(names, admin_host(settings))
    if public is not None or private is not None:
        layers.append(Middleware(HostCheck, public=public, admin=private, listener=admin))
    if admin is not None:
        layers.append(Middleware(AdminElsewhere, listener=admin))
    if settings.allowed_origins:
        layers.append(
            Middleware(
                CORSMiddleware,
                allow_origins=settings.allowed_origins,
                allow_methods=settings.allowed_methods,
                allow_headers=settings.allowed_headers,
                allow_credentials=settings.allow_credentials,
            )
        )
    layers.append(
        Middleware(
            BodyLimit,
            limit_bytes=lambda: context.settings.max_body_bytes,
            upload_bytes=lambda: context.settings.max_file_bytes + FORM_BYTES,
        )
    )
    return layers
