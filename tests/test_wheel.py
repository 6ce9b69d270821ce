"""The wheel: its tag says whether it has compiled kernels. A stand-in for the compiler writes them."""

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tiercel.engine.native.build import LIBRARY_NAME, source_digest

ROOT = Path(__file__).resolve().parent.parent
LIBRARY = f"tiercel/engine/native/{LIBRARY_NAME}"
# Writes what build.py looks for in a library: its OpenMP, and the digest of the sources that was passed as a macro.
COMPILER = """#!/bin/sh
for word; do
  case "$last" in -o) target=$word ;; esac
  last=$word
done
echo "libgomp.so $*" > "$target"
"""
BUILD = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the repository's packages, without a compiled library and without large files."""
    folder = tmp_path_factory.mktemp("tree")
    ignored = shutil.ignore_patterns("__pycache__", "*.so*", "*.safetensors", "vendor")
    shutil.copytree(ROOT / "tiercel", folder / "tiercel", ignore=ignored)
    for name in ("LICENSE", "README.md", "pyproject.toml", "setup.py"):
        shutil.copy2(ROOT / name, folder)
    return folder


def build_wheel(tree: Path, folder: Path, compiler: str | None) -> tuple[str, set[str]]:
    """Return the platform in the name of a wheel, and its files. `compiler`: a script; None: there is no compiler."""
    programs = folder / "programs"
    programs.mkdir()
    if compiler is not None:
        (programs / "g++").write_text(compiler)
        (programs / "g++").chmod(0o755)
    shell = shutil.which("sh")
    assert shell
    (programs / "sh").symlink_to(shell)
    environment = {name: text for name, text in os.environ.items() if name != "CXX"} | {"PATH": str(programs)}
    command = [sys.executable, "-c", BUILD, str(folder)]
    subprocess.run(command, cwd=tree, env=environment, check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return wheel.stem.split("-", 2)[2], set(archive.namelist())


def test_a_wheel_has_the_kernels_of_this_platform_only_if_they_were_compiled(tree: Path, tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("compiled", "failed", "none")]
    for folder in folders:
        folder.mkdir()

    tag, files = build_wheel(tree, folders[0], COMPILER)
    assert LIBRARY in files
    assert tag.startswith("py3-none-linux_")
    modules = {path.relative_to(tree).as_posix() for path in (tree / "tiercel").rglob("*.py")}
    assert {name for name in files if name.endswith(".py")} == modules
    assert {name.partition("/")[0].partition("-")[0] for name in files} == {"tiercel"}
    assert "tiercel/py.typed" in files

    tag, files = build_wheel(tree, folders[1], "#!/bin/sh\nexit 1\n")
    assert LIBRARY not in files, "left by the build before"
    assert tag == "py3-none-any"

    tag, files = build_wheel(tree, folders[2], None)
    assert LIBRARY not in files
    assert tag == "py3-none-any"
    assert "tiercel/engine/native/library.py" in files


def test_a_source_distribution_has_the_sources_of_the_kernels(tree: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", BUILD.replace("build_wheel", "build_sdist"), str(tmp_path)]
    subprocess.run(command, cwd=tree, check=True, capture_output=True)

    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as files:
        names = {name.partition("/")[2] for name in files.getnames()}
    sources = {path.name for path in (ROOT / "tiercel" / "engine" / "native" / "src").iterdir()}
    assert {f"tiercel/engine/native/src/{name}" for name in sources} | {"setup.py"} <= names
    modules = {path.relative_to(tree).as_posix() for path in (tree / "tiercel").rglob("*.py")}
    assert {name for name in names if name.endswith(".py")} == modules | {"setup.py"}


@pytest.mark.parametrize("is_current", [True, False])
def test_without_a_compiler_kernels_compiled_before_are_taken_if_they_are_current(
    tree: Path, tmp_path: Path, is_current: bool
) -> None:
    library = tree / LIBRARY
    library.write_text(source_digest() if is_current else "of older sources")
    try:
        tag, files = build_wheel(tree, tmp_path, None)
    finally:
        library.unlink()

    assert (LIBRARY in files) is is_current
    assert tag.startswith("py3-none-linux_" if is_current else "py3-none-any")
