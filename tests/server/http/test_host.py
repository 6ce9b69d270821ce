"""The check of the `Host` header: which names reach a server on loopback."""

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.server.harness import Running, server_settings, with_server
from tiercel.server.http.host import HostCheck, HostNames, accepted_hosts
from tiercel.settings.option import options_of
from tiercel.settings.settings import ServerSettings

OWN = ["localhost", "LOCALHOST", "localhost.", "localhost:8000", "localhost:", "127.0.0.1", "127.0.0.1:1", "127.8.8.8"]
OWN += ["[::1]", "[::1]:8000", "[0:0:0:0:0:0:0:1]", "[::ffff:127.0.0.1]:80"]
FOREIGN = ["evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example", "10.0.0.1", "[::2]"]
FOREIGN += ["0.0.0.0", "[::]", "localhost..", "127.1", "2130706433", "xn--localhost-", "*"]
MALFORMED = ["", " ", "local host", "[::1", "::1", "[evil]", "[::1]x", "localhost:port", "a@localhost", "localhost/x"]
MALFORMED += ["localhost:123456", "l\xf6calhost", "localhost,evil.example", "[127.0.0.1]x", "http://localhost"]


async def status_of(
    hosts: Sequence[str], names: Sequence[str] = (), *, version: str = "1.1", arrived_at: str = "127.0.0.1"
) -> tuple[int, str]:
    """Send one request with these Host lines through the check; return the status and the code of the error."""
    answers: list[dict[str, object]] = []

    async def app(scope: object, receive: object, send: object) -> None:
        answers.append({"status": 200, "body": b'{"error": {"code": "served"}}'})

    async def send(message: dict[str, object]) -> None:
        answers.append(message)

    scope = {
        "type": "http",
        "http_version": version,
        "headers": [(b"host", host.encode("latin-1")) for host in hosts],
        "server": (arrived_at, 8000),
    }
    await HostCheck(app, HostNames(names))(scope, None, send)  # type: ignore[arg-type]
    return answers[0]["status"], json.loads(answers[-1]["body"])["error"]["code"]  # type: ignore[return-value]


def check(hosts: Sequence[str], names: Sequence[str] = (), **more: str) -> tuple[int, str]:
    return asyncio.run(status_of(hosts, names, **more))


@pytest.mark.parametrize("host", OWN)
def test_names_and_addresses_of_loopback_are_served(host: str) -> None:
    assert check([host]) == (200, "served")


@pytest.mark.parametrize("host", [*FOREIGN[:10], "xn--localhost-"])
def test_other_names_and_addresses_are_misdirected(host: str) -> None:
    assert check([host]) == (421, "host_not_allowed")


@pytest.mark.parametrize("host", MALFORMED)
def test_malformed_hosts_are_bad_requests(host: str) -> None:
    assert check([host]) == (400, "invalid_host")


def test_a_host_is_given_exactly_once() -> None:
    assert check([]) == (400, "invalid_host")
    assert check(["localhost", "localhost"]) == (400, "invalid_host")
    assert check(["localhost", "evil.example"]) == (400, "invalid_host")
    assert check([], version="1.0") == (200, "served")
    assert check(["evil.example"], version="1.0") == (421, "host_not_allowed")


def test_allowed_names_are_served_with_any_port_and_in_any_case() -> None:
    names = ("llm.example.com", "*.internal", "10.9.8.7")
    for host in ("llm.example.com", "LLM.Example.com.:443", "a.internal", "a.b.internal:1", "10.9.8.7", "localhost"):
        assert check([host], names) == (200, "served"), host
    for host in ("x.llm.example.com", "example.com", "internal", "ainternal", "10.9.8.6"):
        assert check([host], names) == (421, "host_not_allowed"), host


def test_the_address_at_which_a_request_arrived_is_served() -> None:
    """Probes of Kubernetes send the address of the pod."""
    assert check(["10.1.2.3:8000"], ("llm.example.com",), arrived_at="10.1.2.3") == (200, "served")
    assert check(["10.1.2.3"], ("llm.example.com",), arrived_at="::ffff:10.1.2.3") == (200, "served")
    assert check(["[fd00::5]:8000"], ("llm.example.com",), arrived_at="fd00:0::5") == (200, "served")
    assert check(["10.1.2.4"], ("llm.example.com",), arrived_at="10.1.2.3") == (421, "host_not_allowed")
    assert check(["localhost"], ("llm.example.com",), arrived_at="/run/tiercel.sock") == (200, "served")


def test_only_loopback_is_checked_without_allowed_hosts() -> None:
    for host in ("127.0.0.1", "::1", "localhost"):
        assert accepted_hosts((), host) is not None
    for host in ("0.0.0.0", "", "10.0.0.1", None):
        assert accepted_hosts((), host) is None
    for host in ("127.0.0.1", "0.0.0.0", None):
        assert accepted_hosts(("*",), host) is None
        names = accepted_hosts(("a.example", "*.b.example"), host)
        assert names is not None
        assert [name in names for name in ("a.example", "x.b.example", "b.example")] == [True, True, False]


def test_a_page_of_another_site_does_not_reach_a_server_on_loopback(model_folder: Path) -> None:
    async def test(server: Running) -> None:
        for path in ("/health", "/metrics", "/ui", "/v1/models", "/absent"):
            answer = await server.http.get(path, headers={"host": f"evil.example:{server.port}"})
            assert (answer.status_code, answer.json()["error"]["code"]) == (421, "host_not_allowed")
        assert "--allowed-hosts evil.example" in answer.json()["error"]["message"]
        assert (await server.http.get("/health", headers={"host": "localhost"})).status_code == 200

    with_server(server_settings(model_folder), test)


def test_the_names_of_a_proxy_are_allowed_by_a_setting(model_folder: Path) -> None:
    async def test(server: Running) -> None:
        assert (await server.http.get("/health", headers={"host": "llm.example.com"})).status_code == 200
        assert (await server.http.get("/health", headers={"host": "other.example.com"})).status_code == 421

    with_server(server_settings(model_folder), test, allowed_hosts=("llm.example.com",))


def test_allowed_hosts_are_names_without_ports() -> None:
    option = options_of(ServerSettings)["allowed_hosts"]
    assert option.read("LLM.Example.com., *.internal,[::1],10.0.0.1,*") == (
        *("llm.example.com", "*.internal", "::1", "10.0.0.1", "*"),
    )
    for wrong in ("a.example:80", "http://a.example", "a*.example", "a..b", "*.", "**", "a b", "[::1", ["a", 5], 5):
        with pytest.raises(ValueError):
            option.read(wrong)
