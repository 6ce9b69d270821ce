"""The run over the sections in benchmarks/gpu, where there is no GPU: budgets, targets, files, requests, wheels."""

import contextlib
import json
import re
import signal
import subprocess
import sys
import time
import zipfile
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from benchmarks.gpu import __main__ as program
from benchmarks.gpu import section, wheel_needs
from benchmarks.gpu.bench import Bench
from benchmarks.gpu.bounds import LLAMA_3_8B, QWEN3_8B, optimal_tokens_per_s, serial_step_s
from benchmarks.gpu.catalog import MAX_S, QUICK_SHARE, SECTIONS, choose
from benchmarks.gpu.figure import Failure, Figure, SectionResult, read_result, write_result
from benchmarks.gpu.green import splits
from benchmarks.gpu.peer import PeerLimits
from benchmarks.gpu.peer import run as run_peer
from benchmarks.gpu.report import as_json, as_table, show
from benchmarks.gpu.targets import (
    OVERLAP_BUILT,
    OVERLAP_GATES,
    OVERLAP_LEAST,
    TARGETS,
    Target,
    batch_verdict,
    overlap_verdict,
    values_of,
)
from tiercel.engine.measure.overlap_search import LEAST_GAIN

ROOT = Path(__file__).resolve().parents[2]
GPU = ROOT / "benchmarks" / "gpu"
BY_FIGURE = {target.figure: target for target in TARGETS}


class Clock:
    """A clock that moves only on request."""

    def __init__(self) -> None:
        self.at_s = 100.0

    def __call__(self) -> float:
        return self.at_s


# ---- bounds


@pytest.mark.parametrize(
    ("batch", "context", "ms"), [(1, 1024, 3.52), (32, 1024, 4.49), (64, 4096, 11.5), (256, 1024, 12.9)]
)
def test_the_serial_bound_is_that_of_the_published_rates(batch: int, context: int, ms: float) -> None:
    assert 1e3 * serial_step_s(LLAMA_3_8B, batch, context) == pytest.approx(ms, rel=0.005)


def test_sizes_of_models_and_the_optimum_are_as_known() -> None:
    assert LLAMA_3_8B.params == pytest.approx(8.03e9, rel=1e-3)
    assert LLAMA_3_8B.token_bytes == 131_072
    assert QWEN3_8B.params == pytest.approx(8.19e9, rel=1e-3)
    assert QWEN3_8B.token_bytes == 147_456
    assert optimal_tokens_per_s(LLAMA_3_8B) == pytest.approx(49_191, rel=1e-3)


# ---- targets


@pytest.mark.parametrize("figure", BY_FIGURE)
def test_every_target_is_met_at_its_bound_missed_beyond_and_open_without_a_figure(figure: str) -> None:
    target = BY_FIGURE[figure]
    worse = target.bound * (1.01 if target.is_most else 0.99)
    assert target.verdict({}) == "not measured"
    assert target.verdict({figure: target.bound}) == "met"
    assert target.verdict({figure: worse}) == "missed"
    assert figure.partition(".")[0] in {one.name for one in SECTIONS}


def test_a_slow_link_lowers_the_bound_of_copies_and_a_fast_one_does_not_raise_it() -> None:
    target = BY_FIGURE["copies.down_groups"]
    assert target.verdict({"copies.down_groups": 22.0, "copies.plain_down": 25.0}) == "met"
    assert target.verdict({"copies.down_groups": 21.0, "copies.plain_down": 25.0}) == "missed"
    assert target.verdict({"copies.down_groups": 40.0, "copies.plain_down": 60.0}) == "met"


@pytest.mark.parametrize("value", [0.0, float("nan")])
def test_a_share_that_is_not_a_number_is_not_met(value: float) -> None:
    assert BY_FIGURE["decode.batch_1.share"].verdict({"decode.batch_1.share": value}) == "missed"


def test_the_built_halves_decide_whether_overlap_pays_and_the_verdict_says_how_it_is_applied() -> None:
    assert overlap_verdict({}) == "overlap: not measured"
    yes, no = overlap_verdict({OVERLAP_BUILT: OVERLAP_LEAST}), overlap_verdict({OVERLAP_BUILT: 1.14})
    assert ": yes: run `tiercel calibrate MODEL --device cuda`" in yes
    assert no.endswith(": no: nothing to do, without a table no step overlaps")
    assert OVERLAP_LEAST == LEAST_GAIN  # of the engine's gate


