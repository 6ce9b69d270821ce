"""OpenAI's client for Python against the daemon with the embedded model."""

from pathlib import Path

from tests.clients.environments import client_python, take_tour
from tests.e2e.daemon import daemon

KEY = "sk-test"


def test_a_tour_of_the_api(tmp_path: Path) -> None:
    client_python("openai")
    with daemon(tmp_path, "--api-key", KEY, "--files-path", str(tmp_path / "files")) as served:
        take_tour("openai", "openai_tour.py", served.url, KEY, served.model)
        served.assert_nothing_held()
