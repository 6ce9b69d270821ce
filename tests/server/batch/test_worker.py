"""The worker of batches: every line is answered once, whatever ends in between."""

import asyncio
import errno
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from tests.server.batch.folder import ACME, LIMITS, OTHER, Answers, Conditions, Folder, line, lines, opened, tenant_in
from tests.server.harness import until
from tiercel.server.batch.records import BatchRecord


def run(path: Path, test: Callable[[Folder], Awaitable[None]], answers: Answers | None = None, **more: Any) -> None:
    async def use() -> None:
        async with opened(path, answers, **more) as folder:
            await test(folder)

    asyncio.run(use())


def ids_in(folder: Folder, record: BatchRecord) -> list[str]:
    found = folder.lines(record.output_file_id) + folder.lines(record.error_file_id)
    return sorted((one["custom_id"] for one in found), key=int)


def test_a_batch_goes_through_its_statuses_and_answers_every_line(tmp_path: Path) -> None:
    answers = Answers()

    async def test(folder: Folder) -> None:
        record = await folder.until_over((await folder.begin(lines(30))).id)
        assert (record.status, record.total, record.completed, record.failed) == ("completed", 30, 30, 0)
        assert record.error_file_id is None
        assert None not in (record.in_progress_s, record.finalizing_s, record.completed_s)
        assert ids_in(folder, record) == [str(number) for number in range(30)]
        one = folder.lines(record.output_file_id)[0]
        assert one["error"] is None and one["response"]["status_code"] == 200
        assert one["response"]["body"]["echo"]["n"] == one["custom_id"]
        assert one["response"]["request_id"] == f"{record.id}-{int(one['custom_id']) + 1}"
        assert one["id"].startswith("batch_req_")
        file = folder.spool.find(ACME, record.output_file_id or "")
        assert file is not None and file.purpose == "batch_output"
        assert {tenant_in(scope) for scope in answers.scopes} == {"acme"}
        assert answers.most <= 4
        assert (folder.worker.num_completed, folder.worker.num_failed) == (30, 0)
        sizes = sum(record.bytes for record in folder.spool.of(ACME))
        assert folder.spool.space.held_bytes == sizes
        # The status is seen before the journals are deleted.
        await until(lambda: [path.name for path in (tmp_path / "batches").iterdir()] == [f"{record.id}.json"])

    run(tmp_path, test, answers)


def test_lines_that_fail_are_in_the_error_file(tmp_path: Path) -> None:
    answers = Answers(status_of=lambda body: 400 if body["n"] == "1" else 500 if body["n"] == "2" else 200)

    async def test(folder: Folder) -> None:
        data = lines(4) + line(4, body={"n": "4", "stream": True})
        record = await folder.until_over((await folder.begin(data)).id)
        assert (record.status, record.completed, record.failed) == ("completed", 2, 3)
        statuses = {one["custom_id"]: one["response"]["status_code"] for one in folder.lines(record.error_file_id)}
        assert statuses == {"1": 400, "2": 500, "4": 400}
        assert "4" not in answers.asked

    run(tmp_path, test, answers)


def test_a_line_says_what_of_its_request_did_not_act(tmp_path: Path) -> None:
    answers = Answers(headers=[(b"x-tiercel-ignored-fields", b"odd, guided_json.not")])

    async def test(folder: Folder) -> None:
        record = await folder.until_over((await folder.begin(lines(1))).id)
        (one,) = folder.lines(record.output_file_id)
        assert one["response"]["ignored_fields"] == "odd, guided_json.not"
        answers.headers.clear()
        record = await folder.until_over((await folder.begin(lines(1))).id)
        (one,) = folder.lines(record.output_file_id)
        assert "ignored_fields" not in one["response"]

    run(tmp_path, test, answers)


