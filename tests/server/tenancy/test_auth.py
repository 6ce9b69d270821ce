"""Authentication of clients and operators."""

import asyncio
import signal
from pathlib import Path

import httpx
import pytest
from msgspec.structs import replace
from starlette.requests import Request

from tests.server.harness import Running, chat_body, server_settings, with_server
from tests.server.test_launch import started
from tiercel.server.tenancy.auth import MetricsGuard, is_local
from tiercel.server.tenancy.directory import TenantDirectory, open_directory
from tiercel.settings.settings import ServerSettings
from tiercel.values.errors import AdmissionError

OPEN = ["/health", "/health/live", "/health/ready", "/ready", "/readiness", "/ping", "/version", "/metrics"]
GUARDED = [
    ("GET", "/v1/models"),
    ("GET", "/v1/models/tiny"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("GET", "/load"),
    *(("GET", f"/v1/{path}") for path in ("files", "files/x", "files/x/content", "batches", "batches/x")),
    *(("POST", f"/v1/{path}") for path in ("files", "batches", "batches/x/cancel")),
    ("DELETE", "/v1/files/x"),
]


def test_guarded_routes_want_a_key_and_open_ones_do_not(model_folder: Path) -> None:
    async def test(server: Running) -> None:
        for path in OPEN:
            assert (await server.http.get(path)).status_code == 200, path
        assert (await server.http.post("/ping")).status_code == 200
        for method, path in GUARDED:
            for headers in (
                {},
                {"authorization": "Bearer wrong"},
                {"authorization": "one"},
                {"authorization": "Basic one"},
            ):
                answer = await server.http.request(method, path, headers=headers)
                assert answer.status_code == 401, path
                assert answer.headers["www-authenticate"] == "Bearer"
                error = answer.json()["error"]
                assert (error["code"], error["type"]) == ("invalid_api_key", "authentication_error")
        for key in ("one", "two"):
            headers = {"authorization": f"Bearer {key}"}
            assert (await server.http.get("/v1/models", headers=headers)).status_code == 200
            answer = await server.http.post("/v1/chat/completions", json=chat_body(max_tokens=1), headers=headers)
            assert answer.status_code == 200

    settings = replace(server_settings(model_folder), enable_server_load_tracking=True)
    with_server(settings, test, api_keys=("one", "two"))


def test_the_key_is_checked_before_the_body_is_read(model_folder: Path) -> None:
    async def test(server: Running) -> None:
        answer = await server.http.post("/v1/completions", content=b"{", headers={"content-type": "application/json"})
        assert answer.status_code == 401

    with_server(server_settings(model_folder), test, api_keys=("one",))


def test_a_path_that_is_spelled_differently_does_not_open_a_route(model_folder: Path) -> None:
    async def test(server: Running) -> None:
        for path in (
            "/v1/models/",
            "//v1/models",
            "/V1/models",
            "/health/../v1/models",
            "/v1%2Fmodels",
            "/metrics/../load",
        ):
            answer = await server.http.get(path, headers={"host": "health"})
            assert answer.status_code in (401, 404), path

    with_server(server_settings(model_folder), test, api_keys=("one",), allowed_hosts=("health",))


def _request(host: str | None, key: str | None = None, **more: str) -> Request:
    headers = [(name.replace("_", "-").encode(), value.encode()) for name, value in more.items()]
    if key is not None:
        headers.append((b"authorization", f"Bearer {key}".encode()))
    return Request({"type": "http", "headers": headers, "client": None if host is None else (host, 1)})


@pytest.mark.parametrize(
    ("host", "expected"),
    [("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), (None, True), ("10.0.0.1", False), ("name", False)],
)
def test_only_this_machine_is_local(host: str | None, expected: bool) -> None:
    assert is_local(_request(host)) is expected


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", None])
@pytest.mark.parametrize("name", ["forwarded", "via", "x_real_ip", "x_forwarded_for", "x_forwarded_proto"])
def test_a_request_through_a_proxy_is_not_local(host: str | None, name: str) -> None:
    for value in ("127.0.0.1", ""):
        assert not is_local(_request(host, **{name: value}))
    assert is_local(_request(host, user_agent="x", x_request_id="via"))


class Counter:
    def on_tenants_refused(self) -> None:
        raise AssertionError


def _directory(*keys: str, admin: str | None = None) -> TenantDirectory:
    settings = ServerSettings(model="x", served_model_names=("x",), api_keys=keys, admin_key=admin)
    return open_directory(settings, Counter())


def test_metrics_from_another_machine_want_a_key() -> None:
    guard = MetricsGuard(_directory("one", admin="boss"))
    asyncio.run(guard(_request("127.0.0.1")))
    for key in ("one", "boss"):
        asyncio.run(guard(_request("10.0.0.1", key)))
    for key in (None, "two"):
        with pytest.raises(AdmissionError):
            asyncio.run(guard(_request("10.0.0.1", key)))


def test_a_header_cannot_make_a_client_local(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A daemon that trusts every proxy, as uvicorn allows, uses the proxied address and requires a key."""
    monkeypatch.setenv("FORWARDED_ALLOW_IPS", "*")
    with started(model_folder, api_keys=["one"]) as server:
        server.await_url()
        for peer in ("127.0.0.1", "203.0.113.9"):
            assert httpx.get(f"{server.url}/metrics", headers={"x-forwarded-for": peer}).status_code == 401
        assert httpx.get(f"{server.url}/metrics").status_code == 200
        server.process.send_signal(signal.SIGTERM)
        code, err = server.wait()
    assert code == 0
    assert "203.0.113.9" not in err


def test_whole_keys_only_are_found() -> None:
    table = _directory("secret").table
    for right in ("Bearer secret", "bearer secret", "Bearer  secret "):
        assert table.find(right) is not None
    for wrong in (None, "", "Bearer", "Bearer ", "Bearer secre", "Bearer secret2", "secret", "Bearer \udcff"):
        assert table.find(wrong) is None
        assert not table.admits_admin(wrong)
    assert _directory().table.find(None) is not None
