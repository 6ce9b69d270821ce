"""One daemon with the embedded model for all tests of a module that leave it as they found it."""

from collections.abc import Iterator

import pytest

from tests.e2e.daemon import Daemon, daemon


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with daemon(tmp_path_factory.mktemp("served")) as running:
        yield running
