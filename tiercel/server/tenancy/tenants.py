"""The tenants in the HTTP process: immutable tables with keys and limits."""

import hashlib
import hmac
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from tiercel.values.ids import TenantId
from tiercel.values.tenant import DEFAULT_TENANT as DEFAULT_NAME
from tiercel.values.tenant import Tenants, TenantShare

Source = Literal["settings", "file", "request"]


def digest_of(key: str) -> bytes:
    """Return the SHA-256 of a key; the key itself is not kept."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of a tenant. None = no limit."""

    requests_per_minute: int | None = None  # HTTP requests
    tokens_per_minute: int | None = None  # prompts and outputs
    max_concurrency: int | None = None  # sequences, waiting and running
    queue_share: float | None = None  # share of the places in the queue
    queue_timeout_s: float | None = None  # until the first slice of a request; in place of the server's limit


@dataclass(frozen=True, slots=True)
class BestEffort:
    """The permitted reductions of service under overload; at least one is set."""

    max_tokens: int | None = None  # outputs of a sequence, from the level SHORTENED on
    band: int | None = None  # from the level DEFERRED on


@dataclass(frozen=True, slots=True)
class Tenant:
    """One tenant. `scope` is the secret under which its cached blocks are keyed."""

    share: TenantShare
    scope: bytes = b""
    digests: tuple[bytes, ...] = ()
    limits: Limits = Limits()
    best_effort: BestEffort | None = None

    @property
    def name(self) -> TenantId:
        """The name that the operator gave."""
        return self.share.name


DEFAULT_TENANT = Tenant(TenantShare(name=DEFAULT_NAME))
"""The tenant of every request if no tenants are configured."""


@dataclass(frozen=True, slots=True)
class TenantTable:
    """All tenants of one version. It is replaced as a whole."""

    version: int
    source: Source
    tenants: tuple[Tenant, ...]
    by_name: Mapping[TenantId, Tenant]
    by_digest: Mapping[bytes, Tenant]
    admin_digests: tuple[bytes, ...]
    secret: bytes
    is_open: bool = False  # requests need no key

    @property
    def tightest_ttft_s(self) -> float | None:
        """The tightest TTFT goal of an interactive tenant."""
        slos = [tenant.share.slo for tenant in self.tenants]
        return min((slo.ttft_s for slo in slos if slo.kind == "interactive" and slo.ttft_s is not None), default=None)

    @property
    def message(self) -> Tenants:
        """The message to the engine with the shares of the tenants."""
        return Tenants(self.version, tuple(tenant.share for tenant in self.tenants))

    def find(self, authorization: str | None) -> Tenant | None:
        """Return the tenant whose key an Authorization header carries.

        The time of a look-up by SHA-256 reveals nothing about keys, because the digest of a guess cannot be chosen.
        """
        if self.is_open:
            return self.tenants[0]
        return self.by_digest.get(_bearer_digest(authorization))

    def admits_admin(self, authorization: str | None) -> bool:
        """Return whether an Authorization header carries an admin key. The comparison takes constant time."""
        digest = _bearer_digest(authorization)
        matches = [hmac.compare_digest(digest, known) for known in self.admin_digests]
        return any(matches)


def make_table(
    tenants: Sequence[Tenant],
    *,
    version: int,
    source: Source,
    admin_digests: Sequence[bytes] = (),
    secret: bytes = b"",
    is_open: bool = False,
) -> TenantTable:
    """Make a table. Names and keys must be unique; `tenant_file` checks that."""
    return TenantTable(
        version=version,
        source=source,
        tenants=tuple(tenants),
        by_name={tenant.name: tenant for tenant in tenants},
        by_digest={digest: tenant for tenant in tenants for digest in tenant.digests},
        admin_digests=tuple(admin_digests),
        secret=secret,
        is_open=is_open,
    )


def default_table(api_keys: Sequence[str], admin_key: str | None) -> TenantTable:
    """Return the table of one tenant without limits, for a server without a tenants file."""
    tenant = Tenant(DEFAULT_TENANT.share, digests=tuple(digest_of(key) for key in api_keys))
    admin = () if admin_key is None else (digest_of(admin_key),)
    return make_table([tenant], version=1, source="settings", admin_digests=admin, is_open=not api_keys)


def scope_of(name: str, group: str | None, secret: bytes) -> bytes:
    """Return the scope of a tenant or of its cache group; it is the same after a restart."""
    owner = f"group/{group}" if group is not None else f"tenant/{name}"
    return hmac.new(secret, owner.encode(), hashlib.sha256).digest()


def narrowed(scope: bytes, cache_salt: str | None) -> bytes:
    """Return a scope that only requests with the same salt share."""
    if cache_salt is None:
        return scope
    return hmac.new(scope, cache_salt.encode(), hashlib.sha256).digest()


def _bearer_digest(authorization: str | None) -> bytes:
    """Return the digest of a bearer token; empty if there is none, which matches no key."""
    scheme, _, key = (authorization or "").partition(" ")
    key = key.strip()
    return digest_of(key) if key and scheme.lower() == "bearer" else b""
