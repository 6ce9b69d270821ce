"""One daemon with the embedded model for all tests of a module that leave it as they found it."""

from collections.abc import Iterator

import pytest

from tests.e2e.daemon import Daemon, daemon
from tests.e2e.prompts import uncached_answers


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with daemon(tmp_path_factory.mktemp("served")) as running:
        yield running


@pytest.fixture(scope="session")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What is right, by prompt."""
    return uncached_answers(tmp_path_factory.mktemp("plain"))
