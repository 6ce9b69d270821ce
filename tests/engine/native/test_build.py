"""Compiling the kernels: what happens without a compiler, and with one that cannot be used."""

import platform
from pathlib import Path

import pytest

from tiercel.engine.native.build import (
    CompilerError,
    compile_if_needed,
    compile_library,
    find_compiler,
    is_current,
    source_digest,
)


def give_compiler(monkeypatch: pytest.MonkeyPatch, folder: Path, script: str) -> None:
    """Make a shell script the only compiler."""
    path = folder / "g++"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setenv("CXX", str(path))


def test_a_missing_compiler_is_reported_with_the_package_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))

    with pytest.raises(CompilerError, match=r"apt install g\+\+"):
        find_compiler()
    line = compile_if_needed(tmp_path / "library.so")
    assert "MISSING" in line
    assert "apt install g++" in line


def test_a_failing_compiler_is_reported_with_its_output(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    give_compiler(monkeypatch, tmp_path, "echo 'unrecognized option -mavx512bf16' >&2; exit 1")

    with pytest.raises(CompilerError, match="unrecognized option"):
        compile_library(tmp_path / "library.so")
    assert not (tmp_path / "library.so").exists()


def test_a_compiler_with_another_openmp_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its threads and torch's would take the same cores."""
    give_compiler(
        monkeypatch,
        tmp_path,
        'for word; do [ "$last" = -o ] && target=$word; last=$word; done; echo libomp.so.5 > "$target"',
    )

    with pytest.raises(CompilerError, match="OpenMP"):
        compile_library(tmp_path / "library.so")
    assert not (tmp_path / "library.so").exists()


def test_a_current_library_is_not_compiled_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    give_compiler(monkeypatch, tmp_path, "exit 1")
    library = tmp_path / "library.so"
    library.write_bytes(b"GCC: (Debian 12.2.0-14) 12.2.0\0" + source_digest().encode())

    assert is_current(library)
    assert compile_if_needed(library) == "CPU kernels: compiled by GCC: (Debian 12.2.0-14) 12.2.0"

    library.write_bytes(b"of older sources")
    assert not is_current(library)
    assert "MISSING" in compile_if_needed(library)


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="other processors have portable kernels only")
@pytest.mark.parametrize("knows_amx", [True, False])
def test_a_compiler_that_does_not_know_amx_compiles_the_other_classes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, knows_amx: bool
) -> None:
    """gcc 10 is such a compiler. The stand-in writes its arguments into the library."""
    refusal = 'case "$*" in *-mamx*) exit 1 ;; esac; '
    words = 'for word; do [ "$last" = -o ] && target=$word; last=$word; done; '
    give_compiler(monkeypatch, tmp_path, f'{"" if knows_amx else refusal}{words}echo "libgomp.so $*" > "$target"')

    compile_library(tmp_path / "library.so")

    linked = (tmp_path / "library.so").read_text()
    assert "class_avx512.o" in linked
    assert ("class_amx.o" in linked) is knows_amx
