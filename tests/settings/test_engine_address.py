"""Addresses of engines."""

import pytest

from tiercel.settings.engine_address import (
    DEFAULT_PORT,
    EngineAddress,
    EngineSource,
    read_address,
    read_engine_list,
    read_engines,
)
from tiercel.values.errors import ConfigError


def test_lists_and_names_are_read() -> None:
    assert read_engines("static:10.0.0.1:8100,[::1]:81,engine-2.fleet:82").addresses == (
        EngineAddress("10.0.0.1", 8100),
        EngineAddress("::1", 81),
        EngineAddress("engine-2.fleet", 82),
    )
    assert read_engines("dns:engines").addresses == (EngineAddress("engines", DEFAULT_PORT, is_name=True),)
    assert read_engines("dns:engines:9000").addresses == (EngineAddress("engines", 9000, is_name=True),)
    assert read_engines("file:/run/engines") == EngineSource(path="/run/engines")
    assert [str(read_address(text, "--listen", 0)) for text in ("[::1]:81", "a:0")] == ["[::1]:81", "a:0"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected static:HOST:PORT"),
        ("static:", "expected static:HOST:PORT"),
        ("ray", "expected static:HOST:PORT"),
        ("file:", "or file:PATH"),
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


def test_a_file_has_an_address_a_line() -> None:
    text = "# engines of rack 1\n\n  10.0.0.1:8100 \n[::1]:81\n"
    assert read_engine_list(text, "engines") == (EngineAddress("10.0.0.1", 8100), EngineAddress("::1", 81))
    assert read_engine_list("", "engines") == ()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("10.0.0.1", "rack 10.0.0.1: expected HOST:PORT"),
        ("a:1\na:1", "rack: the same address twice"),
        ("\n".join(f"a:{port}" for port in range(1, 70)), "rack: 69 engines, at most 64"),
    ],
)
def test_wrong_files_are_named(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        read_engine_list(text, "rack")
    assert message in raised.value.message
