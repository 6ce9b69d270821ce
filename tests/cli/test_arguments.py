"""Parsing of command-line arguments."""

import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from tiercel.cli.arguments import translate
from tiercel.settings.settings import SETTINGS
from tiercel.settings.vllm_flags import CONFIGS, HARMLESS, IN_GIB, OTHER_NAMES, REFUSED, RENAMED, SHORT, Harmless
from tiercel.values.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
SWITCHES = [name for name, flag in HARMLESS.items() if flag.takes == "nothing"]


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
    accepted = [*flag.same, *([] if flag.otherwise else ["8"])]
    for value in accepted:
        words = [f"--{'no-' * (value == 'false')}{name}"] if name in SWITCHES else [f"--{name}", value]
        warnings: list[str] = []
        assert translate(["model", *words, "--port", "1"], warnings) == ["model", "--port", "1"]
        assert warnings == ([] if value in flag.same else [f"{words[0]}: {flag.note}"])


@pytest.mark.parametrize("name", [name for name, flag in HARMLESS.items() if flag.otherwise])
def test_values_that_ask_for_something_else_are_refused_with_the_reason(name: str) -> None:
    flag = HARMLESS[name]
    words = [f"--{'no-' * ('true' in flag.same)}{name}"] if name in SWITCHES else [f"--{name}", "other"]
    with pytest.raises(ConfigError) as caught:
        translate(["model", *words, "--port", "1"], [])
    assert caught.value.message == f"{' '.join(words)} is not supported: {flag.otherwise}"


def _reasons() -> Iterator[tuple[str, str]]:
    yield from REFUSED.items()
    for name, part in [
        *HARMLESS.items(),
        *((f"{a}.{b}", part) for a, keys in CONFIGS.items() for b, part in keys.items()),
    ]:
        yield name, part.otherwise
        yield name, part.note if isinstance(part, Harmless) else f"--{part.flag}"


def test_every_flag_and_page_that_a_reason_names_exists() -> None:
    flags = {option.flag for option in SETTINGS.values()}
    for name, reason in _reasons():
        assert set(re.findall(r"--[a-z][a-z-]+", reason)) <= flags, name
        assert all((ROOT / page).is_file() for page in re.findall(r"docs/[a-z-]+\.md", reason)), name
        assert "yet" not in reason.split(), name


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("-tp 2", f"--tensor-parallel-size 2 is not supported: {HARMLESS['tensor-parallel-size'].otherwise}"),
        ("--tensor-parallel-size=2", f"--tensor-parallel-size 2 is not supported: {HARMLESS['nnodes'].otherwise}"),
        ("--runner draft", f"--runner draft is not supported: {HARMLESS['runner'].otherwise}"),
        (
            "--speculative-config.method eagle",
            f"--speculative-config.method eagle is not supported: {REFUSED['speculative-model']}",
        ),
        (
            "--kv-transfer-config.kv_role both",
            f"--kv-transfer-config.kv_role is not supported: {REFUSED['kv-transfer-config']}",
        ),
        (
            "--structured-outputs-config.nonsense 1",
            "--structured-outputs-config.nonsense is not supported: known keys are "
            + ", ".join(CONFIGS["structured-outputs-config"]).replace("-", "_"),
        ),
        (
            "--structured-outputs-config x",
            "--structured-outputs-config 'x': expected a JSON object, or keys such as --structured-outputs-config.KEY",
        ),
        ("--structured-outputs-config.backend", "--structured-outputs-config.backend: expected a value"),
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


@pytest.mark.parametrize(
    "line",
    [
        "-tp 1 -pp 1 -dp 1 --nnodes 1 --distributed-executor-backend mp",
        "--calculate-kv-scales",
        "--task embed",
        "--task score",
        "--runner pooling --convert embed",
        "--cpu-offload-gb 4",
        "--guided-decoding-backend xgrammar",
        "--enable-auto-tool-choice --enable-chunked-prefill",
        "--no-trust-remote-code --no-enable-lora --no-headless",
        "--revision main --tokenizer-mode auto --config-format hf",
        "--compilation-config 3 --max-seq-len-to-capture 8192",
        "--disable-log-stats --disable-uvicorn-access-log --uvicorn-log-level warning",
        "--num-scheduler-steps 8 --use-v2-block-manager",
        "--limit-mm-per-prompt image=0",
    ],
)
def test_lines_of_vllm_that_are_served_lose_their_idle_flags(line: str) -> None:
    """The tables are checked against lines as people write them: a row that moves to another table is noticed."""
    assert translated(f"model {line}") == ["model"]


