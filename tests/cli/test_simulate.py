"""The verb from its flags to its files."""

import json
from pathlib import Path

import pytest

from tiercel.cli.main import main

SHORT = ["simulate", "--duration", "3", "--rate", "6", "--tenants", "3", "--input-len", "60", "--output-len", "10"]


def test_figures_are_printed_and_written_the_same_for_one_seed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("one", "two"):
        assert main([*SHORT, "--json", str(tmp_path / name)]) == 0
    assert "Jain index" in capsys.readouterr().out
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
    found = json.loads((tmp_path / "one").read_text())
    assert len(found["tenants"]) == 3
    assert found["gap_s"] <= found["gap_bound_s"]


def test_a_workload_file_names_tenants_and_how_they_ask(tmp_path: Path) -> None:
    file = tmp_path / "work.yaml"
    file.write_text(
        "tenants:\n"
        "  - {name: chat, count: 2, weight: 2, slo: {ttft_s: 1},"
        " arrivals: {process: markov, rate: 4, on_s: 1, off_s: 1}}\n"
        "  - {name: nightly, band: 3, arrivals: {process: gamma, rate: 2, burstiness: 0.5}, lengths: {input_len: 90}}\n"
    )
    out = tmp_path / "out.json"
    assert main(["simulate", "--workload", str(file), "--duration", "5", "--json", str(out)]) == 0
    tenants = json.loads(out.read_text())["tenants"]
    assert [tenant["name"] for tenant in tenants] == ["chat-0", "chat-1", "nightly"]
    assert tenants[2]["band"] == 3


def test_a_mooncake_trace_keeps_lengths_and_shares_its_blocks_of_512_tokens(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": 1000 * number, "input_length": 1100, "output_length": 5, "hash_ids": [1, 2, 10 + number]}
        for number in range(4)
    ]
    file.write_text("\n".join(map(json.dumps, lines)))
    out = tmp_path / "out.json"
    assert main(["simulate", "--trace", str(file), "--tenants", "2", "--json", str(out)]) == 0
    found = json.loads(out.read_text())
    assert sum(tenant["prompt_tokens"] for tenant in found["tenants"]) == 4400
    assert found["hit_rate"] == pytest.approx(3 * 1024 / 4400)


def test_a_trace_of_other_blocks_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text(json.dumps({"timestamp": 0, "input_length": 1100, "output_length": 5, "hash_ids": list(range(69))}))
    assert main(["simulate", "--trace", str(file)]) == 2
    assert "512 tokens" in capsys.readouterr().err


def test_burstgpt_times_and_lengths_are_taken(tmp_path: Path) -> None:
    file = tmp_path / "trace.csv"
    file.write_text("Timestamp,Model,Request tokens,Response tokens\n5,GPT-4,100,7\n6,GPT-4,50,3\n7,GPT-4,50,0\n")
    out = tmp_path / "out.json"
    assert main(["simulate", "--trace", str(file), "--trace-format", "burstgpt", "--json", str(out)]) == 0
    found = json.loads(out.read_text())
    assert found["finished"] == 2
    assert sum(tenant["output_tokens"] for tenant in found["tenants"]) == 10


def test_measured_step_times_are_used(tmp_path: Path) -> None:
    times = tmp_path / "times.json"
    points = [[16, 0, 0, 40.0], [64, 0, 0, 50.0], [0, 1, 0, 30.0], [0, 4, 0, 31.0], [64, 4, 1024, 70.0]]
    times.write_text(json.dumps({"version": 1, "identity": "x", "times": points}))
    slow, fast = tmp_path / "slow", tmp_path / "fast"
    assert main([*SHORT, "--step-times", str(times), "--json", str(slow)]) == 0
    assert main([*SHORT, "--machine", "h200", "--json", str(fast)]) == 0
    assert json.loads(slow.read_text())["ttft_s"]["p50"] > 5 * json.loads(fast.read_text())["ttft_s"]["p50"]


def test_pictures_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert main([*SHORT, "--plots", str(tmp_path / "plots")]) == 0
    assert {file.name for file in (tmp_path / "plots").iterdir()} == {"load.png", "service.png", "ttft.png"}


@pytest.mark.parametrize(
    "flags",
    [["--blocks", "0"], ["--tenants", "0"], ["--trace", "a", "--workload", "b"], ["--max-num-batched-tokens", "8"]],
)
def test_contradictory_options_are_refused(flags: list[str]) -> None:
    assert main([*SHORT, *flags]) == 2


def test_a_calibration_of_a_real_server_makes_first_tokens_later(tmp_path: Path) -> None:
    file = tmp_path / "calibration.json"
    file.write_text(json.dumps({"step_factor": 2.0, "step_ms": 3.0, "http": {"request_ms": 5.0, "token_ms": 0.1}}))
    bare, real = tmp_path / "bare", tmp_path / "real"
    assert main([*SHORT, "--json", str(bare)]) == 0
    assert main([*SHORT, "--calibration", str(file), "--json", str(real)]) == 0
    first, second = (json.loads(path.read_text()) for path in (bare, real))
    assert second["ttft_s"]["p50"] > first["ttft_s"]["p50"] + 0.005


def test_a_closed_loop_finishes_the_requests_that_it_started(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    assert main([*SHORT, "--max-concurrency", "2", "--json", str(out)]) == 0
    found = json.loads(out.read_text())
    assert found["finished"] == found["requests"] > 0


@pytest.mark.parametrize(
    ("words", "message"),
    [(["--calibration", "missing.json"], "--calibration missing.json"), (["--max-concurrency", "0"], "from 1 to")],
)
def test_unsupported_values_are_named(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SHORT, *words]) == 2
    assert message in capsys.readouterr().err


def test_several_replicas_are_shown_one_by_one_and_are_the_same_for_one_seed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fleet = [*SHORT, "--replicas", "3", "--noise", "0.1"]
    for name in ("one", "two"):
        assert main([*fleet, "--json", str(tmp_path / name)]) == 0
    assert "engine   finished" in capsys.readouterr().out
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
    found = json.loads((tmp_path / "one").read_text())
    assert len(found["engines"]) == 3
    assert sum(one["requests"] for one in found["engines"]) == found["requests"]
    assert main([*fleet, "--placement", "in_turn", "--json", str(tmp_path / "turns")]) == 0
    turns = [one["requests"] for one in json.loads((tmp_path / "turns").read_text())["engines"]]
    assert max(turns) - min(turns) <= 1
    assert main([*SHORT, "--replicas", "0"]) == 2
    assert "--replicas" in capsys.readouterr().err


def test_replicas_are_drawn_as_one_server(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert main([*SHORT, "--replicas", "2", "--max-concurrency", "6", "--plots", str(tmp_path)]) == 0
    assert {path.name for path in tmp_path.iterdir()} == {"load.png", "service.png", "ttft.png"}
