"""Compile the kernels. Uses the standard library only, because the package's build runs it: see setup.py.

`python engine/native/build.py` compiles into this folder, where `library.py` looks for the library. With `--if-needed`
it compiles only if the library is missing or older than its sources, prints the outcome, and never fails.
"""

import argparse
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
SOURCES = FOLDER / "src"
LIBRARY_NAME = "_kernels.so"

_FLAGS = ("-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-fopenmp", "-ffp-contract=off", "-fno-math-errno")
_WARNINGS = ("-Wall", "-Wextra", "-Wno-uninitialized", "-Wno-maybe-uninitialized")  # gcc's own AVX-512 headers
_AVX2 = ("-mavx2", "-mfma", "-mf16c")
AVX512 = (
    *_AVX2,
    *(f"-mavx512{part}" for part in ("f", "bw", "vl", "dq", "vnni", "bf16")),
    "-mprefer-vector-width=512",
)
_AMX = ("-mamx-tile", "-mamx-bf16")
_TILES_PROBE = 'int main() { asm volatile("tdpbf16ps %tmm2, %tmm1, %tmm0"); }\n'
PORTABLE_UNITS: dict[str, tuple[str, ...]] = {"library.cpp": (), "layers.cpp": (), "class_portable.cpp": ()}
"""Units of every library; the values are additional flags."""


class CompilerError(Exception):
    """No compiler was found, or it failed; the text says what to do."""


def source_digest(folder: Path = SOURCES) -> str:
    """Return the SHA-256 of all sources. The library carries it, so that an outdated library is noticed."""
    digest = hashlib.sha256()
    for path in sorted(path for path in folder.iterdir() if path.suffix.startswith((".c", ".h"))):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def is_current(path: Path) -> bool:
    """Return whether a compiled library exists and was compiled from these sources."""
    return path.is_file() and source_digest().encode() in path.read_bytes()


def find_compiler() -> str:
    """Return the C++ compiler: $CXX, g++ or c++. Errors: CompilerError if there is none."""
    for name in (os.environ.get("CXX"), "g++", "c++"):
        if name and shutil.which(name.split()[0]):
            return name
    raise CompilerError("no C++ compiler found; on Debian and Ubuntu: apt install g++")


def compile_library(
    target: Path, extra_flags: tuple[str, ...] = (), flags_by_unit: Mapping[str, tuple[str, ...]] | None = None
) -> None:
    """Compile into the shared library `target`, replacing it at once.

    `extra_flags` go to the compiler and to the linker, for instance those of a sanitizer. `flags_by_unit`: the units to
    compile, with additional flags; None for all classes of this architecture that the compiler knows.
    Errors: CompilerError with the compiler's output.
    """
    compiler = find_compiler().split()
    units = _units_of(compiler) if flags_by_unit is None else flags_by_unit
    with tempfile.TemporaryDirectory() as scratch:

        def compile_unit(unit: str) -> str:
            result = str(Path(scratch, unit).with_suffix(".o"))
            define = f'-DTIERCEL_SOURCES="{source_digest()}"'
            flags = (*_FLAGS, *_WARNINGS, *units[unit], *extra_flags, define)
            _run([*compiler, *flags, "-c", str(SOURCES / unit), "-o", result])
            return result

        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            objects = list(pool.map(compile_unit, units))
        linked = Path(scratch, LIBRARY_NAME)
        _run([*compiler, "-shared", "-fopenmp", *extra_flags, *objects, "-o", str(linked)])
        if b"libgomp.so" not in linked.read_bytes():
            raise CompilerError(
                f"{compiler[0]} links another OpenMP library than torch's libgomp, which would start threads of its "
                "own; on Debian and Ubuntu: apt install g++"
            )
        target.parent.mkdir(parents=True, exist_ok=True)
        beside = target.with_name(f"{target.name}.{os.getpid()}")
        shutil.copy2(linked, beside)
        beside.replace(target)  # a process that has mapped the old library keeps it


def _units_of(compiler: list[str]) -> dict[str, tuple[str, ...]]:
    """Return the units of all classes of this architecture; without AMX if the compiler is too old (gcc before 11)."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return PORTABLE_UNITS
    units = PORTABLE_UNITS | {"class_avx2.cpp": _AVX2, "class_avx512.cpp": AVX512}
    with tempfile.TemporaryDirectory() as scratch:
        probe = Path(scratch, "probe.cpp")
        probe.write_text(_TILES_PROBE)
        try:
            _run([*compiler, *_AMX, "-c", str(probe), "-o", str(probe.with_suffix(".o"))])
        except CompilerError:
            return units
    return units | {"class_amx.cpp": (*AVX512, *_AMX)}


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - no shell
    if done.returncode:
        raise CompilerError(f"{' '.join(command)}\n{done.stderr}")


def compile_if_needed(target: Path) -> str:
    """Compile the library unless it is current, and return one line for the user about the outcome."""
    try:
        if not is_current(target):
            compile_library(target)
    except CompilerError as exc:
        reason = str(exc).strip()
        return f"CPU kernels: MISSING, torch computes instead, which is slower: {reason}; then run `make setup`"
    version = re.search(rb"GCC: \([^)]*\) [\d.]+", target.read_bytes())
    return f"CPU kernels: compiled by {'the compiler' if version is None else version.group().decode()}"


def main() -> None:
    """Compile, and exit with the compiler's message if it fails."""
    parser = argparse.ArgumentParser(description="Compile the CPU kernels into this folder.")
    parser.add_argument("--if-needed", action="store_true", help="only if they are missing or outdated; never fails")
    target = FOLDER / LIBRARY_NAME
    if parser.parse_args().if_needed:
        print(compile_if_needed(target))
        return
    try:
        compile_library(target)
    except CompilerError as exc:
        sys.exit(str(exc))


if __name__ == "__main__":
    main()