def test_an_input_with_faults_fails_as_a_whole(tmp_path: Path) -> None:
    answers = Answers()

    async def test(folder: Folder) -> None:
        record = await folder.until_over((await folder.begin(line(1) + b"{\n" + line(1))).id)
        assert record.status == "failed" and record.failed_s is not None
        assert [(fault.line, fault.code) for fault in record.faults] == [
            (2, "invalid_json_line"), (3, "duplicate_custom_id"),
        ]  # fmt: skip
        assert not answers.asked

    run(tmp_path, test, answers)


def test_a_refused_line_is_asked_again(tmp_path: Path) -> None:
    answers = Answers(headers=[(b"retry-after", b"0")])
    answers.status_of = lambda body: (429, 503, 200)[min(answers.asked.count(body["n"]) - 1, 2)]

    async def test(folder: Folder) -> None:
        record = await folder.until_over((await folder.begin(lines(3))).id)
        assert (record.completed, record.failed) == (3, 0)
        assert sorted(answers.asked) == sorted(["0", "1", "2"] * 3)

    run(tmp_path, test, answers)


def test_nothing_is_asked_while_the_server_is_not_calm_or_the_tenant_is_gone(tmp_path: Path) -> None:
    answers, conditions = Answers(), Conditions(is_calm=False)

    async def test(folder: Folder) -> None:
        record = await folder.begin(lines(3))
        await until(lambda: folder.book.get(record.id).status == "in_progress")
        await asyncio.sleep(0.3)
        assert not answers.asked
        conditions.is_calm, conditions.names = True, (OTHER,)
        await asyncio.sleep(0.3)
        assert not answers.asked
        conditions.names = (ACME,)
        assert (await folder.until_over(record.id)).completed == 3

    run(tmp_path, test, answers, conditions=conditions)


def test_tenants_take_turns_and_the_batches_of_one_run_in_order(tmp_path: Path) -> None:
    answers = Answers()

    async def test(folder: Folder) -> None:
        gate = answers.gate = asyncio.Event()
        first = await folder.begin(lines(40))
        second = await folder.begin(b"".join(line(number) for number in range(100, 110)))
        other = await folder.begin(b"".join(line(number) for number in range(200, 210)), OTHER)
        await until(lambda: folder.book.get(other.id).status == "in_progress" and answers.running == 2)
        await asyncio.sleep(0.2)  # the lines of both tenants wait for a slot
        gate.set()
        await folder.until_over(second.id)
        await folder.until_over(other.id)
        places = {int(number): place for place, number in enumerate(answers.asked)}
        assert max(places[number] for number in range(40)) < min(places[number] for number in range(100, 110))
        assert max(places[number] for number in range(200, 210)) < max(places[number] for number in range(40))
        assert folder.book.get(first.id).completed_s is not None

    run(tmp_path, test, answers, concurrency=2)


def test_a_stop_in_the_middle_loses_no_answer_and_asks_none_twice(tmp_path: Path) -> None:
    first, second = Answers(), Answers()
    started: list[BatchRecord] = []

    async def begin(folder: Folder) -> None:
        first.gate, first.free = asyncio.Event(), 10
        record = await folder.begin(lines(50))
        started.append(record)
        await until(lambda: folder.book.get(record.id).completed == 10 and first.running == 4)

    async def go_on(folder: Folder) -> None:
        record = await folder.until_over(started[0].id)
        assert (record.status, record.completed, record.failed) == ("completed", 50, 0)
        assert ids_in(folder, record) == [str(number) for number in range(50)]
        assert not set(first.answered) & set(second.asked)
        assert folder.spool.space.held_bytes == sum(one.bytes for one in folder.spool.of(ACME))

    run(tmp_path, begin, first)
    assert first.running == 0
    run(tmp_path, go_on, second)


