"""Limits of a process: named in errors, and never raised."""

import errno
import os
import subprocess
import sys

import pytest

from tiercel.system.process_limits import blame


def _run(code: str) -> list[str]:
    command = [sys.executable, "-c", f"import resource as r\n{code}"]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.splitlines()


def test_a_limit_is_lowered_and_never_raised() -> None:
    code = """
from tiercel.system.process_limits import lower_limit
r.setrlimit(r.RLIMIT_NOFILE, (100, 200))
for limit in (1000, 150):
    lower_limit(r.RLIMIT_NOFILE, limit)
    print(*r.getrlimit(r.RLIMIT_NOFILE))
"""
    assert _run(code) == ["200 200", "150 150"]


def test_an_error_names_the_limit_that_may_have_caused_it() -> None:
    code = """
import errno, os
from tiercel.system.process_limits import blame
r.setrlimit(r.RLIMIT_AS, (2**31, 2**31))
r.setrlimit(r.RLIMIT_FSIZE, (4096, 4096))
for number in (errno.ENOMEM, errno.EFBIG, errno.ENOENT):
    print(blame(OSError(number, os.strerror(number))))
print(blame(MemoryError()))
try:
    os.ftruncate(os.memfd_create("large"), 4097)
except OSError as exc:
    print(blame(exc))
"""
    memory, size, other, error, real = _run(code)
    space = "raise the limit of 2.0 GiB on address space (RLIMIT_AS: ulimit -v, LimitAS of systemd)"
    assert memory == f"Cannot allocate memory; {space}"
    assert error == f"MemoryError; {space}"
    assert size == real
    assert size.startswith("File too large; raise the limit of 4.0 KiB on the size of files") and "RLIMIT_FSIZE" in size
    assert other == "No such file or directory"


@pytest.mark.parametrize("number", [errno.ENOMEM, errno.EFBIG])
def test_without_limits_the_error_is_as_it_is(number: int) -> None:
    assert blame(OSError(number, os.strerror(number))) == os.strerror(number)


def test_workers_start_under_a_limit_below_their_own() -> None:
    code = """
r.setrlimit(r.RLIMIT_AS, (600 * 2**20, 600 * 2**20))
from tiercel.server.text.template_pool import TemplatePool
pool = TemplatePool.open("{{ messages }}", {})
print(sorted(pool.variables))
pool.close()
"""
    assert _run(code) == ["['messages']"]


def test_a_worker_that_cannot_start_is_no_fault_of_the_template() -> None:
    code = """
from tiercel.values.errors import ConfigError
from tiercel.server.text.template_pool import TemplatePool
TemplatePool.open("{{ messages }}", {}).close()  # imports all that needs memory in this process
r.setrlimit(r.RLIMIT_AS, (20 * 2**20, 20 * 2**20))
try:
    TemplatePool.open("{{ messages }}", {})
except ConfigError as exc:
    print(exc.message)
"""
    (line,) = _run(code)
    assert line.startswith("the process for chat templates: the process ended: ") and "RLIMIT_AS" in line
