"""The server's client of the engine process."""

import asyncio
import contextlib
import socket
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from tests.server.fake_engine import FakeEngine, Script
from tests.server.harness import until
from tiercel.server.client.client import EngineClient
from tiercel.server.client.collector import Delivery, Mailbox, StreamEnd
from tiercel.server.client.sequences import SequenceFacts, SequenceStage, SequenceStart
from tiercel.server.client.status import EngineStartError, EngineState
from tiercel.server.metrics.registry import ServerMetrics
from tiercel.settings.settings import EngineSettings
from tiercel.values.clock import ManualClock
from tiercel.values.outcome import FinishReason, Gauges
from tiercel.values.request import SamplingParams, pack_tokens
from tiercel.wire.frames import Failed, Loading, Report, encode_frame


def _start(max_tokens: int = 3, prompt: tuple[int, ...] = (5, 6)) -> SequenceStart:
    params = SamplingParams(max_tokens=max_tokens)
    return SequenceStart(prompt=pack_tokens(prompt), num_prompt=len(prompt), params=params, n=1)


@contextlib.asynccontextmanager
async def _pair(script: Script, clock: ManualClock) -> AsyncIterator[tuple[EngineClient, FakeEngine]]:
    client, engine = EngineClient(clock, ServerMetrics("tiny")), FakeEngine(script)
    ours, theirs = socket.socketpair()
    await engine.open(theirs)
    await client.open(ours, EngineSettings(model="folder"))
    try:
        yield client, engine
    finally:
        client.close()
        engine.die()
        await engine.closed.wait()


def _with_pair(
    test: Callable[[EngineClient, FakeEngine, ManualClock], Awaitable[None]], script: Script | None = None
) -> None:
    async def run() -> None:
        clock = ManualClock()
        async with _pair(script or Script(), clock) as (client, engine):
            await test(client, engine, clock)

    asyncio.run(run())


async def _read_all(mailbox: Mailbox) -> list[Delivery]:
    news: list[Delivery] = []
    while not any(delivery.finished for delivery in news):
        taken = await mailbox.take()
        assert not isinstance(taken, StreamEnd)
        news += taken
    return news


def test_a_sequence_delivers_its_tokens_in_order_and_one_end() -> None:
    async def test(client: EngineClient, engine: FakeEngine, _clock: ManualClock) -> None:
        await client.status.wait_ready()
        mailbox = Mailbox()
        client.submit([_start(5)], mailbox, 0.0)
        news = await _read_all(mailbox)
        assert [token for delivery in news for token in delivery.tokens] == [5, 6, 5, 6, 5]
        assert [d.finished.reason for d in news if d.finished] == [FinishReason.LENGTH]
        assert client.sequences.num_unfinished == 0
        assert engine.start is not None
        assert engine.start.settings.model == "folder"

    _with_pair(test)


def test_ids_are_never_reused() -> None:
    async def test(client: EngineClient, engine: FakeEngine, _clock: ManualClock) -> None:
        await client.status.wait_ready()
        first = client.submit([_start(), _start()], Mailbox(), 0.0)
        second = client.submit([_start()], Mailbox(), 0.0)
        assert len({*first.seqs, *second.seqs}) == 3

    _with_pair(test)


def test_an_aborted_sequence_delivers_nothing_more_and_is_forgotten() -> None:
    async def test(client: EngineClient, engine: FakeEngine, _clock: ManualClock) -> None:
        await client.status.wait_ready()
        mailbox = Mailbox()
        submission = client.submit([_start(200), _start(200)], mailbox, 0.0)
        await mailbox.take()
        client.abort(submission.seqs, FinishReason.STOP)
        client.abort(submission.seqs, FinishReason.ABORT)
        assert (client.sequences.num_open, client.sequences.num_tokenless) == (0, 0)
        await until(lambda: client.sequences.num_unfinished == 0)
        assert engine.aborted == [(seq, FinishReason.STOP) for seq in submission.seqs]
        assert {facts.finished.reason for facts in submission.facts if facts.finished} == {FinishReason.STOP}

    _with_pair(test, Script(step_s=0.01))


