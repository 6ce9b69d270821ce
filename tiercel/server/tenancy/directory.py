"""The tenants in force. A reload or a request replaces all of them; a wrong document changes nothing."""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol, TypeVar

import structlog

from tiercel.server.tenancy.operator_document import DocumentError, read_json, read_yaml
from tiercel.server.tenancy.tenant_file import TenantConfig, load_tenant_file, read_tenants
from tiercel.server.tenancy.tenants import Source, Tenant, TenantTable, default_table, digest_of, make_table
from tiercel.settings.settings import ServerSettings
from tiercel.values.errors import ConfigError

BODY_NAME = "request body"
"""The name of a document that came in a request, for error messages."""

T = TypeVar("T")


class InThread(Protocol):
    """Runs work outside the event loop."""

    async def __call__(self, work: Callable[[], T]) -> T: ...


class ReloadCounter(Protocol):
    """The counter of refused documents; see `metrics`."""

    def on_tenants_refused(self) -> None: ...


Listener = Callable[[TenantTable], None]
"""Called with every new table. It must not raise: the table is already in force."""


async def in_thread(work: Callable[[], T]) -> T:
    """Run work in a thread of its own pool: the tokenising threads may be busy on an overloaded server."""
    return await asyncio.to_thread(work)


class TenantDirectory:
    """Holds the table in force. Changes are applied one at a time."""

    def __init__(self, table: TenantTable, path: Path | None, admin_key: str | None, counter: ReloadCounter) -> None:
        self._table = table
        self._path = path
        self._settings_admin = () if admin_key is None else (digest_of(admin_key),)
        self._counter = counter
        self._listeners: list[Listener] = []
        self._lock = asyncio.Lock()
        self._log = structlog.stdlib.get_logger("server.tenants")

    @property
    def table(self) -> TenantTable:
        """The tenants in force."""
        return self._table

    @property
    def has_file(self) -> bool:
        """Whether there is a tenants file."""
        return self._path is not None

    def add_listener(self, listener: Listener) -> None:
        """Call `listener` with the current table, and with every new table."""
        self._listeners.append(listener)
        listener(self._table)

    async def reload(self, run: InThread = in_thread) -> bool:
        """Read the file again. If it is wrong, log and count that, keep the old table and return False."""
        try:
            await self.read_again(run)
        except ConfigError:
            return False
        return True

    async def read_again(self, run: InThread = in_thread) -> TenantTable:
        """Read the file again and return the new table. Errors: ConfigError; the old table stays in force."""
        path = self._path
        if path is None:
            self._log.warning("tenants_reload_refused", reason="the server was started without --tenants-config")
            raise ConfigError("tenants.no_file", "the server was started without --tenants-config")
        async with self._lock:
            try:
                config = await run(lambda: load_tenant_file(path, others=self._settings_admin))
            except ConfigError as exc:
                self._refuse(exc, "file")
                raise
            return self._set(config, "file", config.admin_digests)

    async def put(self, text: bytes, *, is_json: bool, run: InThread = in_thread) -> TenantTable:
        """Replace the tenants by those of a document. If it has no secret or no admin key, those in force are kept.

        Errors: ConfigError; the old table stays in force.
        """
        async with self._lock:
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

    def refuse_file(self, error: ConfigError) -> None:
        """Log and count a tenants file that a reload could not use. The table stays in force."""
        self._refuse(error, "file")

    def _refuse(self, error: ConfigError, source: Source) -> None:
        self._counter.on_tenants_refused()
        self._log.error("tenants_refused", version=self._table.version, source=source, reason=error.message)


def open_directory(settings: ServerSettings, counter: ReloadCounter) -> TenantDirectory:
    """Return the directory with the tenants that the settings name. Errors: ConfigError."""
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
