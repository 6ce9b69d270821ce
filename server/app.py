"""The ASGI application: routes and layers put together."""

from fastapi import Depends, FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware

from tiercel import __version__
from tiercel.errors import AdmissionError
from tiercel.server.api.admin import AdminRoutes
from tiercel.server.api.context import ServerContext
from tiercel.server.api.middleware import BodyLimit, Bookkeeping, Boundary
from tiercel.server.api.openai import OpenAIRoutes
from tiercel.server.api.ops import OpsRoutes
from tiercel.server.api.tokenize import TextRoutes
from tiercel.server.http.failure import on_admission_error, on_http_error
from tiercel.server.tenancy.auth import AdminGuard, Guard
from tiercel.server.ui.routes import UiRoutes


def create_app(context: ServerContext) -> FastAPI:
    """Routes and pure ASGI layers for one service; holds no state of its own."""
    settings = context.settings
    has_docs = not settings.disable_fastapi_docs
    app = FastAPI(
        title="tiercel",
        version=__version__,
        root_path=settings.root_path,
        docs_url="/docs" if has_docs else None,
        redoc_url=None,
        openapi_url="/openapi.json" if has_docs else None,
        middleware=_layers(context),
        exception_handlers={AdmissionError: on_admission_error, HTTPException: on_http_error},
        redirect_slashes=False,
    )
    guarded = [Depends(Guard(context.tenants))]
    ops = OpsRoutes(context)
    app.include_router(ops.open_router())
    app.include_router(ops.guarded_router(), dependencies=guarded)
    app.include_router(OpenAIRoutes(context).router(), dependencies=guarded)
    app.include_router(TextRoutes(context).router(), dependencies=guarded)
    app.include_router(UiRoutes(context).router())
    app.include_router(AdminRoutes(context).router(), dependencies=[Depends(AdminGuard(context.tenants))])
    return app


def _layers(context: ServerContext) -> list[Middleware]:
    """Outermost first."""
    settings = context.settings
    layers = [
        Middleware(
            Bookkeeping,
            metrics=context.metrics,
            clock=context.clock,
            wall_s=context.wall_s,
            traces=context.traces,
            echo_id=settings.enable_request_id_headers,
            log_requests=settings.enable_log_requests,
        ),
        Middleware(Boundary),
    ]
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
    layers.append(Middleware(BodyLimit, limit_bytes=lambda: context.settings.max_body_bytes))
    return layers
