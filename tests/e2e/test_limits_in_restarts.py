"""Time limits and comments while the engine is being restarted."""

import os
import signal
from pathlib import Path

import httpx
import pytest

from tests.e2e.daemon import daemon
from tests.e2e.test_deadlines import TEXT, endless


@pytest.mark.slow
def test_comments_flow_and_deadlines_hold_while_the_engine_restarts(tmp_path: Path) -> None:
    """The one stream is quiet until the new engine goes on with it; the other request cannot wait for that."""
    with daemon(tmp_path, "--sse-keep-alive-interval", "0.05") as running:
        body = endless(stream=True, max_tokens=2000)
        with httpx.stream("POST", f"{running.url}{TEXT}", json=body, timeout=60) as stream:
            lines = stream.iter_lines()
            while not next(lines).startswith("data: "):
                pass
            os.kill(running.engine_pid(), signal.SIGKILL)
            answer = running.http.post(TEXT, json=endless(timeout=0.02))
            assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline_exceeded")
            heard = list(lines)
        assert ": keep-alive" in heard
        assert '"finish_reason":"length"' in "".join(heard)
        assert heard[-2:] == ["data: [DONE]", ""]
        running.assert_nothing_held()