def test_halves_on_disjoint_processors_are_worth_building_only_if_they_alone_pay() -> None:
    halves, prefill = OVERLAP_GATES
    assert "undecided" in overlap_verdict({halves: 1.02})
    assert overlap_verdict({OVERLAP_BUILT: 1.0, halves: 1.1, prefill: 1.15}).endswith("build that (decision 17)")
    assert "build that" not in overlap_verdict({OVERLAP_BUILT: 1.0, halves: 1.1, prefill: 1.05})
    assert "build that" not in overlap_verdict({OVERLAP_BUILT: 1.2, halves: 1.3})


def test_batches_of_copies_stay_if_they_are_faster_for_some_block() -> None:
    assert batch_verdict({"copies.up_64_kib": 40.0}) == "batches of copies: not measured"
    same = {"copies.up_2048_kib": 51.0, "copies.up_2048_kib_one_by_one": 50.0}
    assert batch_verdict(same).endswith("up 2048 KiB 1.02x; from 1.05x on they pay: copy block by block")
    small = {"copies.down_64_kib": 40.0, "copies.down_64_kib_one_by_one": 10.0}
    assert batch_verdict(same | small).endswith("down 64 KiB 4.00x; from 1.05x on they pay: keep cuMemcpyBatchAsync")


# ---- sections and the command line


def test_a_whole_run_is_under_eight_minutes() -> None:
    default = choose(None, has_peer=False)
    assert sum(one.budget_s for one in default) <= MAX_S < 480
    assert sum(one.seconds(is_quick=True) for one in default) == pytest.approx(
        QUICK_SHARE * sum(one.budget_s for one in default)
    )


def test_every_section_is_a_file_with_a_run_and_on_the_page() -> None:
    page = (GPU / "README.md").read_text(encoding="utf-8")
    reported = dict(re.findall(r"^\| `(\w+)` \| (\d+) s \|", page, re.MULTILINE))
    assert reported == {one.name: f"{one.budget_s:.0f}" for one in SECTIONS}
    for one in SECTIONS:
        source = (GPU / f"{one.name}.py").read_text(encoding="utf-8")
        assert re.search(r"^def run\(bench: Bench", source, re.MULTILINE), one.name


def test_sections_are_chosen_by_name_in_their_own_order() -> None:
    assert [one.name for one in choose("decode, kernels", has_peer=False)] == ["kernels", "decode"]
    assert "peer" in [one.name for one in choose(None, has_peer=True)]
    assert not {"peer", "replay", "switches"} & {one.name for one in choose(None, has_peer=False)}


