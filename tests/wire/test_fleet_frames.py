"""Frames between fronts and hosts: cut anywhere they are whole again, and limits hold before memory is taken."""

import random
import struct
from array import array
from typing import cast

import pytest

from tests.seeds import fresh_seeds
from tiercel.values.errors import WireError
from tiercel.values.ids import SeqId
from tiercel.values.outcome import Absence, Finished, FinishReason, FirstToken, Gauges, SequenceGauges, SequenceState
from tiercel.values.request import Request, SamplingParams, pack_tokens
from tiercel.values.tenant import Tenants
from tiercel.wire.fleet_frames import (
    WINDOW_BITS,
    BodyDecoder,
    EngineDied,
    FrameSplitter,
    FrontFrame,
    HostFrame,
    HostLeaving,
    Ping,
    Pong,
    Welcome,
    frame_of,
    to_front,
    to_host,
    trail_to_front,
)
from tiercel.wire.frames import Abort, Quit, Report, SetTenants, Submit, encode_frame
from tiercel.wire.step_record import ANY_SEQ

BASE = 5 << WINDOW_BITS
REQUEST = Request(id=SeqId(7), prompt=pack_tokens([1, 2]), params=SamplingParams(max_tokens=3), arrival_s=10.0)
TO_HOST: list[FrontFrame] = [Ping(1.5), Submit(REQUEST), Abort((SeqId(7),)), SetTenants(Tenants(1, ()))]
TO_FRONT: list[HostFrame] = [
    Welcome(b"x" * 16, BASE),
    Pong(1.5, 2.5),
    EngineDied(kind="signal", cause="killed by SIGSEGV", had_progress=True, ends={SeqId(BASE + 7): 4}),
    HostLeaving(),
    Report(seqs=b"\x01" * 8, tokens=b"\x02" * 4),
]


def to_host_decoder() -> BodyDecoder[FrontFrame]:
    return BodyDecoder(cast(type[FrontFrame], FrontFrame))


@pytest.mark.parametrize("seed", [1, 2, *fresh_seeds(2)])
def test_frames_survive_any_cut(seed: int) -> None:
    rng = random.Random(seed)
    sent = [(rng.randrange(1 << 32), rng.choice(TO_FRONT)) for _ in range(40)]
    stream = b"".join(frame_of(message, epoch) for epoch, message in sent)
    splitter, decoder = FrameSplitter(), BodyDecoder(cast(type[HostFrame], HostFrame))
    found: list[tuple[int, HostFrame]] = []
    while stream:
        size = rng.choice([1, 3, 8, 50, 5000])
        found += [(frame.epoch, decoder.decode(frame.body)) for frame in splitter.feed(stream[:size])]
        stream = stream[size:]
    assert found == sent


def test_frames_of_the_engine_have_no_epoch() -> None:
    frames = FrameSplitter(has_epochs=False).feed(encode_frame(Report()) + encode_frame(HostLeaving()))  # type: ignore[arg-type]
    assert [frame.epoch for frame in frames] == [0, 0]


def test_the_limit_is_checked_with_the_head_alone() -> None:
    splitter = FrameSplitter(100)
    with pytest.raises(WireError, match="limit=100"):
        splitter.feed(struct.pack("<II", 101, 1))
    assert [frame.body for frame in FrameSplitter(100).feed(struct.pack("<II", 3, 1) + b"abc")] == [b"abc"]


def test_a_front_cannot_send_what_only_a_daemon_may() -> None:
    with pytest.raises(WireError, match="unreadable"):
        to_host_decoder().decode(encode_frame(Quit())[4:])


@pytest.mark.parametrize("seed", [3, *fresh_seeds(1)])
def test_damaged_bodies_raise_nothing_but_wire_errors(seed: int) -> None:
    rng = random.Random(seed)
    decoder = to_host_decoder()
    for _ in range(2000):
        body = bytearray(frame_of(rng.choice(TO_HOST), 1)[8:])
        for _ in range(rng.randint(1, 4)):
            body[rng.randrange(len(body))] = rng.randrange(256)
        try:
            decoder.decode(bytes(body[: rng.randint(1, len(body))]))
        except WireError:
            continue


def test_requests_and_reports_change_ids_and_clocks() -> None:
    sent = to_host(REQUEST, BASE, 100.0)
    assert (sent.id, sent.arrival_s, sent.prompt) == (BASE + 7, 110.0, REQUEST.prompt)
    absence = Absence(120.0, 121.0, "growth")
    end = Finished(
        seq=sent.id, reason=FinishReason.STOP, num_prompt=2, num_outputs=1, num_cached=0, absences=(absence,)
    )
    gauges = Gauges(
        num_running=2,
        sequences=(
            SequenceGauges(SeqId(BASE + 7), SequenceState.RUNNING, 3, 0),
            SequenceGauges(SeqId(9 << WINDOW_BITS), SequenceState.RUNNING, 3, 0),
        ),
    )
    report = Report(
        seqs=array("Q", [BASE + 7, BASE + 8, 9 << WINDOW_BITS]).tobytes(),
        tokens=array("I", [70, 80, 90]).tobytes(),
        firsts=(FirstToken(sent.id, 115.0), FirstToken(SeqId(BASE + 8), 116.0)),
        finished=(end,),
        gauges=gauges,
    )
    found = to_front(report, BASE, 100.0, {SeqId(7): None})
    assert list(memoryview(found.seqs).cast("Q")) == [7]
    assert list(memoryview(found.tokens).cast("I")) == [70]
    assert found.firsts == (FirstToken(SeqId(7), 15.0),)
    assert [(one.seq, one.absences) for one in found.finished] == [(7, (Absence(20.0, 21.0, "growth"),))]
    assert found.gauges is not None
    assert [one.seq for one in found.gauges.sequences] == [7]
    assert found.gauges.num_running == 2


def test_a_trail_keeps_the_number_of_foreign_sequences() -> None:
    died = EngineDied(
        kind="exit", cause="", had_progress=False, entering=SeqId(BASE + 7), ends={SeqId(BASE + 7): 4, SeqId(3): 9}
    )
    trail = trail_to_front(died, BASE, {SeqId(7): None})
    assert (trail.entering, trail.end_by_seq) == (7, {7: 4, 3: 9})
    everyone = EngineDied(kind="exit", cause="", had_progress=False, entering=ANY_SEQ)
    assert trail_to_front(everyone, BASE, {}).entering == ANY_SEQ
