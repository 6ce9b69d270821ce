"""Worker processes that cannot be started: the request is refused as one that the server cannot serve now."""

import asyncio
import contextlib
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from tiercel.server.grammar.checker import GrammarChecker
from tiercel.server.grammar.constraint import regex_constraint
from tiercel.server.workers.pool import Loss, WorkerPool, WorkerStartError
from tiercel.values.errors import AdmissionError


@contextlib.contextmanager
def no_more_files() -> Iterator[None]:
    """Let this process open no file, so that it can start no other one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def assert_unavailable(error: AdmissionError, reason: str) -> None:
    assert (error.status, error.code, error.kind) == (503, "worker_unavailable", "server_error")
    assert error.retry_after_s
    assert reason in error.message


def test_a_process_that_ends_before_it_is_ready_is_no_fault_of_the_job() -> None:
    """As under a limit of memory, in which its imports fail."""
    pool = WorkerPool("tiercel.no_such_module", b"", limit_s=1.0, num_workers=1)
    try:
        for _ in range(2):
            with pytest.raises(AdmissionError) as refusal:
                pool.ask(b"job")
            assert_unavailable(refusal.value, "the process ended: exit code 1")
        with pytest.raises(WorkerStartError, match="exit code 1"):
            pool.start_one()
    finally:
        pool.close()
    assert pool.pids == []


def test_a_grammar_is_no_bad_request_where_no_process_can_be_started(model_folder: Path) -> None:
    async def test() -> None:
        checker = GrammarChecker(model_folder / "tokenizer.json")
        try:
            constraint = regex_constraint("guided_regex", "a+")
            with no_more_files(), pytest.raises(AdmissionError) as refusal:
                await checker.checked_grammar(constraint, 1024)
            assert_unavailable(refusal.value, "Too many open files")
            assert (await checker.checked_grammar(constraint, 1024)).text  # once it can
        finally:
            checker.close()

    asyncio.run(test())


def test_a_job_that_ends_two_processes_is_lost() -> None:
    pool = WorkerPool("tests.server.workers.dying", b"", limit_s=5.0, num_workers=1)
    try:
        assert pool.start_one() == b"ready"
        assert pool.ask(b"job") is Loss.DIED
    finally:
        pool.close()
