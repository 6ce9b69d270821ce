"""Pydantic AI, whose agents need a model that calls functions: see `following_model`."""

from pathlib import Path

from tests.clients.environments import client_python, take_tour
from tests.clients.following_server import following_daemon

KEY = "sk-test"


def test_loops_of_tool_calls_and_structured_results(tmp_path: Path) -> None:
    client_python("pydantic_ai")
    with following_daemon(tmp_path, "--api-key", KEY) as served:
        take_tour("pydantic_ai", "pydantic_ai_tour.py", served.url, KEY, served.model)
        served.assert_nothing_held()
