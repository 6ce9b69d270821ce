"""A metrics page shared by all tests of this folder."""

from pathlib import Path

import pytest

from tests.observability.page import read_page
from tests.server.conftest import model_folder  # noqa: F401 - a fixture


@pytest.fixture(scope="session")
def page(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> str:  # noqa: F811 - that fixture
    return read_page(model_folder, tmp_path_factory.mktemp("observability"))
