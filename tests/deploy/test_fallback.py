"""Without an engine: the run prints the reason, and fails only if an engine is required."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.deploy.supplies import ROOT

SAYS = "NO DOCKER ENGINE HERE, only static checks ran: "


@pytest.mark.parametrize(("wish", "code", "end"), [("", 0, "skipped"), ("required", 1, "error")])
def test_a_machine_without_namespaces_is_reported(tmp_path: Path, wish: str, code: int, end: str) -> None:
    drop = ["--bounding-set=-sys_admin", "--inh-caps=-sys_admin"]
    powerless = [shutil.which("setpriv") or "setpriv", *drop] if os.geteuid() == 0 else []
    command = [*powerless, sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "ENGINE": wish}
    ran = subprocess.run(
        [*command, "tests/deploy/test_deploy.py", "-k", "image_is_small"],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert ran.returncode == code, ran.stdout
    assert ran.stderr.startswith(SAYS)
    assert SAYS in ran.stdout
    assert f"1 {end}" in ran.stdout