def test_a_cancelled_batch_keeps_the_answers_that_it_has(tmp_path: Path) -> None:
    answers = Answers()

    async def test(folder: Folder) -> None:
        answers.gate, answers.free = asyncio.Event(), 5
        record = await folder.begin(lines(50))
        behind = await folder.begin(lines(5))
        await until(lambda: folder.book.get(record.id).completed == 5 and answers.running == 4)
        assert (await folder.worker.cancel(behind.id)).status == "cancelled"
        assert (await folder.worker.cancel(record.id)).status in ("cancelling", "cancelled")
        record = await folder.until_over(record.id)
        assert record.status == "cancelled" and record.cancelled_s is not None and answers.running == 0
        assert record.completed == 5 and len(folder.lines(record.output_file_id)) == record.completed
        assert (await folder.worker.cancel(record.id)).status == "cancelled"

    run(tmp_path, test, answers)


def test_a_batch_that_expires_names_the_lines_without_an_answer(tmp_path: Path) -> None:
    answers = Answers()
    started: list[BatchRecord] = []

    async def begin(folder: Folder) -> None:
        answers.gate, answers.free = asyncio.Event(), 5
        started.append(await folder.begin(lines(20)))
        await until(lambda: folder.book.get(started[0].id).completed == 5 and answers.running == 4)

    async def expire(folder: Folder) -> None:
        record = await folder.until_over(started[0].id)
        assert record.status == "expired" and record.expired_s is not None
        assert record.completed + record.failed == 20
        errors = folder.lines(record.error_file_id)
        assert {one["error"]["code"] for one in errors} == {"batch_expired"} and len(errors) == record.failed
        assert ids_in(folder, record) == [str(number) for number in range(20)]

    run(tmp_path, begin, answers)
    run(tmp_path, expire, Answers(), now=[1_000_000.0 + 25 * 3600])


def test_a_full_disk_or_quota_delays_answers_and_loses_none(tmp_path: Path) -> None:
    answers = Answers()

    async def test(folder: Folder) -> None:
        gate = answers.gate = asyncio.Event()
        blocker = await folder.add_file(b"x" * 3_000)
        record = await folder.begin(lines(3))
        await until(lambda: answers.running == 3)
        folder.disk.failures = 1
        gate.set()
        await asyncio.sleep(0.1)
        assert folder.book.get(record.id).completed < 3
        await folder.spool.remove(blocker)
        assert (await folder.until_over(record.id)).completed == 3
        assert len(answers.asked) == 3

    run(tmp_path, test, answers, limits=replace(LIMITS, tenant_bytes=3_600))


def test_a_broken_disk_fails_the_batch_and_not_the_worker(tmp_path: Path) -> None:
    answers = Answers()

    async def test(folder: Folder) -> None:
        gate = answers.gate = asyncio.Event()
        record = await folder.begin(lines(3))
        await until(lambda: answers.running == 3)
        folder.disk.error, folder.disk.failures = errno.EIO, 1
        gate.set()
        record = await folder.until_over(record.id)
        assert record.status == "failed" and record.faults[0].code == "storage_error"
        folder.disk.failures = 0
        assert (await folder.until_over((await folder.begin(lines(3))).id)).status == "completed"

    run(tmp_path, test, answers)


def test_an_unexpected_error_fails_one_batch(tmp_path: Path) -> None:
    async def test(folder: Folder) -> None:
        record = await folder.begin(line(1, body={}))  # the application of this test needs `n`
        record = await folder.until_over(record.id)
        assert record.status == "failed" and record.faults[0].code == "internal_error"
        assert (await folder.until_over((await folder.begin(lines(3))).id)).status == "completed"

    run(tmp_path, test)


def test_old_batches_are_forgotten(tmp_path: Path) -> None:
    async def test(folder: Folder) -> None:
        record = await folder.until_over((await folder.begin(lines(1))).id)
        await folder.book.forget()
        assert folder.book.of(ACME)
        folder.now[0] += 32 * 24 * 3600
        await folder.book.forget()
        assert not folder.book.of(ACME) and not list((tmp_path / "batches").iterdir())
        assert folder.book.find(ACME, record.id) is None

    run(tmp_path, test)
