"""The arithmetic of benchmarks/soak, from made-up figures, and its client on made-up responses."""

import asyncio
import itertools
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

import pytest

from benchmarks.engine_pid import ProcessFigures
from benchmarks.soak.harm import Harm
from benchmarks.soak.sessions import Traffic
from benchmarks.soak.verdict import (
    MIB,
    SoakRun,
    checks_of,
    count_lines,
    growth,
    increase,
    limits_of,
    longest_silence_s,
    slope_per_min,
)
from benchmarks.soak.watch import Sample, read_page
from benchmarks.whole_answer import CHAT, Outcome, Usage, WholeAnswer, ask

SECONDS = 90
ROUTES = ("hbm_ddr", "ddr_hbm", "ddr_ssd", "ssd_ddr")


def sample(at_s: float, *, mib: float = 50.0, metrics: Mapping[str, float] | None = None) -> Sample:
    figures = ProcessFigures(int(mib * MIB), 17, 6)
    page = {"tiercel_http_tasks": 6.0, "vllm:generation_tokens_total": at_s, "tiercel_kv_capacity_bytes.hbm": 100.0}
    page |= {"tiercel_engine_restarts_total.killed": float(at_s > 40)}
    page |= {f"tiercel_kv_transfer_bytes_total.{route}": at_s for route in ROUTES}
    return Sample(at_s, figures, 7, figures, page | (metrics or {}))


def answered(number: int) -> WholeAnswer:
    """Return a request that was sent at second `number` and had its first token 0.1 s later."""
    answer = WholeAnswer(CHAT, {}, request_id=f"soak-0-{number}", outcome=Outcome.ANSWERED, sent_s=float(number))
    answer.piece_times_s.append(number + 0.1)
    answer.usage = Usage(10, 5, 0)
    return answer


def good_run() -> SoakRun:
    """Return a run that keeps every limit."""
    answers = [answered(number) for number in range(SECONDS)]
    return SoakRun(
        began_s=0.0, seconds=float(SECONDS), traffic=Traffic(answers=answers, contexts={0: 300, 1: 300}),
        samples=[sample(float(at_s)) for at_s in range(SECONDS)], before=sample(0.0), after=sample(99.0),
        harm=Harm(kills_s=[40.0]), planned_kills=1, has_full_disk=False, replays=4, wrong=0,
        logged=Counter(one.request_id for one in answers), pool_tokens=200,
    )  # fmt: skip


def missed(run: SoakRun) -> list[str]:
    return [text for text, is_met in checks_of(run) if not is_met]


def with_answer(answer: WholeAnswer) -> SoakRun:
    run = good_run()
    run.traffic.answers.append(answer)
    return replace(run, logged=run.logged + Counter([answer.request_id]))


def test_a_good_run_misses_no_check() -> None:
    assert missed(good_run()) == []


@pytest.mark.parametrize(
    ("outcome", "text"),
    [
        (Outcome.FAILED, "1 failed"), (Outcome.BROKEN, "1 broken"), (Outcome.SILENT, "1 silent"),
        (Outcome.REFUSED, "1 refused"), (Outcome.OPEN, "without an outcome"),
    ],
)  # fmt: skip
def test_one_request_that_ends_badly_is_missed(outcome: Outcome, text: str) -> None:
    answer = replace(answered(500), outcome=outcome)
    assert text in missed(with_answer(answer))[0]


@pytest.mark.parametrize("lines", [0, 2])
def test_a_request_with_no_line_or_two_lines_in_the_log_is_missed(lines: int) -> None:
    run = good_run()
    run.logged["soak-0-3"] = lines
    assert missed(run) == ["1 requests without exactly one line in the log: 0"]


def test_a_mistake_that_is_answered_is_missed() -> None:
    run = good_run()
    run.traffic.wrong.append(replace(answered(1), request_id="soak-0-3"))
    assert missed(run)[-1] == "1 of 1 requests with a mistake not refused: 0"


