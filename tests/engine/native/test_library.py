"""Loading the kernels: which class is chosen, and what happens if a kernel or the whole library is wrong."""

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tiercel.engine.native.build import FOLDER, LIBRARY_NAME, source_digest
from tiercel.engine.native.library import check_kernels, find_library, open_library, read_class
from tiercel.engine.native.table import CpuClass, KernelTable
from tiercel.values.errors import ConfigError

needs_library = pytest.mark.skipif(isinstance(find_library(), str), reason="no compiled kernels")


def tables() -> tuple[KernelTable, KernelTable, CpuClass]:
    """Return the table of this processor, the portable one, and the class of the first."""
    found = open_library(FOLDER / LIBRARY_NAME)
    assert not isinstance(found, str)
    cpu_class = CpuClass(found.tiercel_class())
    return found.tiercel_kernels(cpu_class).contents, found.tiercel_kernels(CpuClass.PORTABLE).contents, cpu_class


@needs_library
def test_every_kernel_passes_its_self_test() -> None:
    table, portable, cpu_class = tables()

    library = check_kernels(table, portable, cpu_class)

    assert library.switched_off == ()
    assert library.cpu_class is cpu_class


@needs_library
def test_every_kernel_of_the_table_has_a_self_test() -> None:
    table, portable, cpu_class = tables()
    library = check_kernels(table, portable, cpu_class)

    assert {name for name, *_ in KernelTable._fields_} <= vars(library).keys()


@needs_library
def test_a_kernel_that_differs_is_replaced_by_the_portable_one(caplog: pytest.LogCaptureFixture) -> None:
    table, portable, cpu_class = tables()
    if cpu_class is CpuClass.PORTABLE:
        pytest.skip("this processor has the portable kernels only")
    wrong = KernelTable.from_buffer_copy(table)
    kind = dict((name, kind) for name, kind, *_ in KernelTable._fields_)["add_norm"]

    def computes_too_much(*arguments: int | float) -> None:
        """Compute what the kernel does, and change one number of the result."""
        portable.add_norm(*arguments)
        ctypes.cast(int(arguments[4]), ctypes.POINTER(ctypes.c_uint16))[3] ^= 0x4000

    wrong.add_norm = kind(computes_too_much)

    library = check_kernels(wrong, portable, cpu_class)

    assert "add_norm" in library.switched_off
    address = ctypes.cast(library.add_norm, ctypes.c_void_p).value
    assert address == ctypes.cast(portable.add_norm, ctypes.c_void_p).value
    assert "native kernel switched off" in caplog.text
    assert "add_norm" in caplog.text


@pytest.mark.parametrize(
    ("value", "expected"),
    [("", None), ("none", "none"), ("AVX2", CpuClass.AVX2), ("amx", CpuClass.AMX), (" portable ", CpuClass.PORTABLE)],
)
def test_the_variable_names_a_class(value: str, expected: CpuClass | str | None) -> None:
    assert read_class(value) == expected


def test_an_unknown_class_is_refused_by_name_with_the_allowed_values() -> None:
    with pytest.raises(ConfigError, match=r"TIERCEL_CPU_CLASS=sse9: expected one of none, portable, avx2, avx512, amx"):
        read_class("sse9")


_LOAD = """
import logging
logging.basicConfig(format="%(message)s", level="INFO")
from tiercel.engine.native.library import load_library
library = load_library()
print("none" if library is None else library.class_name)
"""


_OPEN = """
import pathlib, sys
from tiercel.engine.native.library import open_library
print(open_library(pathlib.Path(sys.argv[1])))
"""


def load(cpu_class: str) -> tuple[str, str]:
    """Return the class that a new process chooses, and its log."""
    environment = os.environ | {"TIERCEL_CPU_CLASS": cpu_class}
    ran = subprocess.run([sys.executable, "-c", _LOAD], env=environment, capture_output=True, text=True, check=True)
    return ran.stdout.strip(), ran.stderr


@needs_library
@pytest.mark.slow
def test_a_lower_class_can_be_forced() -> None:
    assert load("portable") == ("portable", "native kernels class=portable switched_off=-\n")


@pytest.mark.slow
def test_the_kernels_can_be_switched_off() -> None:
    chosen, log = load("none")

    assert chosen == "none"
    assert "torch computes instead" in log
    assert "reason=TIERCEL_CPU_CLASS=none" in log


@pytest.mark.parametrize("content", [None, b"", b"\x7fELF"])
def test_a_library_that_cannot_be_loaded_is_a_reason(content: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "library.so"
    if content is not None:
        path.write_bytes(content)

    reason = open_library(path)

    assert isinstance(reason, str)
    assert str(path) in reason


@needs_library
@pytest.mark.parametrize("share", [0.01, 0.5, 0.9999])
@pytest.mark.sampled(1)
@pytest.mark.slow
def test_a_library_that_was_cut_off_is_a_reason(share: float, tmp_path: Path) -> None:
    path = tmp_path / "library.so"
    compiled = (FOLDER / LIBRARY_NAME).read_bytes()
    path.write_bytes(compiled[: int(share * len(compiled))])

    # In a process of its own, which the dynamic linker would end with SIGBUS.
    ran = subprocess.run([sys.executable, "-c", _OPEN, path], capture_output=True, text=True, check=True)

    assert ran.stdout == f"{path} is incomplete; compile it again with `make setup`\n"


@needs_library
def test_a_library_of_other_sources_is_a_reason(tmp_path: Path) -> None:
    path = tmp_path / "library.so"
    compiled = (FOLDER / LIBRARY_NAME).read_bytes()
    path.write_bytes(compiled.replace(source_digest().encode(), b"0" * 64))

    reason = open_library(path)

    assert isinstance(reason, str)
    assert "older than its sources" in reason
