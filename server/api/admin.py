"""Routes of the operator: the tenants and the settings in force, and others in their place."""

import asyncio
import datetime
from typing import cast

from fastapi import APIRouter
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from tiercel.errors import AdmissionError, ConfigError
from tiercel.server.api.context import ServerContext
from tiercel.server.control.configuration import RESTART, STALE, SettingsVersion
from tiercel.server.http.watch import ClientGoneError
from tiercel.server.tenancy.directory import BODY_NAME
from tiercel.server.tenancy.document import DocumentError, read_json
from tiercel.server.tenancy.tenants import Tenant, TenantTable
from tiercel.shown import shown_settings

_READ_S = 30.0
_JSON = "application/json"
_YAML = ("application/yaml", "application/x-yaml", "text/yaml", "text/x-yaml", "text/plain")
_SHOWN_BYTES = 4  # of a digest: eight hexadecimal digits


class AdminRoutes:
    """Handlers of /admin. Keys go in and never come out."""

    def __init__(self, context: ServerContext) -> None:
        self._context = context

    def router(self) -> APIRouter:
        """The routes, without their guard."""
        router = APIRouter(prefix="/admin", tags=["admin"])
        router.add_api_route("/tenants", self.show, methods=["GET"], response_model=None)
        router.add_api_route("/tenants", self.put, methods=["PUT"], response_model=None)
        router.add_api_route("/config", self.show_config, methods=["GET"], response_model=None)
        router.add_api_route("/config", self.patch_config, methods=["PATCH"], response_model=None)
        router.add_api_route("/reload", self.reload, methods=["POST"], response_model=None)
        return router

    async def show(self) -> Response:
        """The tenants in force and their version."""
        return JSONResponse(_shown(self._context.tenants.table))

    async def put(self, request: Request) -> Response:
        """Other tenants from now on: all of them, or none and 400. They last until a reload or a restart."""
        media_type = _media_type(request)
        if media_type != _JSON and media_type not in _YAML:
            raise AdmissionError(
                400, "Unsupported Media Type: write 'application/yaml' or 'application/json'", code="invalid_tenants"
            )
        text = await _body(request)
        try:
            table = await self._context.tenants.put(text, is_json=media_type == _JSON)
        except ConfigError as exc:
            raise AdmissionError(400, exc.message, code="invalid_tenants", param="tenants") from exc
        return JSONResponse(_shown(table))

    async def show_config(self) -> Response:
        """The settings in force, their version, and where each comes from. Secrets are masked."""
        return _config_response(self._context.configuration.current)

    async def patch_config(self, request: Request) -> Response:
        """Other values from the next step on: all that were sent, or none and 400 or 409.

        They last until a reload or a restart; null drops an earlier one. With `If-Match` only over that version.
        """
        if _media_type(request) != _JSON:
            raise AdmissionError(400, "Unsupported Media Type: write 'application/json'", code="invalid_config")
        values = _object(await _body(request))
        over = request.headers.get("if-match")
        if over is not None and not over.strip('"').isdecimal():
            raise AdmissionError(400, 'If-Match: expected a version such as "3"', code="invalid_config")
        version = None if over is None else int(over.strip('"')[:18])
        try:
            return _config_response(await self._context.configuration.change(values, over=version))
        except ConfigError as exc:
            raise _refusal(exc) from exc

    async def reload(self) -> Response:
        """What SIGHUP does: read the settings file and the tenants file again, and take both or none."""
        try:
            new = await self._context.configuration.reload(self._context.tenants)
        except ConfigError as exc:
            raise _refusal(exc) from exc
        versions = {"config_version": new.version, "tenants_version": self._context.tenants.table.version}
        return JSONResponse(versions)


def _config_response(current: SettingsVersion) -> Response:
    changed_at = datetime.datetime.fromtimestamp(current.at_s, datetime.UTC).isoformat(timespec="milliseconds")
    body: dict[str, object] = {"version": current.version, "source": current.occasion, "changed_at": changed_at}
    shown = {} if current.origin is None else shown_settings(current.origin)
    body["settings"] = {
        key: {"value": one.value, "source": one.source, "name": one.name, "is_live": one.is_live}
        for key, one in shown.items()
    }
    return JSONResponse(body, headers={"etag": f'"{current.version}"'})


def _refusal(error: ConfigError) -> AdmissionError:
    if error.code == RESTART:
        return AdmissionError(409, error.message, code="restart_required")
    if error.code == STALE:
        return AdmissionError(412, error.message, code="version_mismatch")
    return AdmissionError(400, error.message, code="invalid_config")


def _object(text: bytes) -> dict[str, object]:
    try:
        value = read_json(text)
    except DocumentError as exc:
        raise AdmissionError(400, f"{BODY_NAME}: {exc}", code="invalid_config") from exc
    if not isinstance(value, dict) or not value:
        message = f'{BODY_NAME}: expected an object of settings such as {{"max-num-queued-reqs": 512}}'
        raise AdmissionError(400, message, code="invalid_config")
    return cast(dict[str, object], value)


def _media_type(request: Request) -> str:
    return request.headers.get("content-type", "").split(";")[0].strip().lower()


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
