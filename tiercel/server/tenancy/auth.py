"""Authentication: the tenant of a request, and the keys of protected routes."""

from typing import cast

from msgspec import Struct
from starlette.requests import Request
from starlette.types import Scope

from tiercel.server.tenancy.directory import TenantDirectory
from tiercel.server.tenancy.tenants import Tenant, TenantTable
from tiercel.settings.exposure import is_loopback
from tiercel.values.errors import AdmissionError

BATCH_TENANT = "batch_tenant"
"""The entry of the state of a scope that names the tenant of a request of a batch. No client can set it."""

_BY_PROXY = ("forwarded", "via", "x-real-ip")
"""Headers that a proxy adds, besides those that begin with `x-forwarded-`."""


class Guard:
    """Route dependency of the routes for tenants: finds the tenant by its key."""

    def __init__(self, tenants: TenantDirectory) -> None:
        self._tenants = tenants

    async def __call__(self, request: Request) -> None:
        """Find the tenant of the request and store it. Errors: AdmissionError (401)."""
        state = request.scope.setdefault("state", {})
        tenant = state.get(BATCH_TENANT) or self._tenants.table.find(request.headers.get("authorization"))
        if tenant is None:
            raise _wrong_key()
        state["tenant"] = tenant


class MessagesGuard:
    """Route dependency of /v1/messages: finds the tenant by the key in `x-api-key`, or else as `Guard` does."""

    def __init__(self, tenants: TenantDirectory) -> None:
        self._tenants = tenants

    async def __call__(self, request: Request) -> None:
        """Find the tenant of the request and store it. Errors: AdmissionError (401)."""
        state, key = request.scope.setdefault("state", {}), request.headers.get("x-api-key")
        authorization = request.headers.get("authorization") if key is None else f"Bearer {key}"
        tenant = state.get(BATCH_TENANT) or self._tenants.table.find(authorization)
        if tenant is None:
            raise _wrong_key()
        state["tenant"] = tenant


class ModelsGuard:
    """Route dependency of the list of models, which clients of both APIs read: the header tells which of them it is."""

    def __init__(self, tenants: TenantDirectory) -> None:
        self._messages = MessagesGuard(tenants)
        self._others = Guard(tenants)

    async def __call__(self, request: Request) -> None:
        """Find the tenant of the request and store it. Errors: AdmissionError (401)."""
        await (self._messages if "anthropic-version" in request.headers else self._others)(request)


class AdminGuard:
    """Route dependency of the routes for the operator."""

    def __init__(self, tenants: TenantDirectory) -> None:
        self._tenants = tenants

    async def __call__(self, request: Request) -> None:
        """Check the admin key. Errors: AdmissionError (401, or 403 if the server has no admin key)."""
        table = self._tenants.table
        if not table.admin_digests:
            raise AdmissionError(
                403,
                "This server has no admin key: set TIERCEL_ADMIN_KEY, or admin_key in the tenants file.",
                code="admin_disabled",
                kind="permission_error",
            )
        if not table.admits_admin(request.headers.get("authorization")):
            raise _wrong_key()


class MetricsGuard:
    """Route dependency of the metrics of all tenants: for direct requests from this machine, and for the operator.

    Without a tenants file every key is an operator's key.
    """

    def __init__(self, tenants: TenantDirectory) -> None:
        self._tenants = tenants

    async def __call__(self, request: Request) -> None:
        """Check the address or the key. Errors: AdmissionError (401)."""
        if not (is_local(request) or _is_operator(self._tenants.table, request.headers.get("authorization"))):
            raise _wrong_key()


class Viewer(Struct, frozen=True):
    """The rights of the key that requests the data of the page."""

    tenant: Tenant | None  # of the key; None for an admin key
    is_operator: bool


class PageGuard:
    """Route dependency of the page's data: every key sees its own tenant, the operator all tenants."""

    def __init__(self, tenants: TenantDirectory) -> None:
        self._tenants = tenants

    async def __call__(self, request: Request) -> None:
        """Find the viewer of the request and store it. Errors: AdmissionError (401)."""
        table, authorization = self._tenants.table, request.headers.get("authorization")
        viewer = Viewer(table.find(authorization), _is_operator(table, authorization))
        if viewer.tenant is None and not viewer.is_operator:
            raise _wrong_key()
        request.scope.setdefault("state", {})["viewer"] = viewer


def viewer_of(scope: Scope) -> Viewer:
    """Return the viewer that `PageGuard` found."""
    return cast(Viewer, scope["state"]["viewer"])


def tenant_of(scope: Scope) -> Tenant:
    """Return the tenant that `Guard` found."""
    return cast(Tenant, scope["state"]["tenant"])


def is_of_batch(scope: Scope) -> bool:
    """Return whether a request is a line of a batch, which the server has sent to itself."""
    return BATCH_TENANT in scope.get("state", {})


def is_local(request: Request) -> bool:
    """Return whether a request comes directly from this machine: over loopback or a Unix socket, without a proxy.

    A proxy on this machine that adds no header cannot be distinguished from a client on this machine.
    """
    if any(name in _BY_PROXY or name.startswith("x-forwarded-") for name in request.headers):
        return False
    if request.client is None or not request.client.host:
        return True
    return is_loopback(request.client.host)


def _is_operator(table: TenantTable, authorization: str | None) -> bool:
    """Return whether a key belongs to the operator. Without a tenants file every key does."""
    is_only_tenant = table.source == "settings" and table.find(authorization) is not None
    return is_only_tenant or table.admits_admin(authorization)


def _wrong_key() -> AdmissionError:
    return AdmissionError(401, "Incorrect API key provided.", code="invalid_api_key", kind="authentication_error")
