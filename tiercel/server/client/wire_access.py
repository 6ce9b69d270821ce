"""The secret and the TLS contexts of the wire between fronts and engines."""

import ssl
from pathlib import Path

from tiercel.settings.exposure import is_loopback
from tiercel.settings.settings import ServerSettings
from tiercel.system.file_trust import check_secret_file
from tiercel.values.errors import ConfigError
from tiercel.wire.handshake import MAX_SECRET_BYTES, MIN_SECRET_BYTES, check_byte_order


def read_secret(settings: ServerSettings) -> bytes:
    """Return the secret of the wire, without white space at its ends. Errors: ConfigError that names the flag."""
    check_byte_order()
    path = settings.engine_secret_file
    if path is None:
        raise ConfigError("wire.secret", "--engine-secret-file is missing: fronts and engines share a secret")
    try:
        with Path(path).open("rb") as file:
            check_secret_file(file.fileno(), path)
            secret = file.read(MAX_SECRET_BYTES + 1).strip()
    except OSError as exc:
        raise ConfigError("wire.secret", f"--engine-secret-file {path}: cannot be read: {exc.strerror}") from exc
    if not MIN_SECRET_BYTES <= len(secret) <= MAX_SECRET_BYTES:
        limits = f"expected {MIN_SECRET_BYTES} to {MAX_SECRET_BYTES} bytes"
        raise ConfigError(
            "wire.secret", f"--engine-secret-file {path}: {limits}, such as `openssl rand -hex 32` prints"
        )
    return secret


def host_tls(settings: ServerSettings, host: str) -> ssl.SSLContext | None:
    """Return the context of a listening host, which asks fronts for certificates; None without TLS on loopback.

    Errors: ConfigError if the address can be reached from other machines and there are no certificates.
    """
    if settings.engine_certfile is None:
        if not is_loopback(host):
            raise ConfigError(
                "wire.exposed",
                f"--listen {host} can be reached from other machines: "
                "give --engine-certfile, --engine-keyfile and --engine-cafile",
            )
        return None
    return _context(settings, ssl.PROTOCOL_TLS_SERVER)


def front_tls(settings: ServerSettings) -> ssl.SSLContext | None:
    """Return the context of a front, which checks the names of hosts; None: no certificates. Errors: ConfigError."""
    return None if settings.engine_certfile is None else _context(settings, ssl.PROTOCOL_TLS_CLIENT)


def _context(settings: ServerSettings, side: int) -> ssl.SSLContext:
    assert settings.engine_certfile is not None
    context = ssl.SSLContext(side)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    try:
        context.load_cert_chain(settings.engine_certfile, settings.engine_keyfile)
        context.load_verify_locations(settings.engine_cafile)
    except OSError as exc:  # includes ssl.SSLError
        files = f"{settings.engine_certfile}, {settings.engine_keyfile} and {settings.engine_cafile}"
        raise ConfigError("wire.tls", f"--engine-certfile: cannot use {files}: {exc}") from exc
    return context
