"""The entry point of the command line: version, help, errors and exit codes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tiercel import __version__
from tiercel.cli.main import main

Captured = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")


def test_the_version_is_one_line(capsys: Captured) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"tiercel {__version__}\n"


def test_the_package_is_a_program_too() -> None:
    command = [sys.executable, "-m", "tiercel", "--version"]
    ran = subprocess.run(command, cwd="/", capture_output=True, text=True, check=True)
    assert ran.stdout == f"tiercel {__version__}\n"


@pytest.mark.parametrize("line", ["", "--help", "serve --help", "check --help", "chat --help", "collect-env --help"])
def test_help_fits_one_screen(line: str, capsys: Captured) -> None:
    assert main(line.split()) == 0
    out = capsys.readouterr().out
    assert "Usage: tiercel" in out
    assert len(out.splitlines()) < 40


def test_help_of_all_flags_and_of_one_group(capsys: Captured) -> None:
    main(["serve", "--help=all"])
    everything = capsys.readouterr().out
    main(["serve", "--help=memory"])
    memory = capsys.readouterr().out
    assert "--block-size" in everything
    assert "--sse-keep-alive-interval" in everything
    assert "--block-size" in memory
    assert "--port" not in memory
    assert "\u2026" not in everything, "a name is cut off"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("serve --port x", "--port x: expected a whole number"),
        ("serve --frobnicate", "--frobnicate"),
        ("serve --port", "--port"),
        ("serve a b", "unexpected extra argument"),
        ("serve a --model b", "two models: a and --model b"),
        ("serve nowhere", "nowhere: no such folder"),
        ("serve nowhere.gguf", "nowhere.gguf: no such file"),
        ("serve nowhere --quantization aqw", "--quantization aqw: expected one of auto, int8, int4"),
        ("check nowhere", "nowhere: no such folder"),
        ("bogus", "bogus"),
        ("serve --help=everything", "expected one of common, all, model, memory"),
        ("collect-env --yaml", "--yaml"),
    ],
)
def test_a_wrong_command_line_gives_one_line_and_exit_code_2(line: str, words: str, capsys: Captured) -> None:
    assert main(line.split()) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("tiercel: error: ")
    assert words in captured.err
    assert captured.err.count("\n") == 1


def test_a_warning_does_not_stop_the_command(capsys: Captured) -> None:
    assert main(["serve", "nowhere", "--num-scheduler-steps", "8"]) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert first == "tiercel: warning: --num-scheduler-steps: it has no effect: one step is launched ahead"
    assert second == "tiercel: error: nowhere: no such folder"


def test_the_help_comes_without_torch_or_the_http_stack() -> None:
    code = (
        "import sys, tiercel.cli.main; tiercel.cli.main.main(['serve', '--help']); print(*sys.modules, file=sys.stderr)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = {name.split(".")[0] for name in ran.stderr.split()}
    assert not loaded & {"torch", "transformers", "fastapi", "starlette", "uvicorn", "httpx", "tokenizers", "numpy"}


def test_collect_env_knows_versions_and_limits_and_no_name_of_the_machine(capsys: Captured) -> None:
    assert main(["collect-env", "--json"]) == 0
    out = capsys.readouterr().out
    report = json.loads(out)
    assert report["Packages"]["tiercel"] == __version__
    assert report["PyTorch"]["torch"]
    assert report["System"]["kernel"]
    assert "cores" in report["Processor and memory"]
    assert "memory" in report["Limits of the cgroup"]
    assert report["Native kernels"]["class"]
    assert str(Path.home()) not in out


def test_collect_env_prints_the_same_for_people(capsys: Captured) -> None:
    assert main(["collect-env"]) == 0
    out = capsys.readouterr().out
    assert "Limits of the cgroup" in out
    assert __version__ in out


def test_a_strangers_module_of_the_same_name_is_not_taken_for_a_room(tmp_path: Path) -> None:
    """docs/decisions/0022-one-package.md: `tiercel bench` once imported a user's loadtest.py without end."""
    for room in ("server", "engine", "cli", "device", "loadtest", "kvcache", "scheduler", "simulation", "embedded"):
        (tmp_path / f"{room}.py").write_text("raise SystemExit('a module of the user was imported')\n")
    code = (
        "import tiercel.cli.main, tiercel.loadtest.client.worker, tiercel.server.launch, tiercel.simulation.simulator"
    )
    root = Path(__file__).resolve().parents[2]
    ran = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(root)])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ran.returncode, ran.stderr) == (0, "")