@pytest.mark.parametrize(
    "line",
    [
        *("-tp 2", "-pp 2", "-dp 2", "-dcp 2", "--nnodes 2", "--headless", "--enable-expert-parallel"),
        *("--trust-remote-code", "--enable-lora", "--lora-modules a=b", "--enable-prompt-embeds"),
        *("--speculative-model draft", "-sc.method eagle", "--kv-transfer-config {}", "--hf-overrides {}"),
        *("--task classify", "--runner draft", "--convert classify", "--revision v2", "--tokenizer-mode mistral"),
        *("--middleware a.b", "--scheduler-cls a.b", "--worker-cls a.b", "--logits-processors a.b"),
        *("--logprobs-mode processed_logits", "--enable-sleep-mode", "--skip-tokenizer-init", "--response-role user"),
        *("--no-enable-chunked-prefill", "--no-enable-auto-tool-choice", "--ssl-ca-certs ca.pem"),
        *("--guided-decoding-disable-any-whitespace", "--api-server-count 2", "--allowed-local-media-path /"),
    ],
)
def test_lines_of_vllm_that_would_change_the_outcome_are_refused(line: str) -> None:
    with pytest.raises(ConfigError, match="is not supported: "):
        translated(f"model {line}")


def test_short_spellings_stand_for_the_long_ones() -> None:
    assert translated("model -q awq") == ["model", "--quantization", "awq"]


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


@pytest.mark.parametrize(
    ("line", "names", "model"),
    [
        ("model --served-model-name a b c", "a b c", "model"),
        ("--served-model-name a b c --port 1", "a b c", ""),
        ("--served-model-name a b c --model m", "a b c", "m"),
        ("--model m --served-model-name a b c", "a b c", "m"),
        ("--served_model_name a b org/name", "a b", "org/name"),
        ("--served-model-name a .", "a", "."),
        ("--model m --served-model-name a org/name", "a org/name", "m"),
        ("--served-model-name org/name --port 1", "org/name", ""),
    ],
)
def test_the_names_of_a_model_follow_one_flag(line: str, names: str, model: str) -> None:
    found = translated(line)
    assert [name for flag, name in pairwise(found) if flag == "--served-model-name"] == names.split()
    assert (model in found) == bool(model)


@pytest.mark.parametrize(
    ("line", "words", "warnings"),
    [
        ("--structured-outputs-config.backend guidance", "", 0),
        ("--structured-outputs-config.backend=xgrammar", "", 1),
        ("--guided-decoding-backend outlines", "", 1),
        ('--structured-outputs-config {"backend":"auto","reasoning_parser":"qwen3"}', "--reasoning-parser=qwen3", 0),
        ("--structured-outputs-config.reasoning_parser qwen3", "--reasoning-parser=qwen3", 0),
        ("--structured_outputs_config.disable_any_whitespace false", "", 0),
        ('--pooler-config {"pooling_type":"MEAN","normalize":true,"dimensions":null}', "--pooling=mean", 0),
        ("--override-pooler-config.pooling_type LAST", "--pooling=last", 0),
        (
            '-sc {"method":"ngram","num_speculative_tokens":4,"prompt_lookup_max":3}',
            "--prompt-lookup-num-tokens=4",
            1,
        ),
        ("-O3", "", 1),
        ("-O.mode=3", "", 1),
        ("--hf-token --enforce-eager", "--enforce-eager=true", 1),
        ("--cuda-graph-sizes 1 2 4 --enforce-eager", "--enforce-eager=true", 1),
    ],
)
def test_flags_that_hold_an_object_are_decided_key_by_key(line: str, words: str, warnings: int) -> None:
    told: list[str] = []
    assert translate(["model", *line.split()], told) == ["model", *words.split()]
    assert len(told) == warnings


def test_dotted_keys_of_our_own_objects_make_one_object() -> None:
    found = translated("model --override-generation-config.top_p 0.5 --port 1 --override_generation_config.top_k=3")
    assert found == ["model", "--port", "1", '--override-generation-config={"top_p": 0.5, "top_k": 3}']


def test_a_model_behind_a_key_does_not_become_a_key() -> None:
    assert translated("--api-key secret model") == ["--api-key", "secret", "model"]


def test_a_switch_with_a_shorter_name_here_is_known_by_that_of_vllm() -> None:
    assert translated("--enable-tokenizer-info-endpoint") == ["--tokenizer-info-endpoint=true"]
    assert translated("--enable_tokenizer_info_endpoint") == ["--tokenizer-info-endpoint=true"]


def test_a_value_that_looks_like_a_refused_flag_is_a_value() -> None:
    assert translated("--root-path --enable-lora") == ["--root-path", "--enable-lora"]


def test_no_flag_is_both_ours_and_refused() -> None:
    ours = {option.key for option in SETTINGS.values()}
    theirs = [*REFUSED, *HARMLESS, *CONFIGS, *OTHER_NAMES, *RENAMED, *IN_GIB]
    assert not ours & set(theirs)
    assert len(theirs) == len(set(theirs))
    assert set(IN_GIB.values()) <= ours
    assert set(OTHER_NAMES.values()) <= set(CONFIGS) | ours
    assert set(SHORT.values()) <= set(theirs) | ours
