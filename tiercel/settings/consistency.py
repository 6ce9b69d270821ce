"""Checks of settings that are valid alone but not together, or not on this machine."""

from collections.abc import Collection
from pathlib import Path

from tiercel.settings.engine_address import read_engines
from tiercel.settings.exposure import is_loopback
from tiercel.settings.option import flag_name
from tiercel.settings.settings import EngineSettings, ServerSettings
from tiercel.system.file_fault import file_fault, folder_fault
from tiercel.values.errors import ConfigError

CONFLICT = "config.conflict"
TENANTS_FILE = "tenants.file"
"""Codes of errors: of settings, and of the tenants file, whose refusals are counted apart."""


def check_together(engine: EngineSettings, server: ServerSettings, given: Collection[str]) -> None:
    """Check values as the operator wrote them; `given` are the names of the settings not left at their default.

    Errors: ConfigError with one line.
    """
    _check_engine(engine)
    _check_disk(engine, given)
    _check_access(server)
    _check_fleet(server)
    _check_files(server)


def conflict(message: str) -> ConfigError:
    """Return the error for a value that is wrong beside another value, or on this machine."""
    return ConfigError(CONFLICT, message)


def _check_engine(settings: EngineSettings) -> None:
    block, budget = settings.block_size, settings.max_num_batched_tokens
    if block & (block - 1):
        raise ConfigError("config.value", f"--block-size {block}: expected a power of two from 1 to 256")
    if budget is not None and budget < block:
        raise conflict(f"--max-num-batched-tokens {budget} is below --block-size {block}: a step must hold one block")


def _check_disk(settings: EngineSettings, given: Collection[str]) -> None:
    if not settings.kv_disk_paths:
        for name in ("kv_disk_size", "kv_disk_daily_writes"):
            if name in given:
                raise conflict(f"{flag_name(name)} needs --kv-disk-path: there is no folder to write to")
        return
    if not settings.enable_prefix_caching:
        raise conflict("--kv-disk-path needs --enable-prefix-caching: blocks are found again by their content")
    folders = [Path(path).expanduser().resolve() for path in settings.kv_disk_paths]
    for path, folder in zip(settings.kv_disk_paths, folders, strict=True):
        if folders.count(folder) > 1:
            raise conflict(f"--kv-disk-path {path}: the same folder twice")


def _check_access(settings: ServerSettings) -> None:
    if (settings.ssl_keyfile is None) != (settings.ssl_certfile is None):
        raise conflict("--ssl-keyfile and --ssl-certfile belong together: give both or none")
    if settings.admin_uds is not None and settings.admin_port is not None:
        raise conflict("--admin-uds beside --admin-port: give one of them")
    if settings.admin_host is not None and settings.admin_port is None:
        raise conflict("--admin-host needs --admin-port")
    if settings.allow_credentials and "*" in settings.allowed_origins:
        raise conflict("--allow-credentials needs --allowed-origins without *: any page could use a visitor's cookie")
    if settings.root_path and not settings.root_path.startswith("/"):
        raise conflict(f"--root-path {settings.root_path}: expected a path that starts with /")
    for flag, keys in {"--api-key": settings.api_keys, "--admin-key": filter(None, (settings.admin_key,))}.items():
        if any(not key.isascii() or not key.isprintable() or " " in key for key in keys):
            raise conflict(f"{flag} ***: expected printable ASCII without spaces, as it stands in an HTTP header")


def _check_fleet(settings: ServerSettings) -> None:
    tls = {
        "engine_certfile": settings.engine_certfile,
        "engine_keyfile": settings.engine_keyfile,
        "engine_cafile": settings.engine_cafile,
    }
    missing = [name for name, path in tls.items() if path is None]
    if 0 < len(missing) < len(tls):
        raise conflict(f"{flag_name(missing[0])} is missing: give {', '.join(map(flag_name, tls))}, or none of them")
    if settings.engines is None:
        return
    source = read_engines(settings.engines)
    if settings.engine_secret_file is None:
        raise conflict("--engines needs --engine-secret-file: the secret that the engines were started with")
    if settings.takeover:
        raise conflict("--takeover beside --engines: start a second front behind the balancer instead")
    if source.path is not None and (fault := file_fault(source.path)) is not None:
        raise conflict(f"--engines file:{source.path}: {fault}")
    for address in source.addresses:
        if not is_loopback(address.host) and settings.engine_certfile is None:
            raise conflict(
                f"--engines {address} is on another machine: "
                "give --engine-certfile, --engine-keyfile and --engine-cafile"
            )


def _check_files(settings: ServerSettings) -> None:
    files = {"ssl_keyfile": settings.ssl_keyfile, "ssl_certfile": settings.ssl_certfile}
    files |= {"engine_secret_file": settings.engine_secret_file, "engine_cafile": settings.engine_cafile}
    files |= {"engine_certfile": settings.engine_certfile, "engine_keyfile": settings.engine_keyfile}
    files["tenants_config"] = settings.tenants_config
    template = settings.chat_template
    if template is not None and "{" not in template and "\n" not in template:  # else it is the template itself
        files["chat_template"] = template
    for name, path in files.items():
        if path is not None and (fault := file_fault(path)) is not None:
            code = TENANTS_FILE if name == "tenants_config" else CONFLICT
            raise ConfigError(code, f"{flag_name(name)} {path}: {fault}")
    folders = {"tokenizer": settings.tokenizer}
    if settings.generation_config not in ("auto", "vllm", "tiercel"):
        folders["generation_config"] = settings.generation_config
    for name, path in folders.items():
        if path is not None and (fault := folder_fault(path)) is not None:
            raise conflict(f"{flag_name(name)} {path}: {fault}")
