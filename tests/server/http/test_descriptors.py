"""The number of connections that the limit on file descriptors allows."""

import resource
from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.server.harness import server_settings
from tiercel.server.http.descriptors import max_connections
from tiercel.values.errors import ConfigError


def test_connections_leave_descriptors_for_everything_else(model_folder: Path) -> None:
    settings = server_settings(model_folder)
    assert max_connections(settings, 256) == 160
    assert max_connections(settings, 1024) == 928
    assert max_connections(settings, 1_000_000) == 8192
    assert max_connections(settings, resource.RLIM_INFINITY) == 8192
    assert max_connections(replace(settings, max_connections=20), 256) == 20
    assert max_connections(replace(settings, max_connections=20_000), 65_536) == 20_000


def test_a_limit_that_is_too_low_is_named_with_the_remedy(model_folder: Path) -> None:
    settings = server_settings(model_folder)
    with pytest.raises(ConfigError, match=r"limit of 100 file descriptors leaves 4 .* to at least 112"):
        max_connections(settings, 100)
    with pytest.raises(ConfigError, match=r"--max-connections 200 is too many: .* leaves 160 .* to at least 296"):
        max_connections(replace(settings, max_connections=200), 256)