def test_wrong_replays_and_no_replays_are_missed() -> None:
    assert missed(replace(good_run(), wrong=1)) == ["1 of 4 replayed requests differ from the reference: 0"]
    assert missed(replace(good_run(), replays=0)) == ["0 of 0 replayed requests differ from the reference: 0"]


def test_growth_of_a_short_run_and_slope_of_a_long_run_are_missed() -> None:
    short = replace(good_run(), samples=[sample(float(at_s), mib=50 + at_s / 4) for at_s in range(SECONDS)])
    assert all("MiB more" in text for text in missed(short)) and len(missed(short)) == 2
    for mib_per_min, count in ((0.9, 0), (1.1, 2)):
        samples = [sample(float(at_s), mib=50 + mib_per_min * at_s / 60) for at_s in range(900)]
        long = replace(good_run(), seconds=900.0, samples=samples)
        long.traffic.answers.extend(answered(number) for number in range(SECONDS, 900))
        long.logged.update(one.request_id for one in long.traffic.answers[SECONDS:])
        assert len(missed(long)) == count, missed(long)


@pytest.mark.parametrize("change", [-3, 3])
def test_descriptors_threads_and_tasks_must_return(change: int) -> None:
    run = good_run()
    figures = ProcessFigures(50 * MIB, 17 + change, 6 + change)
    after = replace_sample(run.after, http=figures, tasks=6.0 + change)
    assert [text.split(":")[0] for text in missed(replace(run, after=after))] == [
        "descriptors of the HTTP process", "threads of the HTTP process", "tasks of the HTTP process",
    ]  # fmt: skip


def replace_sample(before: Sample, *, http: ProcessFigures, tasks: float) -> Sample:
    return before._replace(http=http, metrics={**before.metrics, "tiercel_http_tasks": tasks})


def test_blocks_in_use_after_the_load_and_a_changed_capacity_are_missed() -> None:
    held = sample(99.0, metrics={"tiercel_kv_used_bytes.ddr": 4096.0})
    assert missed(replace(good_run(), after=held)) == [
        "blocks: none is in use after the load, no sequence runs or waits"
    ]
    less = [*good_run().samples, sample(90.0, metrics={"tiercel_kv_capacity_bytes.hbm": 99.0})]
    assert missed(replace(good_run(), samples=less)) == [
        "blocks: the capacity of each tier is constant, and never exceeded"
    ]


def test_slower_first_tokens_are_missed() -> None:
    run = good_run()
    for answer in run.traffic.answers[-30:]:
        answer.piece_times_s[0] += 0.3
    assert [text.split()[0] for text in missed(run)] == ["median", "P99"]


def test_a_kill_that_did_not_happen_is_missed() -> None:
    assert missed(replace(good_run(), harm=Harm())) == ["0 kills of the engine, 1 restarts: 1 each"]


def test_a_restart_that_no_kill_explains_is_missed() -> None:
    crashed = sample(90.0, metrics={"tiercel_engine_restarts_total.signal": 1.0})
    run = replace(good_run(), samples=[*good_run().samples, crashed])
    assert missed(run) == []  # the first sample of a series: its earlier value is not known
    before = sample(89.0, metrics={"tiercel_engine_restarts_total.signal": 0.0})
    run = replace(good_run(), samples=[*good_run().samples, before, crashed])
    assert missed(run) == ["1 kills of the engine, 2 restarts: 1 each"]


def test_a_slope_is_per_minute_and_needs_two_points() -> None:
    assert slope_per_min([(0.0, 5.0), (30.0, 6.0), (60.0, 7.0)]) == pytest.approx(2.0)
    assert slope_per_min([(0.0, 5.0)]) == 0.0


def test_growth_compares_highest_values() -> None:
    assert growth([(0.0, 9.0), (1.0, 3.0), (2.0, 10.0), (3.0, 1.0)], 2.0) == 1.0
    assert growth([(0.0, 9.0), (2.0, 8.0)], 2.0) == 0.0


