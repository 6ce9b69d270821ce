"""A flag of one value that is given twice: no value is dropped in silence."""

import pytest

from tiercel.cli.main import main


@pytest.mark.parametrize(
    ("words", "flag"),
    [
        ("plan --ctx 4k --device a100 --device h100", "--device is given twice, as a100 and h100"),
        ("plan --ctx=4k --ctx 8k --device a100", "--ctx is given twice, as 4k and 8k"),
        ("drain --port 1 --port 2", "--port is given twice, as 1 and 2"),
        ("chat --url http://a --url http://b", "--url is given twice, as http://a and http://b"),
    ],
)
def test_verbs_of_our_own_refuse_it(words: str, flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words.split()) == 2
    assert flag in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "flag"),
    [
        ("config show --json --port 1 --port 2", "--port is given twice, as 1 and 2: the last one is used"),
        (
            "config show --json --enable-prefix-caching --no-enable-prefix-caching",
            "--enable-prefix-caching is given twice, as true and false: the last one is used",
        ),
    ],
)
def test_flags_of_vllm_warn_and_the_last_one_counts(words: str, flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words.split()) == 0
    assert f"tiercel: warning: {flag}" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words", ["config show --json --port 1 --port 1", "config show --json --api-key a --api-key b"]
)
def test_equal_values_and_lists_are_no_repetition(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words.split()) == 0
    assert "twice" not in capsys.readouterr().err
