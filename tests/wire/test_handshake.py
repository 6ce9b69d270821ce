"""The handshake between a front and a host: who knows the secret is let in, once for each connection."""

import struct

import pytest

from tiercel.values.errors import WireError
from tiercel.wire.handshake import (
    CHALLENGE_BYTES,
    HELLO_BYTES,
    VERDICT_BYTES,
    VERSION,
    FrontHandshake,
    HelloVerdict,
    HostHandshake,
)

SECRET = b"a secret of sixteen bytes or more"
FRONT = b"front-identity-1"


def host(nonce: int = 1, secret: bytes = SECRET) -> HostHandshake:
    return HostHandshake(secret, nonce.to_bytes(16, "little"))


def front(nonce: int = 2, secret: bytes = SECRET) -> FrontHandshake:
    return FrontHandshake(secret, FRONT, nonce.to_bytes(16, "little"))


def with_version(message: bytes, version: int) -> bytes:
    return message[:8] + struct.pack("<I", version) + message[12:]


def test_equal_secrets_are_accepted_by_both() -> None:
    one, other = host(), front()
    challenge = one.challenge
    hello = other.answer(challenge)
    assert (len(challenge), len(hello)) == (CHALLENGE_BYTES, HELLO_BYTES)
    result = one.judge(hello)
    assert (result.verdict, result.front, len(result.reply)) == (HelloVerdict.ACCEPTED, FRONT, VERDICT_BYTES)
    other.check(result.reply)


def test_another_secret_is_refused() -> None:
    other = front(secret=b"another secret, also long enough")
    result = host().judge(other.answer(host().challenge))
    assert result.verdict is HelloVerdict.WRONG_SECRET
    with pytest.raises(WireError, match="--engine-secret-file"):
        other.check(result.reply)


def test_a_replayed_hello_is_refused() -> None:
    hello = front().answer(host(1).challenge)
    assert host(1).judge(hello).verdict is HelloVerdict.ACCEPTED
    assert host(3).judge(hello).verdict is HelloVerdict.WRONG_SECRET


def test_a_host_without_the_secret_is_refused_by_the_front() -> None:
    other = front()
    other.answer(host().challenge)
    forged = host(secret=b"another secret, also long enough")
    accepted = forged.judge(front(secret=b"another secret, also long enough").answer(forged.challenge))
    with pytest.raises(WireError, match="does not know the secret"):
        other.check(accepted.reply)


def test_another_version_is_named_by_both_sides() -> None:
    with pytest.raises(WireError, match=f"version {VERSION + 1} of the wire, this front version {VERSION}"):
        front().answer(with_version(host().challenge, VERSION + 1))
    other = front()
    result = host().judge(with_version(other.answer(host().challenge), VERSION + 1))
    assert result.verdict is HelloVerdict.WRONG_VERSION
    with pytest.raises(WireError, match="update one"):
        other.check(with_version(result.reply, VERSION + 7))


def test_a_full_host_says_so_to_those_only_who_know_the_secret() -> None:
    other = front()
    result = host().judge(other.answer(host().challenge), is_full=True)
    with pytest.raises(WireError, match="as many fronts as it may"):
        other.check(result.reply)
    stranger = front(secret=b"another secret, also long enough").answer(host().challenge)
    assert host().judge(stranger, is_full=True).verdict is HelloVerdict.WRONG_SECRET


@pytest.mark.parametrize("position", range(0, HELLO_BYTES, 7))
def test_a_changed_bit_is_refused(position: int) -> None:
    hello = bytearray(front().answer(host().challenge))
    hello[position] ^= 1
    try:
        assert host().judge(bytes(hello)).verdict is not HelloVerdict.ACCEPTED
    except WireError:
        assert position < 8


def test_garbage_in_place_of_a_host_is_told_apart() -> None:
    with pytest.raises(WireError, match="no tiercel engine"):
        front().answer(b"HTTP/1.1 400 Bad Request\r\n\r\n".ljust(CHALLENGE_BYTES, b"x")[:CHALLENGE_BYTES])
    other = front()
    other.answer(host().challenge)
    with pytest.raises(WireError, match="not one of a tiercel engine"):
        other.check(bytes(VERDICT_BYTES))