@pytest.mark.parametrize("names", ["nothing", "", ",", "kernels,nothing", "peer"])
def test_wrong_sections_are_refused_by_name(names: str) -> None:
    with pytest.raises(ValueError, match="--sections"):
        choose(names, has_peer=False)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--sections", "nothing"], "there are kernels, limits"),
        (["--peer", "/nowhere"], "--peer /nowhere: no such folder"),
        (["--seconds", "-1"], "--seconds must be at least 0"),
    ],
)
def test_a_wrong_flag_is_named(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        program.parse(words)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_a_machine_without_a_gpu_is_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert program.main(["--out", str(tmp_path / "results")]) == program.EXIT_NO_GPU
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("no GPU: torch ")
    assert not (tmp_path / "results").exists()


def test_a_section_past_its_time_limit_is_killed_and_reported(tmp_path: Path) -> None:
    disk = next(one for one in SECTIONS if one.name == "disk")
    began_s = time.monotonic()
    results: list[SectionResult] = []
    program.run_section(disk, 0.0, tmp_path, results, is_quick=True, peer=None, grace_s=0.05)
    (result,) = results
    assert result.failures == [Failure("disk", "ended after 0 s")]
    assert result.seconds <= time.monotonic() - began_s + 0.1


def test_whatever_a_section_started_ends_with_it() -> None:
    start = "import subprocess, sys; print(subprocess.Popen(['sleep', '60'], process_group=0).pid, flush=True)"
    with subprocess.Popen(
        [sys.executable, "-c", f"{start}; sys.stdin.read()"],
        start_new_session=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as leader:
        assert leader.stdout is not None
        child = Path("/proc") / leader.stdout.readline().strip() / "stat"
        program.end_session(leader.pid)
        assert leader.wait(5) == -signal.SIGKILL
        end_s = time.monotonic() + 5
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # whoever has reaped it
            while child.read_text().rpartition(")")[2].split()[0] != "Z":
                assert time.monotonic() < end_s
                time.sleep(0.01)


def test_a_terminated_run_keeps_the_figures_of_its_section(tmp_path: Path) -> None:
    said = "from pathlib import Path; from benchmarks.gpu.bench import Bench; import sys, time; "
    said += "Bench('disk', 60, Path(sys.argv[sys.argv.index('--out') + 1])).record('done', 1.0, 'x'); "
    said += "print('said', flush=True); time.sleep(60)"
    run = "import subprocess, sys; from benchmarks.gpu import __main__ as program; popen = subprocess.Popen; "
    run += "program.ask_machine = lambda: {'device': 'none', 'versions': {'torch': '0'}, 'commit': '0'}; "
    run += f"start = lambda words, **rest: popen([sys.executable, '-c', {said!r}, *words[3:]], **rest); "
    run += "program.subprocess.Popen = start; program.main(sys.argv[1:])"
    words = [sys.executable, "-c", run, "--sections", "disk", "--out", str(tmp_path)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, cwd=program.ROOT) as process:
        assert process.stdout is not None
        assert any(line == "said\n" for line in process.stdout)
        process.terminate()
        process.communicate(timeout=60)
        assert process.returncode == 128 + signal.SIGTERM
    (found,) = json.loads((tmp_path / "results.json").read_text())["sections"]
    assert [figure["name"] for figure in found["figures"]] == ["disk.done"]
    assert [failure["reason"] for failure in found["failures"]] == ["the run was ended"]


def test_a_failed_section_reports_its_error_and_the_run_continues(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert section.main(["peer", "--budget-s", "5", "--out", str(tmp_path / "peer.json")]) == 0
    (failure,) = read_result(tmp_path / "peer.json").failures
    assert failure.part == "peer"
    assert failure.reason.startswith("AssertionError")
    assert "peer: FAILED" in capsys.readouterr().out


# ---- the peer


def peer_bench(folder: Path, budget_s: float = 1000.0) -> tuple[Bench, Clock]:
    """A run in which section `throughput` has measured 30,000 tokens/s with the first mix, and nothing else."""
    Bench("throughput", 10.0, folder / "throughput.json").record("1024_512.total_tokens_per_s", 30_000.0, "tokens/s")
    (folder / "requests-1024_512.jsonl").write_text("{}")
    clock = Clock()
    return Bench("peer", budget_s, folder / "peer.json", peer=folder, now_s=clock), clock


def result_of(tokens_per_s: float) -> dict[str, object]:
    return {"tokens_per_second": tokens_per_s, "versions": {"vllm": "0.1"}, "facts": {"run_seconds": [12.0, 10.0]}}


def test_the_peer_is_measured_in_two_configurations_and_its_best_is_compared(tmp_path: Path) -> None:
    bench, _ = peer_bench(tmp_path)
    asked: list[PeerLimits] = []

    def measure(peer: Path, model: Path, requests: Path, out: Path, left_s: float, limits: PeerLimits) -> dict:
        asked.append(limits)
        return result_of(20_000.0 if limits.sequences == 512 else 25_000.0)

    run_peer(bench, measure)

    assert asked == [PeerLimits(512, 8192), PeerLimits(1024, 16_384)]
    values = {figure.name: figure.value for figure in bench.result.figures}
    assert values == {
        "peer.1024_512.512_8192.total_tokens_per_s": 20_000.0,
        "peer.1024_512.1024_16384.total_tokens_per_s": 25_000.0,
        "peer.1024_512.total_tokens_per_s": 25_000.0,
        "peer.1024_512.ratio": 1.2,
    }
    assert bench.result.figures[-1].facts["is_complete"] is True
    assert {failure.part for failure in bench.result.failures} == {"512_512", "128_128", "220_190"}


def test_a_configuration_that_fails_or_has_no_time_is_told_beside_the_ratio(tmp_path: Path) -> None:
    bench, clock = peer_bench(tmp_path, budget_s=150.0)

    def measure(peer: Path, model: Path, requests: Path, out: Path, left_s: float, limits: PeerLimits) -> dict:
        assert left_s == 150.0
        clock.at_s += 100.0
        return result_of(20_000.0)

    run_peer(bench, measure)

    assert bench.result.left_out == ["1024_512.1024_16384"]
    assert bench.result.figures[-1].facts["configurations"] == "512_8192"
    assert bench.result.figures[-1].facts["is_complete"] is False


# ---- what a section says


def test_figures_are_written_to_disk_as_they_are_recorded(tmp_path: Path) -> None:
    bench = Bench("limits", 10.0, tmp_path / "limits.json")
    bench.record("copy", 4.25, "TB/s", share=0.99)
    assert read_result(tmp_path / "limits.json").figures == [Figure("limits.copy", 4.25, "TB/s", {"share": 0.99})]
    later = Bench("decode", 10.0, tmp_path / "decode.json")
    assert later.earlier("limits.copy") == 4.25
    assert later.earlier("limits.gemm.1") is None
    assert later.earlier("copies.plain_up") is None
    assert [path.name for path in tmp_path.iterdir()] == ["limits.json"]


def test_a_failing_part_costs_no_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bench = Bench("limits", 10.0, tmp_path / "limits.json")
    with bench.part("first"):
        raise RuntimeError("no such kernel\nand much more")
    with bench.part("second"):
        bench.record("second", 1.0, "s")
    assert bench.result.failures == [Failure("first", "RuntimeError: no such kernel")]
    assert [figure.name for figure in bench.result.figures] == ["limits.second"]
    assert "Traceback" in capsys.readouterr().err


def test_parts_beyond_the_budget_are_skipped_by_name(tmp_path: Path) -> None:
    clock = Clock()
    bench = Bench("limits", 10.0, tmp_path / "limits.json", now_s=clock)
    assert bench.has_time("first", 9.0)
    clock.at_s += 5.0
    assert bench.left_s == 5.0
    assert not bench.has_time("second", 9.0)
    clock.at_s += 6.0
    assert not bench.has_time("third")
    assert read_result(tmp_path / "limits.json").left_out == ["second", "third"]


# ---- report


RESULTS = [
    SectionResult("kernels", [Figure("kernels.worst_error", 0.004, "relative error", {"bound": 0.02})], seconds=41.2),
    SectionResult("disk", [], [Failure("disk", "OSError: no | room")], ["read"], 3.0),
]
FACTS: dict[str, object] = {"date": "2026-11-21", "device": "some GPU", "versions": {"torch": "2.11.0"}}


def test_the_json_holds_machine_targets_and_every_figure(tmp_path: Path) -> None:
    reported = json.loads(json.dumps(as_json(FACTS, RESULTS), allow_nan=False))
    assert reported["format"] == 1
    assert reported["device"] == "some GPU"
    assert [target["figure"] for target in reported["targets"]] == [target.figure for target in TARGETS]
    by_figure = {target["figure"]: target for target in reported["targets"]}
    assert by_figure["kernels.worst_error"]["verdict"] == "met"
    assert by_figure["kernels.worst_error"]["value"] == 0.004
    assert by_figure["swap.step_ratio"]["verdict"] == "not measured"
    assert by_figure["swap.step_ratio"]["value"] is None
    assert reported["sections"][0]["figures"][0]["facts"] == {"bound": 0.02}
    write_result(tmp_path / "one.json", RESULTS[1])
    assert read_result(tmp_path / "one.json") == RESULTS[1]


def test_the_table_has_a_row_for_every_target_and_lists_failures() -> None:
    table = as_table(FACTS, RESULTS)
    rows = [line for line in table.splitlines() if line.startswith("| ") and line.count("|") == 5]
    assert len(rows) == len(TARGETS) + 1
    assert "| every kernel against float32: worst relative error | at most 0.02 | 0.004 | met |" in rows
    assert sum(line.endswith("| not measured |") for line in rows) == len(TARGETS) - 1
    assert "- failed: disk: OSError: no | room" in table
    assert "- no time for: read" in table


def test_numbers_are_shown_with_the_digits_that_count() -> None:
    assert [show(value) for value in (25_123.4, 0.012346, 1.03, float("inf"))] == ["25,123", "0.01235", "1.03", "inf"]


def test_a_strict_run_fails_for_a_target_that_is_not_met_and_for_a_part_that_failed() -> None:
    good = [SectionResult("kernels", [Figure("kernels.worst_error", 0.004, "relative error", {})])]
    bad = [SectionResult("kernels", [Figure("kernels.worst_error", 0.05, "relative error", {})])]
    without = [SectionResult("kernels", [Figure("kernels.add_norm", 0.004, "relative error", {})])]
    broken = [replace(good[0], failures=[Failure("top_p", "AssertionError")])]
    for results, status in (
        (good, 0),
        (bad, program.EXIT_MISSED),
        (without, program.EXIT_MISSED),
        (broken, program.EXIT_MISSED),
    ):
        assert program.exit_code(results, is_strict=True) == status
        assert program.exit_code(results, is_strict=False) == 0
    assert program.exit_code(RESULTS, is_strict=True) == program.EXIT_UNMEASURED


def test_values_are_found_by_the_whole_name() -> None:
    assert values_of(RESULTS[0].figures) == {"kernels.worst_error": 0.004}
    assert Target("", "kernels.worst", 1.0, "").verdict(values_of(RESULTS[0].figures)) == "not measured"


def test_the_page_of_figures_names_every_target_and_its_command() -> None:
    page = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    (part,) = re.findall(r"^## GPU\n(.*)", page, re.MULTILINE | re.DOTALL)
    rows = [line for line in part.splitlines() if line.startswith("| ")]
    for target in TARGETS:
        (row,) = [line for line in rows if line.startswith(f"| {target.text} |")]
        name = target.figure.partition(".")[0]
        assert f"`{name}`" in row
    assert "python benchmarks/gpu/run.py" in part


# ---- machine parts


@pytest.mark.parametrize("processors", [132, 78, 16])
def test_splits_are_whole_groups_and_leave_the_larger_part(processors: int) -> None:
    sizes = splits(processors)
    assert all(size % 8 == 0 and size <= processors // 2 for size in sizes)
    assert all(before < after for before, after in pairwise(sizes))
    assert bool(sizes) == (processors >= 32)


# ---- wheels


def test_every_wheel_that_is_fetched_has_its_version_pinned() -> None:
    script = (GPU / "wheels.sh").read_text(encoding="utf-8")
    (block,) = re.findall(r"^names=\(\n(.*?)^\)", script, re.MULTILINE | re.DOTALL)
    pins = {line.partition("==")[0].lower() for line in (ROOT / "constraints.txt").read_text().splitlines()}
    names = block.split()
    assert {"msgspec", "xxhash", "structlog", "pydantic", "fastapi", "uvicorn", "httpx"} <= set(names)
    assert [name for name in names if name.lower() not in pins] == []


def _wheel(folder: Path, name: str, version: str, *wanted: str) -> None:
    lines = [f"Name: {name}", f"Version: {version}", *(f"Requires-Dist: {one}" for one in wanted)]
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{name}-{version}.dist-info/METADATA", "\n".join(["Metadata-Version: 2.1", *lines]) + "\n\n")


def test_missing_requirements_of_wheels_are_reported(tmp_path: Path) -> None:
    project = tmp_path / "pyproject.toml"
    project.write_text('[project]\ndependencies = ["torch>=2.11", "first>=2", "second"]\n')
    _wheel(tmp_path, "first", "2.0", "third>1 ; python_version >= '3.12'", "old ; python_version < '3.12'")
    _wheel(tmp_path, "third", "1.0", "more ; extra == 'more'")
    assert wheel_needs.lacking(tmp_path, project) == [
        "tiercel requires second: not installed",
        'first requires third>1; python_version >= "3.12": installed is 1.0',
    ]
    _wheel(tmp_path, "second", "0.1")
    (tmp_path / "third-1.0-py3-none-any.whl").unlink()
    _wheel(tmp_path, "third", "1.5")
    assert wheel_needs.lacking(tmp_path, project) == []


def test_the_first_run_has_commands_that_parse_and_figures_of_sections_that_run() -> None:
    page = (ROOT / "docs" / "first-gpu-run.md").read_text(encoding="utf-8")
    commands = re.findall(r"\| `python benchmarks/gpu/run.py (--sections [^`]*)`", page)
    assert len(commands) == 6
    ran: set[str] = set()
    for command in commands:
        names = command.split()[1]
        chosen = choose(names, has_peer="--peer" in command)
        limit_s = int(command.partition("--seconds ")[2].partition(" ")[0] or 600)
        assert 1.25 * min(limit_s, sum(one.budget_s for one in chosen)) <= 600, command
        program.parse([word for word in command.replace("--peer FOLDER", f"--peer {ROOT}").split()])
        ran |= {one.name for one in chosen}
    decides = page.partition("## What each figure decides")[2].partition("\n## ")[0]
    figures = re.findall(r"^\| `(\w+)\.", decides, re.MULTILINE)
    assert set(figures) <= ran
    assert {target.figure.partition(".")[0] for target in TARGETS} - {"quantized", "switches", "replay"} <= set(figures)
    assert "(first-gpu-run.md)" in (ROOT / "docs" / "gpu.md").read_text(encoding="utf-8")
