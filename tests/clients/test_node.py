"""Clients for node: OpenAI's with the embedded model, Vercel's AI SDK with a model that calls functions."""

from pathlib import Path

from tests.clients.environments import take_node_tour
from tests.clients.following_server import following_daemon
from tests.e2e.daemon import daemon

KEY = "sk-test"


def test_a_tour_with_openais_client(tmp_path: Path) -> None:
    with daemon(tmp_path, "--api-key", KEY) as served:
        take_node_tour("openai_tour.mjs", served.url, KEY, served.model)
        served.assert_nothing_held()


def test_loops_and_objects_with_the_ai_sdk(tmp_path: Path) -> None:
    with following_daemon(tmp_path, "--api-key", KEY) as served:
        take_node_tour("vercel_tour.mjs", served.url, KEY, served.model)
        served.assert_nothing_held()
