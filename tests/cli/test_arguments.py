"""Parsing of command-line arguments."""

import pytest

from tiercel.cli.arguments import translate
from tiercel.errors import ConfigError
from tiercel.settings import SETTINGS
from tiercel.vllm_flags import HARMLESS, IN_GIB, REFUSED, RENAMED, SHORT


def translated(line: str) -> list[str]:
    return translate(line.split(), [])


def test_ordinary_lines_stay_as_they_are() -> None:
    for line in ("model --port 1 --dtype auto", "--port=1 model", "--help", "--async-scheduling=off"):
        assert translated(line) == line.split()


def test_switches_take_no_value_and_are_turned_off_with_no() -> None:
    assert translated("--enable-prefix-caching model") == ["--enable-prefix-caching=true", "model"]
    assert translated("--no-async-scheduling") == ["--async-scheduling=false"]


def test_underscores_are_dashes_in_flags_and_only_there() -> None:
    assert translated("my_model --max_num_seqs 4 --served_model_name=my_name") == [
        "my_model",
        "--max-num-seqs",
        "4",
        "--served-model-name=my_name",
    ]


@pytest.mark.parametrize("name", REFUSED)
def test_flags_that_do_not_act_are_refused_by_name(name: str) -> None:
    for line in (f"model --{name}", f"model --{name} x", f"--{name}=x", f"--{name.replace('-', '_')} x"):
        with pytest.raises(ConfigError) as caught:
            translated(line)
        assert caught.value.message == f"--{name} is not supported: {REFUSED[name]}"


@pytest.mark.parametrize("name", HARMLESS)
def test_harmless_flags_leave_the_line_with_a_warning_where_they_do_nothing(name: str) -> None:
    flag = HARMLESS[name]
    warnings: list[str] = []
    value = [flag.values[0] if flag.values else "8"] if flag.takes_value else []
    assert translate(["model", f"--{name}", *value, "--port", "1"], warnings) == ["model", "--port", "1"]
    assert warnings == ([f"--{name}: {flag.note}"] if flag.note else [])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("-tp 2", "--tensor-parallel-size 2 is not supported: one engine runs on one device"),
        ("--tensor-parallel-size=2", "--tensor-parallel-size 2 is not supported: one engine runs on one device"),
        (
            "--kv-offloading-backend lmcache",
            "--kv-offloading-backend lmcache is not supported: KV tiers are built in; see --kv-host-size",
        ),
    ],
)
def test_other_values_of_harmless_flags_are_refused(line: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        translated(line)
    assert caught.value.message == message


def test_old_spellings_act_and_warn() -> None:
    warnings: list[str] = []
    assert translate(["--disable-log-requests"], warnings) == ["--enable-log-requests=false"]
    assert warnings == ["--disable-log-requests is deprecated: write --no-enable-log-requests"]


@pytest.mark.parametrize(
    ("line", "size"),
    [
        ("--swap-space 4", "4GiB"),
        ("--swap_space=0.5", "0.5GiB"),
        ("--host-swap-space 512M", "512M"),
        ("--kv-offloading-size=2", "2GiB"),
    ],
)
def test_the_host_tier_has_the_names_that_vllm_gave_it_and_plain_numbers_are_gib(line: str, size: str) -> None:
    assert translated(f"model {line} --port 1") == ["model", f"--kv-host-size={size}", "--port", "1"]


def test_several_disk_folders_follow_one_flag() -> None:
    assert translated("model --kv-disk-path a b") == ["model", "--kv-disk-path", "a", "--kv-disk-path", "b"]


def test_several_keys_follow_one_flag_behind_the_model() -> None:
    assert translated("model --api-key a b --port 1") == [
        *("model", "--api-key", "a", "--api-key", "b"),
        *("--port", "1"),
    ]


def test_a_model_behind_a_key_does_not_become_a_key() -> None:
    assert translated("--api-key secret model") == ["--api-key", "secret", "model"]


def test_a_value_that_looks_like_a_refused_flag_is_a_value() -> None:
    assert translated("--root-path --enable-lora") == ["--root-path", "--enable-lora"]


def test_no_flag_is_both_ours_and_refused() -> None:
    ours = {option.key for option in SETTINGS.values()}
    assert not ours & (set(REFUSED) | set(HARMLESS) | set(RENAMED) | set(IN_GIB))
    assert set(IN_GIB.values()) <= ours
    assert not set(REFUSED) & set(HARMLESS)
    assert set(SHORT.values()) <= set(REFUSED) | set(HARMLESS) | ours
