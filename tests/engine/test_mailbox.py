"""The engine's end of the socket."""

import socket
from collections.abc import Iterator

import pytest

from tiercel.engine.mailbox import EngineMailbox, receive_start
from tiercel.settings.settings import EngineSettings
from tiercel.values.errors import WireError
from tiercel.values.ids import SeqId
from tiercel.wire.frames import Abort, FrameReader, FromEngine, Loading, Quit, Report, Start, encode_frame


@pytest.fixture
def ends() -> Iterator[tuple[EngineMailbox, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield EngineMailbox(ours), theirs


def test_frames_arrive_whole_however_they_are_cut(ends: tuple[EngineMailbox, socket.socket]) -> None:
    mailbox, peer = ends
    frames = encode_frame(Start(settings=EngineSettings(model="m"))) + encode_frame(Abort((SeqId(5),)))
    taken = []
    for at in range(0, len(frames), 7):
        peer.sendall(frames[at : at + 7])
        taken += mailbox.take()
    assert [type(message) for message in taken] == [Start, Abort]
    assert mailbox.take() == []
    assert not mailbox.is_closed


def test_bytes_that_the_socket_does_not_accept_are_sent_later(ends: tuple[EngineMailbox, socket.socket]) -> None:
    mailbox, peer = ends
    report = Report(seqs=bytes(8 * 100_000), tokens=bytes(4 * 100_000))
    for _ in range(5):
        mailbox.post(report)
    mailbox.post(Loading("last"))
    assert mailbox.has_unsent
    reader: FrameReader[FromEngine] = FrameReader(FromEngine)
    received: list[FromEngine] = []
    while len(received) < 6:
        received += reader.feed(peer.recv(1 << 20))
        mailbox.flush()
    assert received[:5] == [report] * 5
    assert received[5] == Loading("last")
    assert not mailbox.has_unsent


def test_a_closed_peer_is_detected(ends: tuple[EngineMailbox, socket.socket]) -> None:
    mailbox, peer = ends
    peer.sendall(encode_frame(Quit()))
    peer.close()
    assert mailbox.take() == [Quit()]
    assert mailbox.is_closed
    mailbox.wait(10.0)  # does not sleep
    mailbox.post(Loading("into the void"))


def test_a_peer_that_closes_without_a_frame_is_an_error(ends: tuple[EngineMailbox, socket.socket]) -> None:
    mailbox, peer = ends
    peer.close()
    with pytest.raises(WireError):
        receive_start(mailbox)
