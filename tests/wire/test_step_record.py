"""The step record: another process reads what a dead engine was working on."""

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tiercel.values.ids import SeqId
from tiercel.values.plan import Slice
from tiercel.wire.step_record import ANY_SEQ, EngineTrail, StepRecord

_ENGINE = """
import os, signal, sys
from tiercel.values.plan import Slice
from tiercel.wire.step_record import StepRecord
record = StepRecord.open(4, int(sys.argv[1]))
record.enter(9)
record.launch(7, [Slice(1, 10, 5, True), Slice(2, 0, 3, False)])
record.allow(2.5)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def record_fd() -> Iterator[int]:
    fd = os.memfd_create("record")
    yield fd
    os.close(fd)


def slices(*rows: tuple[int, int, int]) -> list[Slice]:
    return [Slice(SeqId(seq), start, length, samples=True) for seq, start, length in rows]


def test_the_record_of_a_killed_process_names_its_sequences(record_fd: int) -> None:
    record = StepRecord.open(4, record_fd)
    assert record.read().is_empty
    subprocess.run([sys.executable, "-c", _ENGINE, str(record_fd)], pass_fds=[record_fd], check=False)
    assert record.read() == EngineTrail(SeqId(9), {SeqId(1): 15, SeqId(2): 3})
    assert record.limit_s == 2.5
    record.clear()
    assert record.read().is_empty
    assert record.limit_s == 0


def test_a_step_that_has_ended_is_forgotten_and_no_other() -> None:
    record = StepRecord.open(4)
    record.launch(3, slices((1, 0, 8)))
    record.launch(4, slices((1, 8, 1), (2, 0, 4)))
    record.end(3)
    assert record.read().end_by_seq == {1: 9, 2: 4}
    record.end(3)
    record.end(4)
    assert record.read().is_empty


def test_a_sequence_in_two_steps_is_suspected_up_to_the_later_one() -> None:
    record = StepRecord.open(4)
    record.launch(4, slices((1, 9, 1)))
    record.launch(5, slices((1, 10, 1)))
    assert record.read().end_by_seq == {1: 11}


def test_more_rows_than_fit_are_cut() -> None:
    record = StepRecord.open(2)
    record.launch(1, slices((1, 0, 1), (2, 0, 1), (3, 0, 1)))
    assert set(record.read().end_by_seq) == {1, 2}


def test_any_bytes_can_be_read(record_fd: int) -> None:
    record = StepRecord.open(4, record_fd)
    for _ in range(50):
        os.pwrite(record_fd, os.urandom(os.fstat(record_fd).st_size), 0)
        assert len(record.read().end_by_seq) <= 16


def test_a_request_whose_grammar_is_compiled_is_blamed_before_the_planning_of_a_step() -> None:
    record = StepRecord.open(4)
    record.compile(SeqId(9))
    record.enter(ANY_SEQ)
    assert record.read().entering == 9
    record.compile(SeqId(0))
    assert record.read().entering == ANY_SEQ
    record.compile(SeqId(9))
    record.clear()
    assert record.read().is_empty
