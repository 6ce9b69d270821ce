"""The ASGI application: routes and layers put together."""

from fastapi import Depends, FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware

from tiercel import __version__
from tiercel.errors import AdmissionError
from tiercel.server.api.admin import AdminRoutes
from tiercel.server.api.middleware import BodyLimit, Bookkeeping, Boundary
from tiercel.server.api.openai import OpenAIRoutes
from tiercel.server.api.ops import OpsRoutes
from tiercel.server.api.service import Service
from tiercel.server.api.tokenize import TextRoutes
from tiercel.server.http.failure import on_admission_error, on_http_error
from tiercel.server.tenancy.auth import AdminGuard, Guard
from tiercel.server.ui.routes import UiRoutes


def create_app(service: Service) -> FastAPI:
    """Routes and pure ASGI layers for one service; holds no state of its own."""
    settings = service.settings
    has_docs = not settings.disable_fastapi_docs
    app = FastAPI(
        title="tiercel",
        version=__version__,
        root_path=settings.root_path,
        docs_url="/docs" if has_docs else None,
        redoc_url=None,
        openapi_url="/openapi.json" if has_docs else None,
        middleware=_layers(service),
        exception_handlers={AdmissionError: on_admission_error, HTTPException: on_http_error},
        redirect_slashes=False,
    )
    guarded = [Depends(Guard(service.tenants))]
    ops = OpsRoutes(service)
    app.include_router(ops.open_router())
    app.include_router(ops.guarded_router(), dependencies=guarded)
    app.include_router(OpenAIRoutes(service).router(), dependencies=guarded)
    app.include_router(TextRoutes(service).router(), dependencies=guarded)
    app.include_router(UiRoutes(service).router())
    app.include_router(AdminRoutes(service).router(), dependencies=[Depends(AdminGuard(service.tenants))])
    return app


def _layers(service: Service) -> list[Middleware]:
    """Outermost first."""
    settings = service.settings
    layers = [
        Middleware(
            Bookkeeping,
            metrics=service.metrics,
            clock=service.clock,
            wall_s=service.wall_s,
            traces=service.traces,
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
    layers.append(Middleware(BodyLimit, limit_bytes=lambda: service.settings.max_body_bytes))
    return layers