def test_silence_counts_only_while_sequences_wait() -> None:
    def silent(at_s: float, waiting: float) -> Sample:
        return sample(at_s, metrics={"vllm:generation_tokens_total": 7.0, "vllm:num_requests_waiting": waiting})

    assert longest_silence_s([silent(float(at_s), 1.0) for at_s in range(5)]) == 4.0
    assert longest_silence_s([silent(float(at_s), 0.0) for at_s in range(5)]) == 0.0
    busy = [sample(float(at_s), metrics={"vllm:num_requests_waiting": 1.0}) for at_s in range(5)]
    assert longest_silence_s(busy) == 0.0


def test_a_counter_that_starts_again_keeps_its_sum() -> None:
    samples = [sample(0.0, metrics={"x": value}) for value in (3.0, 5.0, 1.0, 2.0)]
    assert increase(samples, "x") == 4.0
    assert increase(itertools.islice(samples, 0), "x") == 0.0


def test_limits_of_a_long_run_are_those_of_the_scorecard() -> None:
    limits = limits_of(1800)
    assert (limits.window_s, limits.slope_bytes_per_min) == (300.0, MIB)
    assert (limits.median_factor, limits.p99_factor) == (1.2, 1.5)


def test_a_page_is_read_by_name_and_label() -> None:
    page = '# HELP a b\na_total{engine="0",tier="hbm"} 3\na_total{engine="0",tier="ddr"} 4.5\nb 1\nc_bucket{le="1"} 2\n'
    assert read_page(page) == {"a_total.hbm": 3.0, "a_total.ddr": 4.5, "b": 1.0}


def test_the_lines_of_requests_are_counted_by_id() -> None:
    line = '{"event": "request_done", "request_id": "a"}'
    log = f'x\n{line}\n{{"event": "ready"}}\n{line}'
    assert count_lines(log) == Counter({"a": 2})


# ---- the client


def answer_to(response: bytes, leave_after: int | None = None) -> WholeAnswer:
    """Return how the client understands a response."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(response)
        await writer.drain()
        writer.close()

    async def talk() -> WholeAnswer:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        async with server:
            answer = WholeAnswer(CHAT, {"stream": True})
            port = server.sockets[0].getsockname()[1]
            await ask(f"http://127.0.0.1:{port}", answer, leave_after=leave_after)
            return answer

    return asyncio.run(talk())


def chunked(*events: str) -> bytes:
    chunks = (f"data: {event}\n\n".encode() for event in events)
    body = b"".join(b"%x\r\n%s\r\n" % (len(chunk), chunk) for chunk in chunks)
    return b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n" + body


PIECES = ('{"choices":[{"delta":{"content":"a"}}]}', '{"choices":[{"delta":{"content":"b"},"finish_reason":"stop"}]}')
END = b"0\r\n\r\n"


def test_a_whole_stream_is_answered_with_its_text_and_usage() -> None:
    usage = '{"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":2}}'
    answer = answer_to(chunked(*PIECES, usage, "[DONE]") + END)
    assert (answer.outcome, answer.said) == (Outcome.ANSWERED, ("ab", "stop", 3, 2))


@pytest.mark.parametrize(
    ("response", "outcome"),
    [
        (chunked(*PIECES), Outcome.BROKEN), (chunked(*PIECES) + END, Outcome.BROKEN), (b"", Outcome.BROKEN),
        (chunked(PIECES[0], '{"error":{"code":"engine_crashed","message":"x"}}', "[DONE]") + END, Outcome.FAILED),
        (chunked(PIECES[0], "[DONE]") + END, Outcome.BROKEN),
        (b"HTTP/1.1 503 x\r\nContent-Length: 2\r\n\r\n{}", Outcome.FAILED),
        (b"HTTP/1.1 400 x\r\nContent-Length: 2\r\n\r\n{}", Outcome.REFUSED),
    ],
)  # fmt: skip
def test_an_answer_that_does_not_end_well_is_told_apart(response: bytes, outcome: Outcome) -> None:
    assert answer_to(response).outcome is outcome


def test_a_client_that_leaves_has_left() -> None:
    assert answer_to(chunked(*PIECES, "[DONE]") + END, leave_after=1).outcome is Outcome.LEFT
