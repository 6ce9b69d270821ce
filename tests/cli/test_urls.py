"""Every verb that takes the URL of a server refuses one at which no server can be, before it calls."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from tests.addresses import IMPOSSIBLE_URLS
from tiercel.cli.flags import COMMON
from tiercel.cli.main import build_app, main
from tiercel.loadtest.settings import BenchSettings
from tiercel.values.errors import ConfigError

_FLAGS = ("--url", "--base-url")
_KEY = ["--admin-key", "k"]


PROGRAM = get_command(build_app(COMMON))


def _verbs() -> dict[tuple[str, ...], str]:
    """Return every verb with a flag for a URL, and the flag."""

    def walk(command: object, words: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], str]]:
        if isinstance(command, TyperGroup):
            for name, verb in command.commands.items():
                yield from walk(verb, (*words, name))
            return
        assert isinstance(command, TyperCommand)
        for option in command.params:
            yield from ((words, flag) for flag in option.opts if flag in _FLAGS)

    return dict(walk(PROGRAM, ()))


VERBS = _verbs()
OTHERS: dict[tuple[str, ...], list[str]] = {
    ("run-batch",): ["-i", "IN", "-o", "OUT"],
    ("tenants", "set"): ["IN", *_KEY],
    ("config", "set"): ["max-num-seqs=3", *_KEY],
    ("bench", "sweep"): ["--goodput", "ttft:500"],
    **dict.fromkeys([("tenants", "list"), ("config", "get"), ("config", "reload")], _KEY),
}


def test_the_verbs_with_a_url_are_found() -> None:
    assert {"chat", "run-batch", "tenants", "config", "bench"} <= {words[0] for words in VERBS}


@pytest.mark.parametrize("words", VERBS, ids=" ".join)
def test_an_impossible_address_is_refused_before_a_call(words: tuple[str, ...], tmp_path: Path) -> None:
    source = tmp_path / "in"
    source.write_text("{}\n")
    paths = {"IN": str(source), "OUT": str(tmp_path / "out")}
    others = [paths.get(word, word) for word in OTHERS.get(words, [])]
    for url, reason in IMPOSSIBLE_URLS.items():
        if not url:
            continue  # some verbs refuse an empty text for any flag
        with pytest.raises(ConfigError) as raised:
            PROGRAM.main([*words, f"{VERBS[words]}={url}", *others], "tiercel", standalone_mode=False)
        assert raised.value.message.startswith(f"{VERBS[words]} ") and reason in raised.value.message


def test_the_refusal_is_one_line_and_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", "--url", "http://ex..ample"]) == 2
    line = (
        "tiercel: error: --url http://ex..ample: 'ex..ample' is no host name: it has an empty part between its dots\n"
    )
    assert capsys.readouterr().err == line


@pytest.mark.parametrize(("host", "port"), [("ex..ample", 80), ("a b", 80), ("localhost", 0), ("localhost", 65_536)])
def test_a_host_and_port_of_the_load_test_are_read_as_a_url(host: str, port: int) -> None:
    with pytest.raises(ConfigError, match="--host and --port"):
        _ = BenchSettings(host=host, port=port).root_url
    assert BenchSettings(host="::1", port=81).root_url == "http://[::1]:81"
