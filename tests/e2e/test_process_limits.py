"""The real daemon under limits of its process: it serves, or it ends with one line that names the limit."""

import re
from pathlib import Path

import pytest

from tests.e2e.daemon import daemon
from tests.e2e.prompts import ONE_THREAD

pytestmark = pytest.mark.slow

MIB = 1 << 20
_LINE = re.compile("tiercel: .*(RLIMIT_AS|RLIMIT_DATA|RLIMIT_FSIZE|file descriptors|control group).*")


@pytest.mark.parametrize(
    ("option", "limit", "serves"),
    [
        ("as", 300 * MIB, False),
        ("as", 900 * MIB, None),
        ("as", 1200 * MIB, True),
        ("as", 4096 * MIB, True),
        ("data", 100 * MIB, False),
        ("data", 800 * MIB, True),
        ("fsize", 1000, False),
        ("fsize", MIB, False),
        ("fsize", 16 * MIB, True),
        ("nofile", 64, False),
        ("nofile", 256, True),
    ],
)
def test_a_limit_is_obeyed_or_named(option: str, limit: int, serves: bool | None, tmp_path: Path) -> None:
    """`serves` is None where it depends on the machine: on its number of cores and its libraries."""
    under = ("prlimit", f"--{option}={limit}")
    with daemon(tmp_path, *ONE_THREAD, under=under, wait=False) as running:
        try:
            running.wait_ready()
        except AssertionError:
            assert not serves
            assert running.process.wait(120) in (2, 3)
            *_, last = running.log.read_text().splitlines()
            assert _LINE.fullmatch(last), last
            return
        assert serves is not False
        assert running.chat("Hello", max_tokens=5).status_code == 200
        assert running.stop() == 0
