"""Anthropic's own client against the daemon with the embedded model."""

from pathlib import Path

from tests.clients.environments import client_python, take_tour
from tests.e2e.daemon import daemon

KEY = "sk-ant-test"


def test_a_tour_of_the_messages_api(tmp_path: Path) -> None:
    client_python("anthropic")
    with daemon(tmp_path, "--api-key", KEY, "--files-path", str(tmp_path / "files")) as served:
        take_tour("anthropic", "anthropic_tour.py", served.url, KEY, served.model)
        served.assert_nothing_held()