def test_the_death_of_the_engine_is_delivered_after_the_last_tokens() -> None:
    async def test(client: EngineClient, engine: FakeEngine, _clock: ManualClock) -> None:
        await client.status.wait_ready()
        mailbox = Mailbox()
        submission = client.submit([_start(100)], mailbox, 0.0)
        await client.status.wait_gone()
        assert client.status.state is EngineState.DEAD
        first = await mailbox.take()
        assert isinstance(first, tuple)
        assert len(first[0].tokens) == 4
        assert isinstance(await mailbox.take(), StreamEnd)
        assert client.sequences.num_unfinished == 0
        assert submission.facts[0].finished is not None
        assert submission.facts[0].finished.reason is FinishReason.ERROR
        late = Mailbox()
        client.submit([_start()], late, 0.0)
        assert isinstance(await late.take(), StreamEnd)
        assert client.sequences.num_unfinished == 0

    _with_pair(test, Script(die_at_step=4))


def test_a_failed_start_gives_the_engines_message() -> None:
    async def test(client: EngineClient, _engine: FakeEngine, _clock: ManualClock) -> None:
        with pytest.raises(EngineStartError, match="no weights"):
            await client.status.wait_ready()
        assert client.status.state is EngineState.FAILED
        assert client.status.failure is not None
        assert client.status.failure.code == "fake.failure"

    _with_pair(test, Script(failure="no weights"))


def test_the_error_of_an_engine_that_dies_while_loading_names_the_stage() -> None:
    async def test(client: EngineClient, engine: FakeEngine, _clock: ManualClock) -> None:
        await until(lambda: client.status.stage == "loading weights")
        engine.die()
        with pytest.raises(EngineStartError, match="loading weights"):
            await client.status.wait_ready()

    _with_pair(test, Script(load_s=30))


def test_bytes_that_are_no_frame_end_the_engine() -> None:
    async def test() -> None:
        client = EngineClient(ManualClock(), ServerMetrics("tiny"))
        ours, theirs = socket.socketpair()
        with theirs:
            await client.open(ours, EngineSettings(model="folder"))
            theirs.sendall(b"\xff" * 16)
            await client.status.wait_gone()
            assert client.status.state is EngineState.DEAD

    asyncio.run(test())


def test_silence_counts_only_with_work_pending() -> None:
    async def test(client: EngineClient, engine: FakeEngine, clock: ManualClock) -> None:
        await client.status.wait_ready()
        clock.advance(100)
        assert client.status.silence_s() == 0
        client.submit([_start()], Mailbox(), clock.now_s())
        assert client.status.silence_s() == 0
        clock.advance(7)
        assert client.status.silence_s() == 7

    _with_pair(test, Script(hang_at_step=0))


class PromptRecorder:
    """A watcher that records the reports of prompt tokens."""

    def __init__(self) -> None:
        self.prompts: list[tuple[int, float]] = []

    def on_moved(self, facts: SequenceFacts, before: SequenceStage | None) -> None:
        pass

    def on_finished(self, facts: SequenceFacts) -> None:
        pass

    def on_prompts(self, tokens: int, busy_s: float) -> None:
        self.prompts.append((tokens, busy_s))


def test_prompt_tokens_are_reported_only_for_steps_after_which_sequences_wait() -> None:
    async def test() -> None:
        clock, recorder = ManualClock(10.0), PromptRecorder()
        client, engine = EngineClient(clock, ServerMetrics("tiny"), recorder), FakeEngine(Script(hang_at_step=0))
        ours, theirs = socket.socketpair()
        await engine.open(theirs)
        await client.open(ours, EngineSettings(model="folder"))
        await client.status.wait_ready()

        def report(seq: int, step_tokens: int) -> None:
            clock.advance(0.1)
            seqs, tokens = array("Q", [seq] if seq else []), array("I", [5] if seq else [])
            gauges = Gauges(step_tokens=step_tokens)
            report = Report(seqs=seqs.tobytes(), tokens=tokens.tobytes(), gauges=gauges)
            client.connection.data_received(encode_frame(report))

        client.submit([_start()], Mailbox(), 10.0)
        report(1, 20)  # no other sequence waits, so that the step says nothing of the speed
        assert recorder.prompts == []
        client.submit([_start()], Mailbox(), 10.1)
        report(0, 256)
        report(1, 257)  # one of the tokens is that of a decode
        assert recorder.prompts == [(256, pytest.approx(0.1)), (256, pytest.approx(0.1))]
        client.close()
        engine.die()
        await engine.closed.wait()

    asyncio.run(test())


