"""Read the settings: flags, then TIERCEL_* variables, then a few VLLM_* ones, then tiercel.toml, then defaults.

This is the only module that reads the environment. A wrong value is a `ConfigError` whose message names the place, the
value and what is allowed.
"""

import difflib
import os
import tempfile
import tomllib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from msgspec.structs import replace

from tiercel.embedded import MODEL_DIR
from tiercel.modelfile.checkpoint import resolve_model_folder
from tiercel.settings.consistency import check_together, conflict
from tiercel.settings.exposure import check_exposure
from tiercel.settings.option import options_of, wrong_value
from tiercel.settings.process import ProcessSettings
from tiercel.settings.settings import SETTINGS, EngineSettings, ServerSettings, Settings
from tiercel.settings.sourced_value import BODY_NAME, Source, SourcedValue
from tiercel.settings.vllm_flags import CONFIGS, HARMLESS, REFUSED
from tiercel.system.file_fault import is_there
from tiercel.system.file_trust import check_found_file, check_named_file
from tiercel.values.errors import ConfigError
from tiercel.values.units import GIB

DEFAULT_FILE = "tiercel.toml"
EMBEDDED_NAME = "tiercel-embedded"
"""What the API calls the embedded model."""

VLLM_VARIABLES = {option.option.vllm_variable: name for name, option in SETTINGS.items() if option.option.vllm_variable}
"""vLLM's variables that are honoured, and the settings that they set."""
_LISTEN_FDS_START = 3  # SD_LISTEN_FDS_START of <systemd/sd-daemon.h>
_MAX_LISTEN_FDS = 64
_WORKER_VARIABLES = ("PATH", "PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "TZ", "TZDIR")
_LIKELY_TYPO = 0.85  # similarity of two names, as difflib measures it

P = TypeVar("P", bound=ProcessSettings)


@dataclass(frozen=True, slots=True)
class Resolved:
    """The settings, the source of each, and the warnings for the operator."""

    settings: Settings
    warnings: tuple[str, ...]
    values: Mapping[str, object]  # every setting by name, as the operator wrote it, before anything is derived
    given: Mapping[str, SourcedValue]  # the settings that are not left at their default, by name
    flags: Mapping[str, object]
    file: Mapping[str, SourcedValue]  # the content of the settings file when it was read

    def read_again(self) -> "Resolved":
        """Resolve the same flags and the variables with the settings file as it is now. Errors: as of `resolve`."""
        return resolve(self.flags)

    def with_changes(self, changes: Mapping[str, object]) -> "Resolved":
        """Resolve the same flags, variables and file content, with `changes` above all of them.

        `changes` are keys and values as in tiercel.toml that an administrator requested while the server runs; earlier
        changes are dropped. The file is not read again. Errors: as of `resolve`.
        """
        return _merge(self.flags, self.file, values_of(changes, "request", BODY_NAME))


def resolve(flags: Mapping[str, object]) -> Resolved:
    """Merge the sources, check every value, then check the values against each other.

    `flags` holds the flags that were given, by the names of their settings.
    Errors: ConfigError with one line for the operator.
    """
    return _merge(flags, None, {})


def _merge(
    flags: Mapping[str, object], file: Mapping[str, SourcedValue] | None, changes: Mapping[str, SourcedValue]
) -> Resolved:
    """Resolve the sources. `file` is the content of the settings file; None: the file is read."""
    warnings: list[str] = []
    given = dict(_variables(warnings))
    given |= {name: SourcedValue(value, "flag", SETTINGS[name].flag) for name, value in flags.items()}
    if file is None:
        file = _file_values(given.get("config"))
    given = {**file, **given, **changes}
    given = _without_idle_keys(given, warnings)
    values = {name: option.default for name, option in SETTINGS.items()} | _read_each(given)
    return Resolved(_settle(values, given), tuple(warnings), values, given, flags, file)


def _without_idle_keys(given: dict[str, SourcedValue], warnings: list[str]) -> dict[str, SourcedValue]:
    """Drop the API key of the environment beside a tenants file: there it is meant for clients; a flag is an error."""
    if "tenants_config" not in given or "api_key" not in given:
        return given
    key = given["api_key"]
    if key.source != "env":
        place = key.place.rstrip("= ")
        raise conflict(f"{place} beside --tenants-config: the keys of a tenant belong in the tenants file")
    warnings.append(f"{key.name} is ignored: keys are read from the tenants file")
    return {name: value for name, value in given.items() if name != "api_key"}


def client_admin_key() -> str | None:
    """Return the key that the admin verbs use: TIERCEL_ADMIN_KEY."""
    return os.environ.get("TIERCEL_ADMIN_KEY", "").strip() or None


def client_api_key() -> str | None:
    """Return the key that a client of this machine's server uses: the first of TIERCEL_API_KEY."""
    return os.environ.get("TIERCEL_API_KEY", "").split(",")[0].strip() or None


def worker_environment() -> dict[str, str]:
    """Return what a process that renders templates needs of the environment: no key and no setting."""
    return {name: os.environ[name] for name in _WORKER_VARIABLES if name in os.environ}


def notify_socket() -> str | None:
    """Return the socket that systemd listens on for notifications; None if systemd did not start this process."""
    return os.environ.get("NOTIFY_SOCKET") or None


def watchdog_s() -> float | None:
    """Return the silence after which systemd restarts this process; None if systemd does not watch it."""
    microseconds, pid = os.environ.get("WATCHDOG_USEC", ""), os.environ.get("WATCHDOG_PID", "")
    if not microseconds.isdecimal() or not int(microseconds) or pid not in ("", str(os.getpid())):
        return None
    return int(microseconds) / 1e6


def runtime_folder() -> Path:
    """Return the folder for sockets: of systemd's service, of the user, or one in the folder for temporary files."""
    service, user = os.environ.get("RUNTIME_DIRECTORY", "").split(":")[0], os.environ.get("XDG_RUNTIME_DIR", "")
    if Path(service).is_absolute():
        return Path(service)
    own = Path(user) if Path(user).is_absolute() else Path(f"/run/user/{os.geteuid()}")
    return own / "tiercel" if own.is_dir() else Path(tempfile.gettempdir()) / f"tiercel-{os.geteuid()}"


def take_listen_fds() -> tuple[tuple[int, str], ...]:
    """Return number and name of the descriptors that systemd passed to this process, as sd_listen_fds(3) does.

    Effects: the variables are removed, so that no child takes the descriptors for its own.
    """
    pid, count, names = (os.environ.pop(name, "") for name in ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES"))
    if pid != str(os.getpid()) or not count.isdecimal() or int(count) > _MAX_LISTEN_FDS:
        return ()
    name_by_index = dict(enumerate(names.split(":") if names else ()))
    return tuple((_LISTEN_FDS_START + index, name_by_index.get(index, "unknown")) for index in range(int(count)))


def bench_api_key() -> str | None:
    """Return the key that a load test uses: TIERCEL_API_KEY, else OPENAI_API_KEY."""
    return client_api_key() or os.environ.get("OPENAI_API_KEY") or None


# Sources


def _variables(warnings: list[str]) -> Iterator[tuple[str, SourcedValue]]:
    """Yield the settings in the environment, those with lower precedence first."""
    for variable, name in VLLM_VARIABLES.items():
        value = os.environ.get(variable, "")
        if value and not _is_service_link(variable, value, warnings):
            yield name, SourcedValue(_vllm_value(variable, value), "env", variable)
    for variable, value in os.environ.items():
        name = variable.lower().removeprefix("tiercel_")
        if not variable.lower().startswith("tiercel_"):
            continue
        if name in SETTINGS:
            if value and not _is_service_link(SETTINGS[name].variable, value, warnings):
                yield name, SourcedValue(value, "env", SETTINGS[name].variable)
        elif near := _nearest(name, _LIKELY_TYPO):
            warnings.append(f"{variable} is not a setting and is ignored; did you mean {SETTINGS[near].variable}?")


def _is_service_link(variable: str, value: str, warnings: list[str]) -> bool:
    """Whether Kubernetes set this variable, as it does for each service: TIERCEL_PORT=tcp://10.0.0.1:80."""
    if value.startswith("tcp://"):
        warnings.append(f"{variable}={value} is the link of a Kubernetes service and is ignored")
        return True
    return False


def _vllm_value(variable: str, value: str) -> object:
    match variable:
        case "VLLM_API_KEY":
            return [value]
        case "VLLM_CPU_KVCACHE_SPACE":
            try:
                return int(float(value) * GIB)
            except (ValueError, OverflowError):
                raise ConfigError("config.value", f"{variable}={value}: expected a number of GiB") from None
        case _:
            return value


def _file_values(chosen: SourcedValue | None) -> dict[str, SourcedValue]:
    """Read the settings file: the one that was chosen, or tiercel.toml if it exists."""
    path = Path(str(chosen.value) if chosen else DEFAULT_FILE)
    if not chosen and not is_there(path):
        return {}
    if path.suffix in (".yaml", ".yml", ".json"):
        raise ConfigError("config.file", f"--config {path}: expected a TOML file with lines such as `port = 8000`")
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            if chosen:
                check_named_file(status, str(path))
            else:
                check_found_file(status, str(path), os.geteuid())
            content = tomllib.load(file)
    except OSError as exc:
        raise ConfigError("config.file", f"--config {path}: cannot be read: {exc.strerror}") from exc
    except RecursionError as exc:
        raise ConfigError("config.file", f"--config {path}: not a TOML file: nested too deeply") from exc
    except ValueError as exc:  # wrong syntax, not UTF-8, or a number with thousands of digits
        raise ConfigError("config.file", f"--config {path}: not a TOML file: {exc}") from exc
    return values_of(content, "file", str(path))


def values_of(content: Mapping[str, object], source: Source, document: str) -> dict[str, SourcedValue]:
    """Return the keys and values of a document by the names of their settings.

    Errors: ConfigError for a key that is not a setting, and for two spellings of one key.
    """
    values: dict[str, SourcedValue] = {}
    for key, value in content.items():
        name = key.replace("-", "_")
        if name not in SETTINGS or name == "config":
            raise ConfigError("config.key", f"{document}: {_unknown_key(key)}")
        if name in values:
            raise ConfigError("config.key", f"{document}: {values[name].key} and {key} are the same setting")
        values[name] = SourcedValue(value, source, document, key)
    return values


def _unknown_key(key: str) -> str:
    if reason := REFUSED.get(key.replace("_", "-")):
        return f"{key} is not supported: {reason}"
    if key.replace("_", "-") in CONFIGS:
        return f"there is no setting {key}: it is a flag of vLLM, understood on the command line only"
    harmless = HARMLESS.get(key.replace("_", "-"))
    if harmless is not None and (reason := harmless.note or harmless.otherwise):
        return f"there is no setting {key}: {reason}"
    near = _nearest(key.replace("-", "_"))
    hint = f"; did you mean {SETTINGS[near].key}?" if near else ""
    return f"there is no setting {key[:64]}{hint}"


def _nearest(name: str, similarity: float = 0.6) -> str | None:
    """Return the setting whose name is most similar to a mistyped one."""
    near = difflib.get_close_matches(name, SETTINGS, n=1, cutoff=similarity)
    return near[0] if near else None


def _read_each(given: Mapping[str, SourcedValue]) -> dict[str, object]:
    values: dict[str, object] = {}
    for name, written in given.items():
        option = SETTINGS[name]
        try:
            values[name] = option.read(written.value)
        except ValueError:
            raise wrong_value(written.place, written.value, option) from None
    return values


# The result


def _settle(values: Mapping[str, object], given: Collection[str]) -> Settings:
    """Check the values together and derive what depends on the machine: folders, served names, limits of the SSD."""
    engine, server = _build(EngineSettings, values), _build(ServerSettings, values)
    check_together(engine, server, given)
    cache = _cache_folder()
    folder = str(resolve_model_folder(server.model or str(MODEL_DIR), os.environ.get("HF_HUB_CACHE") or None, cache))
    paths = tuple(str(Path(path).expanduser().absolute()) for path in engine.kv_disk_paths)
    daily_bytes = engine.kv_disk_daily_bytes if "kv_disk_daily_writes" in given else engine.kv_disk_bytes
    engine = replace(
        engine,
        model=folder,
        kv_disk_paths=paths,
        kv_disk_daily_bytes=daily_bytes if paths else 0,
        tokenizer_folder=None if server.tokenizer is None else str(Path(server.tokenizer).absolute()),
        cache_folder=cache,
    )
    server = replace(server, model=folder, served_model_names=_served_names(server))
    check_exposure(server)
    return Settings(engine=engine, server=server)


def _build(kind: type[P], values: Mapping[str, object]) -> P:
    """Make the settings of one process. Until a model is resolved, its name is empty where none was given."""
    options = options_of(kind)
    fields = {option.field: values[name] for name, option in options.items() if values[name] is not None}
    return kind(**{"model": "", **fields})  # pyright: ignore[reportArgumentType] - read by the options of these fields


def _served_names(server: ServerSettings) -> tuple[str, ...]:
    """Return the names that the operator chose, else the model as typed, and the last part of its path."""
    if server.served_model_names:
        return server.served_model_names
    if not server.model:
        return (EMBEDDED_NAME,)
    return tuple(dict.fromkeys((server.model, Path(server.model).expanduser().resolve().name)))


def _cache_folder() -> str | None:
    """Return $XDG_CACHE_HOME/tiercel, else ~/.cache/tiercel; None where there is no home.

    A relative XDG_CACHE_HOME is ignored, as the XDG specification demands.
    """
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if base.is_absolute():
        return str(base / "tiercel")
    try:
        return str(Path.home() / ".cache" / "tiercel")
    except RuntimeError:
        return None
