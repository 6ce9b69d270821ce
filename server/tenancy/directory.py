"""The tenants in force: replaced as a whole by the file or by an admin, or left as they are."""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol, TypeVar

import structlog

from tiercel.errors import ConfigError
from tiercel.server.tenancy.document import DocumentError, read_json, read_yaml
from tiercel.server.tenancy.tenant_file import TenantConfig, load_tenant_file, read_tenants
from tiercel.server.tenancy.tenants import Source, Tenant, TenantTable, default_table, digest_of, make_table
from tiercel.settings import ServerSettings

BODY_NAME = "request body"
"""What errors call a document that came in a request."""

T = TypeVar("T")


class InThread(Protocol):
    """Runs work off the event loop."""

    async def __call__(self, work: Callable[[], T]) -> T: ...


class ReloadCounter(Protocol):
    """Who counts what was wrong."""

    def on_tenants_refused(self) -> None: ...


Listener = Callable[[TenantTable], None]
"""Whoever must know of a new table. Must not fail: the table is in force."""


async def in_thread(work: Callable[[], T]) -> T:
    """A thread apart from those that tokenise, so that overload does not keep an operator waiting."""
    return await asyncio.to_thread(work)


class TenantDirectory:
    """Holds the table in force. One change at a time; a wrong one changes nothing."""

    def __init__(self, table: TenantTable, path: Path | None, admin_key: str | None, counter: ReloadCounter) -> None:
        self._table = table
        self._path = path
        self._settings_admin = () if admin_key is None else (digest_of(admin_key),)
        self._counter = counter
        self._listeners: list[Listener] = []
        self._turn = asyncio.Lock()
        self._log = structlog.stdlib.get_logger("server.tenants")

    @property
    def table(self) -> TenantTable:
        """The tenants in force."""
        return self._table

    @property
    def has_file(self) -> bool:
        """Whether a reload can bring anything."""
        return self._path is not None

    def add_listener(self, listener: Listener) -> None:
        """Tell `listener` of the table now and at every change."""
        self._listeners.append(listener)
        listener(self._table)

    async def reload(self, run: InThread = in_thread) -> bool:
        """Read the file again. A wrong one is logged and counted, and the old table stays; then False."""
        try:
            await self.read_again(run)
        except ConfigError:
            return False
        return True

    async def read_again(self, run: InThread = in_thread) -> TenantTable:
        """As `reload`, for who wants to know why not. Errors: ConfigError; then the old table stays."""
        path = self._path
        if path is None:
            self._log.warning("tenants_reload_refused", reason="there is no --tenants-config")
            raise ConfigError("tenants.no_file", "there is no --tenants-config")
        async with self._turn:
            try:
                config = await run(lambda: load_tenant_file(path, others=self._settings_admin))
            except ConfigError as exc:
                self._refuse(exc, "file")
                raise
            return self._set(config, "file", config.admin_digests)

    async def put(self, text: bytes, *, is_json: bool, run: InThread = in_thread) -> TenantTable:
        """Take the tenants of a document. Where it names no secret or admin key, those in force stay.

        Errors: ConfigError; then the old table stays.
        """
        async with self._turn:
            before = self._table
            try:
                config = await run(lambda: self._read(text, before, is_json=is_json))
            except ConfigError as exc:
                self._refuse(exc, "request")
                raise
            return self._set(config, "request", config.admin_digests or before.admin_digests)

    def _read(self, text: bytes, before: TenantTable, *, is_json: bool) -> TenantConfig:
        try:
            value = read_json(text) if is_json else read_yaml(text)
        except DocumentError as exc:
            raise ConfigError("tenants.body", f"{BODY_NAME}: {exc}") from exc
        return read_tenants(value, BODY_NAME, secret=before.secret, others=before.admin_digests)

    def _set(self, config: TenantConfig, source: Source, admin_digests: Sequence[bytes]) -> TenantTable:
        table = _table(config, self._table.version + 1, source, (*admin_digests, *self._settings_admin))
        self._table = table
        for listener in self._listeners:
            listener(table)
        self._log.info("tenants_changed", version=table.version, source=source, tenants=len(table.tenants))
        return table

    def _refuse(self, error: ConfigError, source: Source) -> None:
        self._counter.on_tenants_refused()
        self._log.error("tenants_refused", version=self._table.version, source=source, reason=error.message)


def open_directory(settings: ServerSettings, counter: ReloadCounter) -> TenantDirectory:
    """The tenants as a server starts with them. Errors: ConfigError."""
    if settings.tenants_config is None:
        return TenantDirectory(default_table(settings.api_keys, settings.admin_key), None, settings.admin_key, counter)
    path = Path(settings.tenants_config)
    admin = () if settings.admin_key is None else (digest_of(settings.admin_key),)
    config = load_tenant_file(path, others=admin)
    table = _table(config, 1, "file", (*config.admin_digests, *admin))
    return TenantDirectory(table, path, settings.admin_key, counter)


def _table(config: TenantConfig, version: int, source: Source, admin_digests: Sequence[bytes]) -> TenantTable:
    tenants: Sequence[Tenant] = config.tenants
    unique = tuple(dict.fromkeys(admin_digests))
    return make_table(tenants, version=version, source=source, admin_digests=unique, secret=config.secret)