def test_a_drain_gives_up_the_youngest_queued_sequences() -> None:
    async def test(client: EngineClient, engine: FakeEngine, _clock: ManualClock) -> None:
        await client.status.wait_ready()
        boxes = [Mailbox() for _ in range(3)]
        for mailbox in boxes:
            client.submit([_start(50)], mailbox, 0.0)
        await until(lambda: client.gauges.num_waiting == 2)
        client.refuse_queued(StreamEnd("bye", "shutting_down"))
        assert client.sequences.num_open == 1
        assert isinstance(await boxes[2].take(), StreamEnd)
        assert isinstance(await boxes[1].take(), StreamEnd)
        client.refuse_all(StreamEnd("bye", "shutting_down"))
        assert client.sequences.num_open == 0
        await until(lambda: engine.live == 0)

    _with_pair(test, Script(step_s=0.02, max_running=1))


def test_a_drain_keeps_the_sequences_that_the_engine_has_admitted() -> None:
    async def test(client: EngineClient, engine: FakeEngine, _clock: ManualClock) -> None:
        await client.status.wait_ready()
        client.submit([_start(50)], Mailbox(), 0.0)
        await until(lambda: client.gauges.num_waiting == 1)
        client.submit([_start(50)], Mailbox(), 0.0)
        client.refuse_queued(StreamEnd("bye", "shutting_down"))
        assert client.sequences.num_open == 2

    _with_pair(test, Script(step_s=0.02, preempted=1))


def test_an_engine_that_hangs_while_it_replaces_another_one_is_noticed() -> None:
    async def check(client: EngineClient, engine: FakeEngine, clock: ManualClock) -> None:
        await client.status.wait_ready()
        client.on_lost = lambda: None
        engine.die()
        await until(lambda: client.status.state is EngineState.RESTARTING)
        clock.advance(100.0)  # the dead engine is waited for
        ours, theirs = socket.socketpair()
        with theirs:
            await client.open(ours, EngineSettings(model="folder"))
            clock.advance(50.0)
            assert not client.status.is_load_stalled
            theirs.sendall(encode_frame(Loading("weights")))
            await until(lambda: client.status.stage == "weights")
            clock.advance(50.0)
            assert not client.status.is_load_stalled
            clock.advance(50.0)
            assert client.status.is_load_stalled
            client.close()

    _with_pair(check)


def test_the_failure_of_an_engine_is_not_that_of_the_next_one() -> None:
    async def check(client: EngineClient, engine: FakeEngine, clock: ManualClock) -> None:
        await client.status.wait_ready()
        client.on_lost = lambda: None
        engine.die()
        await until(lambda: client.status.state is EngineState.RESTARTING)
        for failure in (Failed("device.memory", "no memory"), None):
            ours, theirs = socket.socketpair()
            with theirs:
                await client.open(ours, EngineSettings(model="folder"))
                assert client.status.failure is None
                if failure is not None:
                    theirs.sendall(encode_frame(failure))
                    await until(lambda: client.status.failure is not None)
                client.close()

    _with_pair(check)


@pytest.mark.parametrize("is_replaced", [True, False])
def test_sequences_that_end_while_no_engine_lives_are_counted_with_their_own_outcomes(is_replaced: bool) -> None:
    """The engine that should report them is dead; the next one never learns of them, or there is none."""

    async def test(client: EngineClient, engine: FakeEngine, _clock: ManualClock) -> None:
        await client.status.wait_ready()
        client.on_lost = lambda: None
        reasons = (FinishReason.TIMEOUT, FinishReason.STOP, FinishReason.ABORT)
        submissions = [client.submit([_start(200)], Mailbox(), 0.0) for _ in reasons]
        await until(lambda: client.sequences.num_tokenless == 0)
        engine.die()
        await until(lambda: client.status.state is EngineState.RESTARTING)
        for submission, reason in zip(submissions, reasons, strict=True):
            client.abort(submission.seqs, reason)
        if not is_replaced:
            client.give_up()
        else:
            ours, theirs = socket.socketpair()
            following = FakeEngine(Script())
            await following.open(theirs)
            await client.open(ours, EngineSettings(model="folder"))
            await until(lambda: client.status.state is EngineState.READY)
            assert following.submitted == []
        ends = [facts.finished for submission in submissions for facts in submission.facts]
        assert [None if end is None else end.reason for end in ends] == list(reasons)
        assert all(end is not None and end.error is None and end.num_outputs > 0 for end in ends)
        assert client.sequences.num_unfinished == 0
        client.close()

    _with_pair(test, Script(step_s=0.02))
