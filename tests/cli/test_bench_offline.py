"""`tiercel bench throughput` and `latency`, from their flags to their files."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from tests.seeds import fast_and_slow
from tiercel.cli.bench import bench_app
from tiercel.cli.main import main
from tiercel.loadtest.load.request_list import read_requests
from tiercel.settings.option import flag_name
from tiercel.settings.settings import SETTINGS

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "eos_token_id": 2,
    "dtype": "float32",
}
# One thread, no measuring of steps: what these tests look at does not depend on it.
ENGINE = ["--load-format", "dummy", "--threads", "1", "--calibration-seconds", "0", "--device", "cpu"]
SMALL = ["--input-len", "20", "--output-len", "6", "--num-prompts", "5"]


@pytest.fixture(autouse=True)
def process_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The verb sets the variables of a process that computes; nothing of that outlives a test."""
    for name in ("OMP_NUM_THREADS", "GOMP_SPINCOUNT"):
        monkeypatch.setenv(name, "1")
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def model(tmp_path: Path) -> str:
    """A folder with nothing but a config.json."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return str(folder)


def throughput(model: str, *words: str) -> dict[str, Any]:
    """The JSON of a run."""
    assert main(["bench", "throughput", model, *ENGINE, *words, "--output-json", "out.json"]) == 0
    return json.loads(Path("out.json").read_text())


def refused(model: str, *words: str, capsys: pytest.CaptureFixture[str], verb: str = "throughput") -> str:
    """The one line of a run that is refused before it begins."""
    assert main(["bench", verb, model, *ENGINE, *words]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    return line


def test_a_folder_with_nothing_but_a_config_is_measured(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = throughput(model, *SMALL)
    captured = capsys.readouterr()
    assert captured.err == ""  # no bar where there is no terminal
    assert captured.out.startswith("Throughput: ")
    assert "Total num prompt tokens:  100\nTotal num output tokens:  30\n" in captured.out
    assert "host not waiting" in captured.out
    assert found["schema_version"] == 1
    assert (found["kind"], found["engine"], found["model_id"]) == ("throughput", "tiercel", model)
    assert (found["num_requests"], found["total_prompt_tokens"], found["total_output_tokens"]) == (5, 100, 30)
    assert found["total_num_tokens"] == 130
    assert found["tokens_per_second"] == pytest.approx(130 / found["elapsed_time"])
    assert found["output_tokens_per_second"] == pytest.approx(30 / found["elapsed_time"])
    assert found["requests_per_second"] == pytest.approx(5 / found["elapsed_time"])
    facts = found["facts"]
    assert (facts["device"], facts["dtype"], facts["vocab_size"]) == ("cpu", "float32", 300)
    assert not found["settings"]["enable_prefix_caching"]
    assert found["counters"]["prefix_hits"] == 0
    assert {"tiercel", "python", "torch"} <= found["versions"].keys()


def test_the_time_of_the_loop_is_reported_in_parts(model: str) -> None:
    steps = throughput(model, *SMALL)["steps"]
    shares = steps["shares"]
    assert shares.keys() == {"planning", "launching", "waiting", "committing", "idle"}
    assert sum(shares.values()) == pytest.approx(1.0, abs=1e-6)
    assert steps["host_share"] == pytest.approx(shares["planning"] + shares["launching"] + shares["committing"])
    assert steps["count"] >= 6
    assert 0 < steps["host_ms"]["median"] <= steps["host_ms"]["p99"]
    assert 0 < steps["device_share"] <= 1


@pytest.mark.slow
def test_a_saved_list_is_sent_again_unchanged(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    saved = throughput(model, *SMALL, "--random-range-ratio", "0.5", "--seed", "3", "--save-requests", "list.jsonl")
    requests = read_requests(Path("list.jsonl"))
    assert sum(len(request.prompt_token_ids) for request in requests) == saved["total_prompt_tokens"]
    again = throughput(model, "--requests", "list.jsonl", "--temperature", "1")
    assert again["requests_sha256"] == saved["requests_sha256"]
    assert again["total_output_tokens"] == saved["total_output_tokens"]
    assert throughput(model, "--requests", "list.jsonl", "--num-prompts", "2")["num_requests"] == 2
    capsys.readouterr()
    line = refused(model, "--requests", "list.jsonl", "--input-len", "3", capsys=capsys)
    assert "--input-len: cannot be combined with --requests, whose file defines the requests" in line


@pytest.mark.slow
def test_the_prefix_cache_is_on_if_enabled(model: str) -> None:
    words = ("--random-prefix-len", "64", "--num-warmups", "0", *SMALL, "--max-num-seqs", "1")
    assert throughput(model, *words)["counters"]["prefix_hits"] == 0
    assert throughput(model, *words, "--enable-prefix-caching")["counters"]["prefix_hits"] == 4 * 64
    Path("tiercel.toml").write_text("enable-prefix-caching = true\n")
    assert throughput(model, *words)["counters"]["prefix_hits"] == 4 * 64
    assert throughput(model, *words, "--no-enable-prefix-caching")["counters"]["prefix_hits"] == 0


def test_there_is_no_goal_between_tokens_by_default(
    model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert throughput(model, *SMALL, "--disable-detokenize")["settings"]["tbt_goal_s"] == 0
    assert "warning: --disable-detokenize" in capsys.readouterr().err
    monkeypatch.setenv("TIERCEL_TBT_GOAL", "0.5")
    assert throughput(model, *SMALL)["settings"]["tbt_goal_s"] == 0.5


def test_an_ssd_tier_brings_the_prefix_cache_that_it_needs(model: str) -> None:
    found = throughput(model, *SMALL, "--kv-disk-path", "kv", "--kv-disk-size", "4M")
    assert found["settings"]["enable_prefix_caching"]


def test_latency_reports_percentiles_of_batch_first_token_and_other_tokens(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--input-len", "12", "--output-len", "4", "--batch-size", "3", "--num-iters-warmup", "1"]
    assert main(["bench", "latency", model, *ENGINE, *words, "--num-iters", "4", "--output-json", "out.json"]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    assert printed.out.startswith("Avg latency: ")
    assert "99% percentile latency: " in printed.out
    found = json.loads(Path("out.json").read_text())
    assert (found["kind"], found["batch_size"], found["input_len"], found["output_len"]) == ("latency", 3, 12, 4)
    assert len(found["latencies"]) == 4
    for name in ("percentiles", "ttft_ms", "tpot_ms"):
        values = [found[name][rank] for rank in ("10", "25", "50", "75", "90", "99")]
        assert values == sorted(values) and values[0] > 0
    assert found["percentiles"]["99"] <= max(found["latencies"])
    assert found["avg_latency"] == pytest.approx(sum(found["latencies"]) / 4)
    assert found["ttft_ms"]["50"] / 1e3 < found["percentiles"]["50"]


def test_answers_of_one_token_have_no_time_between_tokens(model: str) -> None:
    words = ["--output-len", "1", "--num-iters", "1", "--num-iters-warmup", "0", "--output-json", "out.json"]
    assert main(["bench", "latency", model, *ENGINE, *words]) == 0
    assert json.loads(Path("out.json").read_text())["tpot_ms"] == {}


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--input-len", "250", "--output-len", "7"], "250 tokens of input and 7 of output are 257, over 256"),
        (["--max-model-len", "64", "--input-len", "60", "--output-len", "5"], "over 64: the model's limit or --max"),
        (["--num-gpu-blocks-override", "2", "--input-len", "30", "--output-len", "9"], "KV pool of 2 blocks of 16"),
        (["--input-len", "0"], "--input-len 0: must be at least 1"),
        (["--input-len", "many"], "--input-len"),
        (["--num-prompts", "0"], "--num-prompts"),
        (["--num-warmups", "-1"], "--num-warmups"),
        (["--temperature", "3"], "--temperature"),
        (["--random-range-ratio", "1"], "range_ratio"),
        (["--random-prefix-len", "-1"], "prefix_len"),
        (["--dataset-name", "multi_turn"], "--dataset-name multi_turn"),
        (["--dataset-name", "sharegpt"], "dataset sharegpt needs a path"),
        (["--dataset-name", "sonnet"], "no tokenizer.json"),
        (["--requests", "none.jsonl"], "--requests none.jsonl: No such file"),
        (["--output-json", "none/out.json"], "--output-json none/out.json"),
        (["--save-requests", "."], "--save-requests ."),
        (["--port", "1"], "--port (see tiercel bench throughput --help)"),
        (["--tensor-parallel-size", "2"], "--tensor-parallel-size"),
        (["--max-num-seqs", "0"], "--max-num-seqs"),
    ],
)
def test_invalid_options_give_one_line_that_names_them(
    words: list[str], complaint: str, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert complaint in refused(model, *words, capsys=capsys)


def test_a_batch_that_does_not_run_together_is_refused(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    line = refused(model, "--batch-size", "9", "--max-num-seqs", "8", capsys=capsys, verb="latency")
    assert "--batch-size 9 exceeds --max-num-seqs 8" in line


def test_a_broken_line_and_a_foreign_token_are_named(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("list.jsonl").write_text('{"prompt_token_ids": [1, 300], "output_len": 1}\n')
    assert "request 1: token id 300 is over the model's 300 tokens" in refused(
        model, "--requests", "list.jsonl", capsys=capsys
    )
    Path("list.jsonl").write_text('{"prompt_token_ids": [1], "output_len": 1}\n{"prompt": "hello"}\n')
    assert "--requests list.jsonl line 2" in refused(model, "--requests", "list.jsonl", capsys=capsys)


def test_every_engine_flag_of_serve_is_there_and_none_of_http() -> None:
    group = typer.main.get_command(bench_app("all", has_flags=True))
    assert isinstance(group, typer.core.TyperGroup)
    for verb in ("throughput", "latency"):
        flags = {option for parameter in group.commands[verb].params for option in parameter.opts}
        wanted = {
            "model",
            "dtype",
            "load_format",
            "max_num_seqs",
            "kv_host_size",
            "attention_backend",
            "seed",
            "threads",
        }
        assert {flag_name(name) for name in wanted} <= flags
        assert not {"--host", "--api-key", "--max-body-bytes", "--max-num-queued-reqs"} & flags
        engine = {flag_name(name) for name in SETTINGS} & flags
        assert len(engine) > 30


@pytest.mark.parametrize("shown", fast_and_slow([b"0/1500"], [b"warming up"]))
@pytest.mark.sampled(1)
@pytest.mark.slow
def test_ctrl_c_ends_it_with_130_and_no_traceback(model: str, shown: bytes) -> None:
    """On a terminal, with its progress bar; also where the tests themselves run with Ctrl-C ignored."""
    heard = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    program = f"{heard}; import sys; from tiercel.cli.main import main; sys.exit(main())"
    command = [sys.executable, "-c", program, "bench", "throughput"]
    words = [model, *ENGINE, "--num-prompts", "1500", "--input-len", "50", "--output-len", "200"]
    watching, terminal = os.openpty()
    environment = {
        **os.environ,
        "TERM": "xterm",
        "COLUMNS": "120",
        "PYTHONPATH": str(Path(__file__).resolve().parents[2]),
    }
    process = subprocess.Popen([*command, *words], stdout=subprocess.PIPE, stderr=terminal, env=environment, text=True)
    os.close(terminal)
    try:
        seen = b""
        while shown not in seen:
            seen += os.read(watching, 4096)
        process.send_signal(signal.SIGINT)
        reported, _ = process.communicate(timeout=60)
        while chunk := _read(watching):
            seen += chunk
        assert process.returncode == 130, seen.decode(errors="replace")
        assert reported == ""
        assert b"Traceback" not in seen
    finally:
        process.kill()
        process.wait()
        os.close(watching)


def _read(terminal: int) -> bytes:
    """Return the remaining output; reading a terminal without writers raises an error."""
    try:
        return os.read(terminal, 4096)
    except OSError:
        return b""
