"""The settings in force. Live settings change while the server runs; if one change is wrong, none is made."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import structlog

from tiercel.server.tenancy.directory import InThread, TenantDirectory, in_thread
from tiercel.settings.config import Resolved, values_of
from tiercel.settings.consistency import TENANTS_FILE
from tiercel.settings.live import changed_settings, why_restart
from tiercel.settings.report import masked_value
from tiercel.settings.settings import ServerSettings, Settings
from tiercel.settings.sourced_value import BODY_NAME
from tiercel.values.errors import ConfigError

Occasion = Literal["start", "reload", "request"]

RESTART = "config.restart"
"""The error code of a change that needs a restart."""
STALE = "config.stale"
"""The error code of a change that expects another version."""


@dataclass(frozen=True, slots=True)
class SettingsVersion:
    """One version of all settings, with their sources."""

    version: int
    occasion: Occasion
    at_s: float  # since 1970
    settings: Settings
    origin: Resolved | None  # the source of each value; None: the settings were made by a program
    changes: Mapping[str, object]  # by name: the changes made by requests; the next reload removes them


class RefusalCounter(Protocol):
    """The counter of refused changes; see `metrics`."""

    def on_config_refused(self) -> None: ...


Listener = Callable[[SettingsVersion], None]
"""Called with every new version. It must not raise: the version is already in force."""


class Configuration:
    """Holds the settings in force. Changes are applied one at a time; a wrong change changes nothing."""

    def __init__(
        self, settings: Settings, origin: Resolved | None, counter: RefusalCounter, wall_s: Callable[[], float]
    ) -> None:
        self._current = SettingsVersion(1, "start", wall_s(), settings, origin, {})
        self._started = origin
        self._counter = counter
        self._wall_s = wall_s
        self._listeners: list[Listener] = []
        self._lock = asyncio.Lock()
        self._log = structlog.stdlib.get_logger("server.config")

    @property
    def current(self) -> SettingsVersion:
        """The settings in force, with their version."""
        return self._current

    @property
    def server(self) -> ServerSettings:
        """The settings of the HTTP process that are in force."""
        return self._current.settings.server

    def add_listener(self, listener: Listener) -> None:
        """Call `listener` with the current version, and with every new version."""
        self._listeners.append(listener)
        listener(self._current)

    async def reload(self, tenants: TenantDirectory, run: InThread = in_thread) -> SettingsVersion:
        """Read the settings file and the tenants file again and apply both. Changes made by requests are removed.

        Errors: ConfigError if a file is wrong or a change needs a restart; nothing changes.
        """
        async with self._lock:
            try:
                found = await self._merge(Resolved.read_again, {}, run)
            except ConfigError as exc:
                if exc.code == TENANTS_FILE:
                    tenants.refuse_file(exc)
                else:
                    self._refuse(exc, "reload")
                raise
            if tenants.has_file:
                await tenants.read_again(run)
            return self._set(found, {}, "reload")

    async def change(
        self, values: Mapping[str, object], *, expected_version: int | None = None, run: InThread = in_thread
    ) -> SettingsVersion:
        """Apply values by their keys in tiercel.toml until the next reload or restart; None removes an earlier change.

        The settings file is not read again. With `expected_version`, the change needs that version to be in force.
        Errors: ConfigError naming the key, the value and the allowed values; nothing changes.
        """
        async with self._lock:
            if expected_version not in (None, self._current.version):
                raise ConfigError(
                    STALE, f"version {self._current.version} is in force, not {expected_version}"
                )  # not counted as refused, because the values may be right
            changes = dict(self._current.changes)
            try:
                requested = values_of(values, "request", BODY_NAME)
            except ConfigError as exc:
                raise self._refuse(exc, "request") from None
            for name, word in requested.items():
                changes.pop(name, None)
                if word.value is not None:
                    changes[name] = word.value
            by_key = {name.replace("_", "-"): value for name, value in changes.items()}
            try:
                found = await self._merge(lambda origin: origin.with_changes(by_key), changes, run)
            except ConfigError as exc:
                raise self._refuse(exc, "request") from None
            return self._set(found, changes, "request")

    async def _merge(
        self, merge: Callable[[Resolved], Resolved], changes: Mapping[str, object], run: InThread
    ) -> Resolved | None:
        """Return the settings after a change, which `merge` computes. Errors: ConfigError."""
        started, before = self._started, self._current.origin
        if started is None or before is None:
            if not changes:
                return None
            error = ConfigError(
                "config.origin", "the settings of this server were made by a program and cannot be changed"
            )
            raise error
        found = await run(lambda: merge(before))
        _check_live(started, before, found)
        return found

    def _set(self, found: Resolved | None, changes: Mapping[str, object], occasion: Occasion) -> SettingsVersion:
        before = self._current
        changed: tuple[str, ...] = ()
        if found is not None and before.origin is not None:
            changed = changed_settings(before.origin.values, found.values)
        if found is None or not changed:
            self._current = replace(before, origin=found, changes=changes)
            self._log.info("config_unchanged", version=before.version, source=occasion)
            return self._current
        new = SettingsVersion(before.version + 1, occasion, self._wall_s(), found.settings, found, changes)
        shown = {name: masked_value(name, found.values[name]) for name in changed}
        self._log.info("config_changed", version=new.version, source=occasion, changed=shown)
        self._current = new
        for listener in self._listeners:
            listener(new)
        return new

    def _refuse(self, error: ConfigError, occasion: Occasion) -> ConfigError:
        self._counter.on_config_refused()
        self._log.error("config_refused", version=self._current.version, source=occasion, reason=error.message)
        return error


def _check_live(started: Resolved, before: Resolved, found: Resolved) -> None:
    """Check that all changed settings are live. Errors: ConfigError naming each that is not, with the reason."""
    refused: list[str] = []
    for name in changed_settings(before.values, found.values):
        reason = why_restart(name, started.values, found.values)
        if reason is not None:
            value = masked_value(name, found.values[name])
            word = found.given.get(name)
            place = f"{word.place}{value}" if word is not None else f"{name.replace('_', '-')}: back to {value}"
            refused.append(f"{place}: needs a restart: {reason}")
    if refused:
        raise ConfigError(RESTART, "; ".join(refused))
