"""The end of a drain: sequences that are unfinished at the deadline are found again by the next daemon."""

import signal
from pathlib import Path

import pytest

from tests.e2e.daemon import daemon
from tests.e2e.prompts import ONE_THREAD, PROMPTS
from tests.e2e.test_life import lines
from tests.e2e.test_restart import disk_flags

OUTPUTS = 3000
BODY: dict[str, object] = {"prompt": PROMPTS[0], "temperature": 0, "max_tokens": OUTPUTS, "ignore_eos": True}


@pytest.mark.slow
def test_a_request_cut_by_the_deadline_of_a_drain_is_found_by_the_next_daemon(tmp_path: Path) -> None:
    with daemon(tmp_path, "--no-enable-prefix-caching", *ONE_THREAD) as plain:
        answer = plain.http.post("/v1/completions", json={**BODY, "max_tokens": 64}).raise_for_status().json()
        expected = answer["choices"][0]["text"]
    with daemon(tmp_path, *disk_flags(tmp_path), "--shutdown-timeout", "0.2") as first:
        heard: list[str] = []
        thread = lines(first, {**BODY, "stream": True}, heard)
        while len(heard) < 200:  # two lines for an event
            assert thread.is_alive()
        assert first.stop(signal.SIGTERM) == 0
        thread.join(20)
        assert '"error"' in heard[-4]
        assert "is_saved=True" in first.log.read_text()
    with daemon(tmp_path, *disk_flags(tmp_path)) as again:
        answer = again.http.post("/v1/completions", json={**BODY, "max_tokens": 64}).raise_for_status().json()
        assert answer["choices"][0]["text"] == expected
        usage = answer["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] >= usage["prompt_tokens"] - 16
