"""Missing programs: tests are skipped locally and fail in CI."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize(("tools", "code", "end"), [("", 0, "skipped"), ("required", 1, "failed")])
@pytest.mark.parametrize("target", ["promtool", "strace"])
@pytest.mark.sampled(2)
def test_missing_programs_skip_tests_locally_and_fail_in_ci(
    tmp_path: Path, target: str, tools: str, code: int, end: str
) -> None:
    probe = tmp_path / "test_probe.py"
    probe.write_text(
        "from pathlib import Path\nfrom tests import programs\n"
        f"def test_it():\n    programs.find_program({target!r}, Path({str(tmp_path)!r}))\n"
    )
    environment = {**os.environ, "PATH": str(tmp_path), "PYTHONPATH": str(ROOT), "TOOLS": tools}
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", str(probe)],
        cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert ran.returncode == code, ran.stdout
    assert f"there is no {target} (Debian and Ubuntu: apt install" in ran.stdout
    assert f"1 {end}" in ran.stdout


def test_a_failed_installation_is_reported_and_fails_ci(tmp_path: Path) -> None:
    code = "import pathlib, sys; from tests import programs; sys.exit(programs.main(pathlib.Path()))"
    for tools, expected in (("", 0), ("required", 1)):
        ran = subprocess.run(
            [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False,
            env={**os.environ, "PATH": str(tmp_path), "PYTHONPATH": str(ROOT), "TOOLS": tools},
        )  # fmt: skip
        assert ran.returncode == expected
        assert "strace and promtool cannot run here: " in ran.stderr
        assert "apt install strace prometheus" in ran.stderr
