"""instructor: the constrained modes with the embedded model, all modes with a model that follows the prompt."""

from pathlib import Path

from tests.clients.environments import client_python, take_tour
from tests.clients.following_server import following_daemon
from tests.e2e.daemon import daemon

KEY = "sk-test"


def test_constrained_modes_with_the_embedded_model(tmp_path: Path) -> None:
    client_python("instructor")
    with daemon(tmp_path, "--api-key", KEY) as served:
        take_tour("instructor", "instructor_tour.py", served.url, KEY, served.model, "embedded")
        served.assert_nothing_held()


def test_all_modes_with_a_model_that_follows(tmp_path: Path) -> None:
    client_python("instructor")
    with following_daemon(tmp_path, "--api-key", KEY) as served:
        take_tour("instructor", "instructor_tour.py", served.url, KEY, served.model, "following")
        served.assert_nothing_held()
