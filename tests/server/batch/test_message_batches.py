"""Batches of /v1/messages/batches in the worker: every request has one result, whatever ends the batch."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path

from tests.server.batch.folder import ACME, Answers, Folder, message_lines, opened
from tests.server.harness import until
from tiercel.server.batch.records import MESSAGES_ENDPOINT, BatchRecord

ALL = {str(number) for number in range(20)}


def run(
    path: Path, test: Callable[[Folder], Awaitable[None]], answers: Answers, now: list[float] | None = None
) -> None:
    async def use() -> None:
        async with opened(path, answers, now=now) as folder:
            await test(folder)

    asyncio.run(use())


def kinds(folder: Folder, record: BatchRecord) -> Counter[str]:
    """Return the number of results of each kind, after checking that every request has one."""
    found = folder.lines(record.output_file_id) + folder.lines(record.error_file_id)
    assert {one["custom_id"] for one in found} == ALL and len(found) == len(ALL)
    return Counter(one["result"]["type"] for one in found)


async def begin_half(folder: Folder, answers: Answers) -> BatchRecord:
    """Begin a batch, and return it once 5 of its requests are answered and the next wait."""
    answers.gate, answers.free = asyncio.Event(), 5
    record = await folder.begin(message_lines(20), endpoint=MESSAGES_ENDPOINT)
    await until(lambda: folder.book.get(record.id).completed == 5 and answers.running == 4)
    return record


def test_results_have_the_bodies_of_the_route(tmp_path: Path) -> None:
    answers = Answers(headers=[(b"x-tiercel-ignored-fields", b"odd"), (b"retry-after", b"0")])
    overloads = iter([529, 503])

    def status(body: dict[str, str]) -> int:
        return next(overloads, 200) if body["n"] == "7" else 400 if body["n"] == "3" else 200

    answers.status_of = status

    async def test(folder: Folder) -> None:
        record = await folder.begin(message_lines(20), endpoint=MESSAGES_ENDPOINT)
        source = record.input_file_id
        record = await folder.until_over(record.id)
        assert record.id.startswith("msgbatch_") and (record.completed, record.failed) == (19, 1)
        assert kinds(folder, record) == {"succeeded": 19, "errored": 1}
        assert folder.lines(record.error_file_id) == [
            {
                "custom_id": "3",
                "result": {"type": "errored", "error": {"echo": {"n": "3"}}},
                "ignored_fields": "odd",
            }
        ]
        assert answers.asked.count("7") == 3  # 529 is Anthropic's status of an overload
        await until(lambda: folder.spool.find(ACME, source) is None)
        assert folder.spool.space.held_bytes == sum(one.bytes for one in folder.spool.of(ACME))

    run(tmp_path, test, answers)


def test_requests_of_an_expired_batch_have_expired(tmp_path: Path) -> None:
    answers, begun = Answers(), list[BatchRecord]()

    async def begin(folder: Folder) -> None:
        begun.append(await begin_half(folder, answers))

    async def expire(folder: Folder) -> None:
        record = await folder.until_over(begun[0].id)
        found = kinds(folder, record)
        assert (record.status, record.failed, record.left) == ("expired", 0, found["expired"]) and record.left
        assert record.completed == found["succeeded"] >= 5

    run(tmp_path, begin, answers)
    run(tmp_path, expire, Answers(), now=[1_000_000.0 + 25 * 3600])


def test_a_crash_while_a_batch_is_cancelled_loses_and_repeats_no_result(tmp_path: Path) -> None:
    """Both before the lines without an answer were written, and while they were."""
    for place, is_writing in (("before", False), ("while", True)):
        answers, begun = Answers(), list[BatchRecord]()

        async def crash(
            folder: Folder, answers: Answers = answers, begun: list[BatchRecord] = begun, is_writing: bool = is_writing
        ) -> None:
            begun.append(await begin_half(folder, answers))
            await folder.worker.stop()
            goal = "cancelled" if is_writing else None
            record = await folder.book.change(begun[0].id, "cancelling", goal=goal)
            _, errors = folder.book.journal_paths(record.id)
            written = b'{"custom_id":"19","result":{"type":"canceled"}}\n{"custom_id":"18","res'
            errors.write_bytes(written if is_writing else b"")

        async def go_on(folder: Folder, begun: list[BatchRecord] = begun) -> None:
            record = await folder.until_over(begun[0].id)
            assert kinds(folder, record) == {"succeeded": 5, "canceled": 15}
            assert (record.status, record.completed, record.failed, record.left) == ("cancelled", 5, 0, 15)
            assert folder.spool.space.held_bytes == sum(one.bytes for one in folder.spool.of(ACME))

        run(tmp_path / place, crash, answers)
        run(tmp_path / place, go_on, Answers())
