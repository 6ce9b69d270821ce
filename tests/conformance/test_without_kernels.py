"""The token-exactness suite without the native kernels, as on a machine without a compiler."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SUITE = (
    "tests/conformance/test_engine_exactness.py",
    "tests/conformance/test_model_exactness.py",
    "tests/conformance/test_tiers_exactness.py",
)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_tokens_are_exact_without_the_native_kernels() -> None:
    environment = os.environ | {"TIERCEL_CPU_CLASS": "none", "PYTHONPATH": str(ROOT), "PYTEST_ADDOPTS": ""}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *SUITE]
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)

    assert ran.returncode == 0, (ran.stdout + ran.stderr)[-6000:]
    assert " passed" in ran.stdout
