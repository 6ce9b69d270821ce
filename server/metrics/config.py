"""Numbers for Prometheus about the settings in force."""

from prometheus_client import CollectorRegistry, Counter, Gauge


class ConfigMetrics:
    """Counts changes of the settings while the server runs."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._version = Gauge("tiercel_config_version", "Version of the settings in force.", registry=registry)
        self._changed = Gauge(
            "tiercel_config_last_change_timestamp_seconds", "When they came into force, since 1970.", registry=registry
        )
        self._errors = Counter("tiercel_config_errors", "Changes of the settings that were refused.", registry=registry)

    def on_config(self, version: int, at_s: float) -> None:
        """A version is in force from now on."""
        self._version.set(version)
        self._changed.set(at_s)

    def on_config_refused(self) -> None:
        """A file or a request was wrong."""
        self._errors.inc()
