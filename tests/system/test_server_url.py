"""Addresses of servers as people write them."""

import pytest

from tests.addresses import IMPOSSIBLE_HOSTS, IMPOSSIBLE_URLS
from tiercel.server.http.listen import bind
from tiercel.settings.engine_address import read_engines
from tiercel.settings.readers import read_collector
from tiercel.settings.settings import ServerSettings
from tiercel.system.server_url import host_fault, read_server_url
from tiercel.values.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("http://localhost", "http://localhost"),
        ("HTTPS://llm.example.com:8443/v1/", "HTTPS://llm.example.com:8443"),
        ("http://[::1]:8000/v1", "http://[::1]:8000"),
        ("http://[fe80::1%eth0]", "http://[fe80::1%eth0]"),
        ("http://host/behind/a/proxy/v1", "http://host/behind/a/proxy"),
        ("http://user:word@my_host.:80", "http://user:word@my_host.:80"),
        ("http://bücher.example", "http://bücher.example"),
        ("http://xn--bcher-kva.example", "http://xn--bcher-kva.example"),
        ("http://10.0.0.1:1", "http://10.0.0.1:1"),
    ],
)
def test_an_address_is_read(text: str, url: str) -> None:
    assert read_server_url(text, "--url") == url


@pytest.mark.parametrize(("text", "reason"), IMPOSSIBLE_URLS.items())
def test_an_address_at_which_no_server_can_be_is_refused(text: str, reason: str) -> None:
    with pytest.raises(ConfigError) as raised:
        read_server_url(text, "--url")
    assert raised.value.message.startswith("--url ") and reason in raised.value.message
    assert raised.value.message.isprintable()


@pytest.mark.parametrize("host", ["localhost", "a.b-c.d", "under_score", "10.0.0.1", "::1", "bücher.example", "a."])
def test_a_host_is_accepted(host: str) -> None:
    assert host_fault(host) is None


@pytest.mark.parametrize("host", IMPOSSIBLE_HOSTS)
def test_a_host_that_no_resolver_can_know_is_refused(host: str) -> None:
    assert host_fault(host)


@pytest.mark.parametrize("host", [host for host in IMPOSSIBLE_HOSTS if "\0" not in host and host != "::1::"])
def test_settings_that_name_a_host_refuse_it(host: str) -> None:
    with pytest.raises(ValueError, match=r".*"):
        read_collector(f"http://{host}:4318")
    for text in (f"static:{host}:81", f"dns:{host}", f"dns:{host}:81"):
        with pytest.raises(ConfigError):
            read_engines(text)
    if host:  # without one, a server listens on all addresses
        with pytest.raises(ConfigError, match="--host"):
            bind(ServerSettings(model="", served_model_names=(), host=host, port=0))
