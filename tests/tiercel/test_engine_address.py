"""Addresses of engines."""

import pytest

from tiercel.engine_address import DEFAULT_PORT, EngineAddress, read_address, read_engines
from tiercel.errors import ConfigError


def test_lists_and_names_are_read() -> None:
    assert read_engines("static:10.0.0.1:8100,[::1]:81,engine-2.fleet:82") == (
        EngineAddress("10.0.0.1", 8100),
        EngineAddress("::1", 81),
        EngineAddress("engine-2.fleet", 82),
    )
    assert read_engines("dns:engines") == (EngineAddress("engines", DEFAULT_PORT, is_name=True),)
    assert read_engines("dns:engines:9000") == (EngineAddress("engines", 9000, is_name=True),)
    assert [str(read_address(text, "--listen", 0)) for text in ("[::1]:81", "a:0")] == ["[::1]:81", "a:0"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected static:HOST:PORT"),
        ("static:", "expected static:HOST:PORT"),
        ("ray", "expected static:HOST:PORT"),
        ("static:a", "--engines a: expected HOST:PORT"),
        ("static:a:1,a:1", "the same address twice"),
        ("static:a:0", "expected HOST:PORT"),
        ("static:a:70000", "a port up to 65535"),
        ("static:::1:80", "expected HOST:PORT"),
        ("dns:", "expected dns:NAME"),
        ("dns:a b", "expected dns:NAME"),
        ("static:" + ",".join(f"a:{port}" for port in range(1, 70)), "69 engines, at most 64"),
    ],
)
def test_wrong_lists_are_named(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        read_engines(text)
    assert message in raised.value.message
