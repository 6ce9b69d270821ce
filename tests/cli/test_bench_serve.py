"""The flags of `tiercel bench serve`, as people type them."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.loadtest.builders import log_of, stub_server
from tiercel.cli.bench_serve import spell_out
from tiercel.cli.main import main
from tiercel.loadtest.settings import BenchSettings
from tiercel.settings.option import flag_name

# What load-test users know, with the defaults that they know.
_KNOWN = """
--backend --base-url --host --port --endpoint --header --model --served-model-name --tokenizer --dataset-name
--dataset-path --no-stream --max-concurrency --request-rate --burstiness --ramp-up-strategy --ramp-up-start-rps
--ramp-up-end-rps --num-prompts --num-warmups --input-len --output-len --random-input-len --random-output-len
--random-range-ratio --random-prefix-len --prefix-repetition-prefix-len
--prefix-repetition-suffix-len --prefix-repetition-num-prefixes --prefix-repetition-output-len --sharegpt-output-len
--custom-output-len --seed --logprobs --ignore-eos --temperature --top-p --top-k --extra-body --percentile-metrics
--metric-percentiles --goodput --request-id-prefix --save-result --save-detailed --append-result --metadata
--result-dir --result-filename --ready-check-timeout-sec --disable-tqdm --profile --insecure
"""


def test_every_flag_that_load_test_users_know_is_there() -> None:
    assert set(_KNOWN.split()) <= {flag_name(name) for name in BenchSettings.__struct_fields__}


def test_many_valued_flags_and_underscores_are_spelled_out() -> None:
    warnings: list[str] = []
    words = ["--goodput", "ttft:500", "tpot:60", "--num_prompts", "3", "--metadata=a=b", "--header", "x=y"]
    assert list(spell_out(words, warnings)) == [
        "--goodput", "ttft:500", "--goodput", "tpot:60", "--num-prompts", "3", "--metadata=a=b", "--header", "x=y",
    ]  # fmt: skip
    assert warnings == []


def test_flags_that_do_nothing_are_dropped_with_a_warning() -> None:
    warnings: list[str] = []
    words = ["--trust-remote-code", "--tokenizer-mode", "auto", "--seed", "3"]
    assert list(spell_out(words, warnings)) == ["--seed", "3"]
    assert [line.partition(" is ignored:")[0] for line in warnings] == ["--trust-remote-code", "--tokenizer-mode"]


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--num-prompts", "many"], "--num-prompts"),
        (["--goodput", "speed:3"], "--goodput speed:3"),
        (["--dataset-name", "none"], "none"),
        (["--tenants", "none.yaml"], "none.yaml"),
        (["--tenants", "none.yaml", "--sonnet-input-len", "9"], "--sonnet-input-len: with --tenants"),
        (["--tenants", "none.yaml", "--on-sec", "9"], "--on-sec: with --tenants"),
        (["--isolation"], "--isolation"),
        (["--random-batch-size", "2"], "--random-batch-size is not supported: every request has one prompt"),
        (["--random_batch_size=1"], "--random-batch-size is not supported"),
    ],
)
def test_a_wrong_flag_is_one_line_and_exit_code_2(
    words: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "serve", *words]) == 2
    assert complaint in capsys.readouterr().err


def test_a_run_prints_the_report_and_writes_the_result_without_keys(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "result.json"
    with stub_server("--default", "first=50 gap=50 tokens=3") as url:
        words = [
            "bench", "serve", "--base-url", url, "--num-prompts", "4", "--request-rate", "40",
            "--random-input-len", "8",
            "--goodput", "ttft:5000", "tpot:900", "--save-result", "--result-filename", str(path),
            "--metadata", "gpu=none",
            "--api-key", "sk-secret", "--header", "x-more=secret", "--percentile-metrics", "ttft,itl",
            "--metric-percentiles", "50,99",
        ]  # fmt: skip
        monkeypatch.setattr(sys, "argv", ["tiercel", *words])
        assert main(words) == 0
    report = capsys.readouterr().out
    assert " Serving Benchmark Result ".center(50, "=") in report
    assert "Successful requests:                     4" in report
    for row in ("Request goodput (req/s):", "P50 TTFT (ms):", "P99 ITL (ms):", "Saturated:", "P99 TTFT due (ms):"):
        assert row in report
    assert "TPOT" not in report
    text = path.read_text(encoding="utf-8")
    assert "secret" not in text
    assert json.loads(text)["gpu"] == "none"
    assert json.loads(text)["command"][:3] == ["tiercel", "bench", "serve"]


@pytest.mark.slow
def test_ctrl_c_ends_the_run_and_partial_results_are_reported(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    with stub_server("--default", "first=50 gap=50") as url:
        words = [
            "bench", "serve", "--base-url", url, "--num-prompts", "400", "--max-concurrency", "2",
            "--random-input-len", "5", "--random-output-len", "4", "--save-result", "--result-filename", str(path),
        ]  # fmt: skip
        command = [sys.executable, "-c", "import sys; from tiercel.cli.main import main; sys.exit(main())", *words]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            while len(log_of(url)) < 8:
                time.sleep(0.05)
            process.send_signal(signal.SIGINT)
            report, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert "note: stopped by the user before its end" in report
    result = json.loads(path.read_text(encoding="utf-8"))
    assert result["completed"] >= 4
    assert result["failed"] <= 2
