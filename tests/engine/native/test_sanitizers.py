"""The kernels under the address and the undefined-behaviour sanitizer: their tests run in a process of their own.

The process imports a copy of the engine beside links to everything else, because the library lies in `engine/native`.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engine.native.emulated import EMULATED_NAME, compile_emulated
from tiercel.engine.native.build import FOLDER, LIBRARY_NAME, CompilerError, compile_library, find_compiler
from tiercel.engine.native.library import open_library
from tiercel.engine.native.table import CpuClass

ROOT = Path(__file__).resolve().parents[3]
SANITIZERS = ("-O1", "-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer")
TESTS = (
    "tests/engine/native/test_ops.py",
    "tests/engine/native/test_linear.py",
    "tests/engine/native/test_quantized.py",
    "tests/engine/native/test_amx.py",
    "tests/engine/native/test_sampling.py",
    "tests/engine/attention/test_native.py",
)
REPORTS = ("ERROR: AddressSanitizer", "runtime error:")


def runtime(name: str) -> str:
    """Return the path of a runtime library of the compiler; skip the test if it is not installed."""
    try:
        command = [*find_compiler().split(), f"-print-file-name={name}"]
    except CompilerError as exc:
        pytest.skip(str(exc))
    path = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    if not Path(path).is_absolute():
        pytest.skip(f"the compiler has no {name}")
    return path


def make_tree(folder: Path) -> Path:
    """Make a tree in which the engine is a copy without a library, and return its folder of kernels."""
    ignored = shutil.ignore_patterns("__pycache__", "*.so*")
    shutil.copytree(ROOT / "tiercel", folder / "tiercel", ignore=ignored)
    for path in ROOT.iterdir():
        if path.name != "tiercel" and not path.name.startswith("."):
            (folder / path.name).symlink_to(path)
    return folder / "tiercel" / "engine" / "native"


def run_tests(tree: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    """Run kernel tests in the tree, with the sanitizers' runtime loaded first."""
    environment = os.environ | {
        "PYTHONPATH": str(tree),
        "LD_PRELOAD": f"{runtime('libasan.so')} {runtime('libubsan.so')}",
        "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=1:allocator_may_return_null=1",
        "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
        "OMP_NUM_THREADS": "2",
        "PYTHONMALLOC": "malloc",
        "PYTEST_ADDOPTS": "",
    }
    # -s: pytest would lose what the sanitizers print before the process aborts
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-s", "-p", "no:cacheprovider", *words]
    return subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_no_kernel_reads_or_writes_outside_its_memory(tmp_path: Path) -> None:
    native = make_tree(tmp_path)
    runtime("libasan.so")
    compile_library(native / LIBRARY_NAME, SANITIZERS)
    found = open_library(FOLDER / LIBRARY_NAME)
    processor = CpuClass.PORTABLE if isinstance(found, str) else CpuClass(found.tiercel_class())
    compile_emulated(native / EMULATED_NAME, processor, SANITIZERS)

    ran = run_tests(tmp_path, *TESTS)

    said = ran.stdout + ran.stderr
    assert not [report for report in REPORTS if report in said], said[-6000:]
    assert ran.returncode == 0, said[-6000:]
    assert " passed" in ran.stdout
