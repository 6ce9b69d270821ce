"""One daemon with the embedded model, shared by the tests of a module."""

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
    """The right answers by prompt."""
    return uncached_answers(tmp_path_factory.mktemp("plain"))
