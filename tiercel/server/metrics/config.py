"""Metrics of changes of the settings."""

from prometheus_client import CollectorRegistry, Counter, Gauge


class ConfigMetrics:
    """The metrics of changes of the settings."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._version = Gauge("tiercel_config_version", "Version of the settings in force.", registry=registry)
        self._changed = Gauge(
            "tiercel_config_last_change_timestamp_seconds",
            "Unix time of the last change of the settings.",
            registry=registry,
        )
        self._errors = Counter("tiercel_config_errors", "Refused changes of the settings.", registry=registry)

    def on_config(self, version: int, at_s: float) -> None:
        """Record a new version of the settings."""
        self._version.set(version)
        self._changed.set(at_s)

    def on_config_refused(self) -> None:
        """Count a refused change of the settings."""
        self._errors.inc()
