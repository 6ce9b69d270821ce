"""Metrics of the settings in force."""

from prometheus_client import CollectorRegistry, Counter, Gauge


class ConfigMetrics:
    """The metrics of changes of the settings."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._version = Gauge("tiercel_config_version", "Version of the settings in force.", registry=registry)
        self._changed = Gauge(
            "tiercel_config_last_change_timestamp_seconds", "When they came into force, since 1970.", registry=registry
        )
        self._errors = Counter("tiercel_config_errors", "Changes of the settings that were refused.", registry=registry)

    def on_config(self, version: int, at_s: float) -> None:
        """Record a new version."""
        self._version.set(version)
        self._changed.set(at_s)

    def on_config_refused(self) -> None:
        """Count a refused change."""
        self._errors.inc()
