"""Routes of the operator: show and change the tenants and the settings in force."""

import datetime
from typing import cast

from starlette.requests import Request
from starlette.responses import Response

from tiercel.server.api.context import ServerContext
from tiercel.server.api.contract import BODY_REFUSALS, JSON, KEY_REFUSALS, ApiRoute, Contract
from tiercel.server.api.replies.admin import (
    BestEffortReply,
    ConfigReply,
    QuotaReply,
    ReloadReply,
    SettingReply,
    SloReply,
    TenantReply,
    TenantsReply,
)
from tiercel.server.control.configuration import RESTART, STALE, SettingsVersion
from tiercel.server.http.answer import json_answer
from tiercel.server.http.body import read_body
from tiercel.server.tenancy.directory import BODY_NAME
from tiercel.server.tenancy.operator_document import DocumentError, read_json
from tiercel.server.tenancy.tenants import Tenant, TenantTable
from tiercel.settings.report import report_settings
from tiercel.values.errors import AdmissionError, ConfigError

_YAML = ("application/yaml", "application/x-yaml", "text/yaml", "text/x-yaml", "text/plain")
_SHOWN_BYTES = 4  # of a digest: eight hexadecimal digits


class AdminRoutes:
    """The handlers of /admin. No answer contains a key."""

    def __init__(self, context: ServerContext) -> None:
        self._context = context

    def routes(self) -> list[ApiRoute]:
        """Return the routes; all of them need the admin key."""
        refusals = (*KEY_REFUSALS, 403)
        changing = (*BODY_REFUSALS, *refusals)
        document = dict[str, object]
        tenants, config = {200: TenantsReply}, {200: ConfigReply}
        put = Contract(bodies=(document,), body_types=(JSON, *_YAML), answers=tenants, refusals=changing)
        patch = Contract(bodies=(document,), answers=config, refusals=(*changing, 409, 412))
        reload = Contract(answers={200: ReloadReply}, refusals=(400, *refusals, 409))
        return [
            ApiRoute("GET", "/admin/tenants", self.show, Contract(answers=tenants, refusals=refusals)),
            ApiRoute("PUT", "/admin/tenants", self.put, put),
            ApiRoute("GET", "/admin/config", self.show_config, Contract(answers=config, refusals=refusals)),
            ApiRoute("PATCH", "/admin/config", self.patch_config, patch),
            ApiRoute("POST", "/admin/reload", self.reload, reload),
        ]

    async def show(self, _: Request) -> Response:
        """Return the tenants in force and their version."""
        return json_answer(_tenants_reply(self._context.tenants.table))

    async def put(self, request: Request) -> Response:
        """Replace all tenants, or none if one is wrong (400). The change lasts until a reload or a restart."""
        media_type = _media_type(request)
        if media_type != JSON and media_type not in _YAML:
            raise AdmissionError(
                400, "Unsupported Media Type: write 'application/yaml' or 'application/json'", code="invalid_tenants"
            )
        text = await self._body(request)
        try:
            table = await self._context.tenants.put(text, is_json=media_type == JSON)
        except ConfigError as exc:
            raise AdmissionError(400, exc.message, code="invalid_tenants", param="tenants") from exc
        return json_answer(_tenants_reply(table))

    async def show_config(self, _: Request) -> Response:
        """Return the settings in force, their version, and the source of each. Secrets are masked."""
        return _config_response(self._context.configuration.current)

    async def patch_config(self, request: Request) -> Response:
        """Change settings from the next step on: all that were sent, or none if one is refused (400 or 409).

        The change lasts until a reload or a restart; null takes an earlier change back. With `If-Match` the change is
        made to that version only (else 412).
        """
        if _media_type(request) != JSON:
            raise AdmissionError(400, "Unsupported Media Type: write 'application/json'", code="invalid_config")
        values = _object(await self._body(request))
        match = request.headers.get("if-match")
        if match is not None and not match.strip('"').isdecimal():
            raise AdmissionError(400, 'If-Match: expected a version such as "3"', code="invalid_config")
        version = None if match is None else int(match.strip('"')[:18])
        try:
            return _config_response(await self._context.configuration.change(values, expected_version=version))
        except ConfigError as exc:
            raise _refusal(exc) from exc

    async def _body(self, request: Request) -> bytes:
        with self._context.hold_body(request) as holding:
            return bytes(await read_body(request, holding, self._context.settings.timeout_body_s))

    async def reload(self, _: Request) -> Response:
        """Do what SIGHUP does: read the settings file and the tenants file again, and apply both or none."""
        try:
            new = await self._context.configuration.reload(self._context.tenants)
        except ConfigError as exc:
            raise _refusal(exc) from exc
        return json_answer(ReloadReply(new.version, self._context.tenants.table.version))


def _config_response(current: SettingsVersion) -> Response:
    changed_at = datetime.datetime.fromtimestamp(current.at_s, datetime.UTC).isoformat(timespec="milliseconds")
    shown = {} if current.origin is None else report_settings(current.origin)
    settings = {key: SettingReply(one.value, one.source, one.name, one.is_live) for key, one in shown.items()}
    reply = ConfigReply(current.version, current.occasion, changed_at, settings)
    return json_answer(reply, headers={"etag": f'"{current.version}"'})


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


def _tenants_reply(table: TenantTable) -> TenantsReply:
    return TenantsReply(table.version, table.source, [_tenant_reply(tenant) for tenant in table.tenants])


def _tenant_reply(tenant: Tenant) -> TenantReply:
    share, limits, best_effort = tenant.share, tenant.limits, tenant.best_effort
    quota, slo = share.kv_quota, share.slo
    return TenantReply(
        name=share.name,
        keys_sha256=[f"{digest[:_SHOWN_BYTES].hex()}…" for digest in tenant.digests],
        weight=share.weight,
        band=share.band,
        group=share.group,
        requests_per_minute=limits.requests_per_minute,
        tokens_per_minute=limits.tokens_per_minute,
        max_concurrency=limits.max_concurrency,
        queue_share=limits.queue_share,
        queue_timeout_s=limits.queue_timeout_s,
        kv_quota_bytes=QuotaReply(quota.hbm, quota.ddr, quota.ssd),
        slo=SloReply(slo.kind, slo.ttft_s, slo.tbt_s),
        best_effort=None if best_effort is None else BestEffortReply(best_effort.max_tokens, best_effort.band),
    )
