"""LiteLLM's providers for servers like this one."""

from pathlib import Path

from tests.clients.environments import client_python, take_tour
from tests.clients.following_server import following_daemon
from tests.e2e.daemon import daemon

KEY = "sk-test"


def test_the_provider_openai(tmp_path: Path) -> None:
    client_python("litellm")
    with daemon(tmp_path, "--api-key", KEY) as served:
        take_tour("litellm", "litellm_tour.py", served.url, KEY, served.model, "openai")
        served.assert_nothing_held()


def test_the_provider_hosted_vllm(tmp_path: Path) -> None:
    """It removes `additionalProperties` from schemas, after which the embedded model would never end an object."""
    client_python("litellm")
    with following_daemon(tmp_path, "--api-key", KEY) as served:
        take_tour("litellm", "litellm_tour.py", served.url, KEY, served.model, "hosted_vllm")
        served.assert_nothing_held()
