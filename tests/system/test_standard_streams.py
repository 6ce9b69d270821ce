"""Text for people is lost where it cannot be written, and nothing else happens."""

import errno
import fcntl
import io
import json
import os
import pty
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from tiercel.system.standard_streams import GuardedStream, say

START = "import sys; from tiercel.system.standard_streams import guard_streams; guard_streams(); "


def _run(code: str, redirection: str, **variables: str) -> "subprocess.CompletedProcess[bytes]":
    """Run Python code under `sh` with a redirection of its descriptors."""
    command = ["sh", "-c", f'"$0" -c "$1" {redirection}', sys.executable, START + code]
    return subprocess.run(command, capture_output=True, check=False, env={**os.environ, **variables}, timeout=60)


def _full_pipe(size: int = 4096) -> tuple[int, int]:
    """Open a pipe that takes nothing more. Its writing end would wait. A pipe of one page takes one write at a time."""
    reader, writer = os.pipe()
    room = fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, size)
    os.write(writer, b"x" * room)
    return reader, writer


@pytest.mark.parametrize("path", ["/dev/full", "/dev/null"])
def test_a_full_disk_takes_no_line(path: str) -> None:
    fd = os.open(path, os.O_WRONLY)
    stream = GuardedStream.of(fd)
    say("a line", stream)
    os.close(fd)
    say("the descriptor is closed", stream)


def test_a_reader_that_has_ended_is_no_error() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    say("a line", GuardedStream.of(writer))


def test_a_reader_that_does_not_read_keeps_nobody_waiting() -> None:
    reader, writer = _full_pipe()
    stream = GuardedStream.of(writer)
    for number in range(200):
        say(f"line {number}", stream)
    told: list[int] = []
    stream.tell_lost(told.append)  # not while it takes nothing
    os.read(reader, 4096)
    say("a line", stream)
    stream.tell_lost(told.append)
    stream.tell_lost(told.append)
    assert told == [200]
    assert os.read(reader, 4096) == b"a line\n"


def test_a_number_of_lost_lines_that_is_lost_itself_is_told_later() -> None:
    reader, writer = _full_pipe()
    stream = GuardedStream.of(writer)
    say("lost", stream)
    os.read(reader, 4096)
    say("a line", stream)
    os.write(writer, b"x" * (4096 - len("a line\n")))  # another process fills the pipe in between
    stream.tell_lost(lambda lost: say(f"{lost} lost", stream))
    os.read(reader, 4096)
    say("a line", stream)
    os.read(reader, 4096)
    stream.tell_lost(lambda lost: say(f"{lost} lost", stream))
    assert os.read(reader, 4096) == b"1 lost\n"


def test_the_descriptor_of_other_processes_stays_as_it_is() -> None:
    _, writer = os.pipe()
    say("a line", GuardedStream.of(writer))
    assert not fcntl.fcntl(writer, fcntl.F_GETFL) & os.O_NONBLOCK


def test_a_line_cut_by_a_full_pipe_is_ended_before_the_next() -> None:
    reader, writer = os.pipe()
    room = fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 8192)
    stream = GuardedStream.of(writer)
    say("a" * 3 * room, stream)
    assert set(os.read(reader, 3 * room)) == {ord("a")}
    say("b", stream)
    assert os.read(reader, room) == b"\nb\n"


def test_a_terminal_stopped_by_ctrl_s_keeps_nobody_waiting() -> None:
    _, terminal = pty.openpty()
    termios.tcflow(terminal, termios.TCOOFF)
    stream = GuardedStream.of(terminal)
    say("a line", stream)
    assert stream.isatty()
    termios.tcflow(terminal, termios.TCOON)


def test_a_terminal_that_is_gone_is_no_error() -> None:
    master, terminal = pty.openpty()
    stream = GuardedStream.of(terminal)
    os.close(master)
    say("a line", stream)


def test_characters_that_the_encoding_lacks_are_escaped() -> None:
    reader, writer = os.pipe()
    say("模型 é \udcff", GuardedStream.of(writer, "latin-1"))
    assert os.read(reader, 100) == b"\\u6a21\\u578b \xe9 \\udcff\n"


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EPIPE, errno.EIO, errno.EBADF])
def test_any_stream_may_fail(error: int) -> None:
    class Failing(io.StringIO):
        def write(self, text: str, /) -> int:
            raise OSError(error, os.strerror(error))

    say("a line", Failing())
    closed = io.StringIO()
    closed.close()
    say("a line", closed)
    say("a line", None)


@pytest.mark.parametrize("redirection", [">/dev/full 2>/dev/full", ">&- 2>&-"])
def test_libraries_write_through_the_guard(redirection: str) -> None:
    """Everything in the process that prints goes on: `print`, warnings, a logger's handler, a traceback."""
    code = (
        "import warnings, logging, traceback; logging.basicConfig(); print('x' * 9999, flush=True);"
        "warnings.warn('x'); logging.error('x'); print('x', file=sys.stderr); traceback.print_stack(); sys.exit(7)"
    )
    ran = _run(code, redirection)
    assert (ran.returncode, ran.stderr) == (7, b"")


@pytest.mark.parametrize("redirection", ["<&- >&- 2>&-", ">&-", "2>&-"])
def test_a_closed_descriptor_is_not_given_to_a_file(redirection: str, tmp_path: Path) -> None:
    """A library that prints would write into it."""
    found = tmp_path / "number"
    code = f"import os; fd = os.open('/dev/zero', os.O_RDONLY); print(fd, file=open('{found}', 'w')); print('x')"
    assert _run(code, redirection).returncode == 0
    assert int(found.read_text()) > 2


def test_the_log_says_how_many_lines_were_lost() -> None:
    reader, writer = _full_pipe(4 * 4096)
    code = (
        START + "import logging; from tiercel.system.log import configure_log; configure_log('info', as_json=True);"
        "[logging.info('lost') for _ in range(3)]; print('written'); sys.stdin.readline(); logging.info('seen')"
    )
    with (
        subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=writer
        ) as process,
        os.fdopen(reader, "rb") as read,
    ):
        os.close(writer)
        assert process.stdin is not None and process.stdout is not None
        assert process.stdout.readline() == b"written\n"
        read.read(4 * 4096)
        process.stdin.close()
        lines = [json.loads(line)["event"] for line in read.read().splitlines()]
    assert lines == ["seen", "log lines lost: standard error did not take them count=3"]


@pytest.mark.parametrize(
    ("verb", "redirection", "line"),
    [
        ("--version", ">/dev/full", "tiercel: error: standard output: No space left on device\n"),
        ("--help", "| true", ""),
    ],
)
def test_a_verb_whose_result_is_lost_ends_with_one_line(verb: str, redirection: str, line: str) -> None:
    code = f"import sys; from tiercel.cli.main import main; sys.exit(main([{verb!r}]))"
    command = ["sh", "-c", f'("$0" -c "$1"; echo $? >&2) {redirection}', sys.executable, code]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert ran.stderr == f"{line}1\n"
