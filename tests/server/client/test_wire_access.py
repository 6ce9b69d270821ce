"""The secret and the certificates of the wire: what is missing is named, and nobody without a certificate is let in."""

import asyncio
import contextlib
import ssl
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.server.fake_engine import Script
from tests.server.fleet_parts import FakeHost, FrontParts, fleet_parts, read_tokens, until
from tiercel.server.client.wire_access import front_tls, host_tls, read_secret
from tiercel.settings.settings import ServerSettings
from tiercel.values.errors import ConfigError

PLAIN = ServerSettings(model="folder", served_model_names=("tiny",))


def openssl(*words: str, folder: Path) -> None:
    subprocess.run(["openssl", *words], check=True, capture_output=True, cwd=folder)


def make_authority(folder: Path) -> None:
    folder.mkdir()
    openssl(
        *("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2"),
        *("-subj", "/CN=authority", "-keyout", "ca.key", "-out", "ca.pem"),
        folder=folder,
    )


def certified(folder: Path, name: str = "DNS:localhost,IP:127.0.0.1") -> ServerSettings:
    """Return settings with a certificate of the authority in a folder."""
    if not (folder / "ca.pem").exists():
        make_authority(folder)
    openssl(
        *("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-subj", "/CN=side"),
        *("-keyout", "side.key", "-out", "side.csr"),
        folder=folder,
    )
    (folder / "side.ext").write_text(f"subjectAltName={name}\n")
    openssl(
        *("x509", "-req", "-in", "side.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2"),
        *("-extfile", "side.ext", "-out", "side.pem"),
        folder=folder,
    )
    return replace(
        PLAIN,
        engine_certfile=str(folder / "side.pem"),
        engine_keyfile=str(folder / "side.key"),
        engine_cafile=str(folder / "ca.pem"),
    )


def test_off_loopback_certificates_are_demanded_by_name() -> None:
    with pytest.raises(ConfigError, match=r"--listen 0\.0\.0\.0 can be reached.*--engine-certfile, --engine-keyfile"):
        host_tls(PLAIN, "0.0.0.0")
    assert host_tls(PLAIN, "127.0.0.1") is None
    assert front_tls(PLAIN) is None


def test_unreadable_certificates_are_named(tmp_path: Path) -> None:
    (tmp_path / "junk").write_text("junk")
    junk = str(tmp_path / "junk")
    with pytest.raises(ConfigError, match="--engine-certfile: cannot use"):
        front_tls(replace(PLAIN, engine_certfile=junk, engine_keyfile=junk, engine_cafile=junk))


def test_secrets_are_read_and_checked(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    settings = replace(PLAIN, engine_secret_file=str(path))
    with pytest.raises(ConfigError, match="--engine-secret-file is missing"):
        read_secret(PLAIN)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_secret(settings)
    path.write_text("0123456789abcdef\n")
    path.chmod(0o640)
    assert read_secret(settings) == b"0123456789abcdef"
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="lets every user of the machine read it"):
        read_secret(settings)
    path.chmod(0o600)
    for text in ("short", "x" * 5000):
        path.write_text(text)
        with pytest.raises(ConfigError, match="expected 16 to 4096 bytes"):
            read_secret(settings)


@contextlib.asynccontextmanager
async def guarded_host(settings: ServerSettings) -> AsyncIterator[FakeHost]:
    host = FakeHost(Script())
    await host.listen(host_tls(settings, "127.0.0.1"))
    await host.start()
    try:
        yield host
    finally:
        await host.close()


def front_with(front: FrontParts, tls: ssl.SSLContext | None) -> FrontParts:
    front.access.tls = tls
    return front


def test_a_front_with_a_certificate_of_the_authority_is_served_and_no_other(tmp_path: Path) -> None:
    good, foreign = certified(tmp_path / "ours"), certified(tmp_path / "theirs")
    trusting = replace(foreign, engine_cafile=good.engine_cafile)  # believes the host, is not believed
    bare = ssl.create_default_context(cafile=good.engine_cafile)

    async def run() -> None:
        async with guarded_host(good) as host, fleet_parts() as (front, _):
            for tls in (None, bare, front_tls(trusting), front_tls(foreign)):
                link = front_with(front, tls).connect(host.port)
                await until(lambda link=link: bool(link.problem))
                assert not link.is_connected
                front.tasks.pop().cancel()
                front.client.remove(link)
            assert host.engine.num_fronts == 0
            link = front_with(front, front_tls(good)).connect(host.port)
            await until(lambda: link.takes_work)
            assert await read_tokens(front.submit(3, 4, max_tokens=4)) == [3, 4, 3, 4]

    asyncio.run(run())


def test_the_name_in_the_certificate_of_a_host_is_checked(tmp_path: Path) -> None:
    elsewhere = certified(tmp_path / "ours", "DNS:engine.example")

    async def run() -> None:
        async with guarded_host(elsewhere) as host, fleet_parts() as (front, _):
            link = front_with(front, front_tls(elsewhere)).connect(host.port)
            await until(lambda: "certificate" in link.problem)
            assert host.engine.num_fronts == 0

    asyncio.run(run())
