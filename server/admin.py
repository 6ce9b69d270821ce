"""Routes of the operator: the tenants in force, and others in their place."""

import asyncio

from fastapi import APIRouter
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from server.service import Service
from server.tenants import Tenant, TenantTable
from server.watch import ClientGoneError
from tiercel.errors import AdmissionError, ConfigError

_READ_S = 30.0
_JSON = "application/json"
_YAML = ("application/yaml", "application/x-yaml", "text/yaml", "text/x-yaml", "text/plain")
_SHOWN_BYTES = 4  # of a digest: eight hexadecimal digits


class AdminRoutes:
    """Handlers of /admin. Keys go in and never come out."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def router(self) -> APIRouter:
        """The routes, without their guard."""
        router = APIRouter(prefix="/admin", tags=["admin"])
        router.add_api_route("/tenants", self.show, methods=["GET"], response_model=None)
        router.add_api_route("/tenants", self.put, methods=["PUT"], response_model=None)
        return router

    async def show(self) -> Response:
        """The tenants in force and their version."""
        return JSONResponse(_shown(self._service.tenants.table))

    async def put(self, request: Request) -> Response:
        """Other tenants from now on: all of them, or none and 400. They last until a reload or a restart."""
        media_type = request.headers.get("content-type", "").split(";")[0].strip().lower()
        if media_type != _JSON and media_type not in _YAML:
            raise AdmissionError(
                400, "Unsupported Media Type: write 'application/yaml' or 'application/json'", code="invalid_tenants"
            )
        text = await _body(request)
        try:
            table = await self._service.tenants.put(text, is_json=media_type == _JSON)
        except ConfigError as exc:
            raise AdmissionError(400, exc.message, code="invalid_tenants", param="tenants") from exc
        return JSONResponse(_shown(table))


async def _body(request: Request) -> bytes:
    try:
        async with asyncio.timeout(_READ_S):
            return await request.body()
    except TimeoutError as exc:
        raise AdmissionError(408, "The request body did not arrive in time.", code="request_timeout") from exc
    except ClientDisconnect as exc:
        raise ClientGoneError from exc


def _shown(table: TenantTable) -> dict[str, object]:
    return {
        "version": table.version,
        "source": table.source,
        "tenants": [_shown_tenant(tenant) for tenant in table.tenants],
    }


def _shown_tenant(tenant: Tenant) -> dict[str, object]:
    share, limits, best_effort = tenant.share, tenant.limits, tenant.best_effort
    shown: dict[str, object] = {
        "name": share.name,
        "keys_sha256": [f"{digest[:_SHOWN_BYTES].hex()}…" for digest in tenant.digests],
        "weight": share.weight,
        "band": share.band,
        "group": share.group,
        "requests_per_minute": limits.requests_per_minute,
        "tokens_per_minute": limits.tokens_per_minute,
        "max_concurrency": limits.max_concurrency,
        "queue_share": limits.queue_share,
        "kv_quota_bytes": {"hbm": share.kv_quota.hbm, "ddr": share.kv_quota.ddr, "ssd": share.kv_quota.ssd},
        "slo": {"class": share.slo.kind, "ttft_s": share.slo.ttft_s, "tbt_s": share.slo.tbt_s},
        "best_effort": None,
    }
    if best_effort is not None:
        shown["best_effort"] = {"max_tokens": best_effort.max_tokens, "band": best_effort.band}
    return shown
