"""The other fronts: charges are counted once, shares add up, and a silent front counts no more."""

import random

import pytest

from tests.seeds import fresh_seeds
from tiercel.fleet.peer_uses import LEASE_S, PeerCharge, PeerUses
from tiercel.values.ids import TenantId
from tiercel.values.limit_use import LimitUse

ACME = TenantId("acme")


def test_a_message_is_charged_once_however_often_and_late_it_comes() -> None:
    peers = PeerUses()
    first = LimitUse(requests=7, tokens=70, requests_left=0.3, tokens_left=0.5)
    # A front that was not heard before: what it has allowed is in the level that it names.
    assert peers.take(b"one", 1, {ACME: first}, 0) == {ACME: PeerCharge(requests_left=0.3, tokens_left=0.5)}
    assert peers.take(b"one", 1, {ACME: first}, 0.1) == {}
    second = LimitUse(requests=9, tokens=60)
    assert peers.take(b"one", 2, {ACME: second}, 0.5) == {ACME: PeerCharge(2, -10)}
    assert peers.take(b"one", 2, {ACME: second}, 0.6) == {}
    assert peers.take(b"one", 1, {ACME: first}, 0.7) == {}  # by way of a slower engine
    assert peers.take(b"one", 3, {}, 1.0) == {}
    third = LimitUse(requests=10, tokens=60)
    assert peers.take(b"one", 4, {ACME: third}, 1.5) == {ACME: PeerCharge(1, 0)}


def test_a_front_that_is_known_is_charged_in_full_for_a_tenant_that_becomes_active() -> None:
    peers = PeerUses()
    peers.take(b"one", 1, {}, 0)
    active = LimitUse(life=1, requests=30, tokens=300, requests_left=0.5)
    assert peers.take(b"one", 2, {ACME: active}, 0.5) == {ACME: PeerCharge(30, 300)}
    # With other limits the totals begin again.
    assert peers.take(b"one", 3, {ACME: LimitUse(life=2, requests=4)}, 1.0) == {ACME: PeerCharge(4, 0)}


def test_sequences_of_a_front_count_until_it_says_otherwise_or_its_lease_ends() -> None:
    peers = PeerUses()
    peers.take(b"one", 1, {ACME: LimitUse(num_open=3, num_reserved=1)}, 0)
    peers.take(b"two", 1, {ACME: LimitUse(num_open=4, num_reserved=2)}, 1)
    assert (peers.num_present, peers.num_open(ACME), peers.num_reserved(ACME)) == (2, 7, 3)
    peers.take(b"two", 2, {}, 1.5)
    assert (peers.num_present, peers.num_open(ACME), peers.num_reserved(ACME)) == (2, 3, 1)
    peers.expire(LEASE_S + 0.1)
    assert (peers.num_present, peers.num_open(ACME)) == (1, 0)
    # A front that was away for a moment is charged for that time when it is heard again.
    peers.take(b"one", 2, {ACME: LimitUse(requests=2)}, 10)
    assert peers.take(b"one", 3, {ACME: LimitUse(requests=5)}, 20) == {ACME: PeerCharge(3, 0)}


@pytest.mark.parametrize("seed", [1, *fresh_seeds(3)])
def test_the_shares_of_fronts_that_know_the_same_add_up_to_one(seed: int) -> None:
    rng = random.Random(seed)
    asked = [rng.uniform(0, 50) * (rng.random() < 0.7) for _ in range(rng.randint(1, 9))]
    shares: list[float] = []
    for own, amount in enumerate(asked):
        peers = PeerUses()
        for other, heard in enumerate(asked):
            if other != own:
                peers.take(bytes([other]), 1, {ACME: LimitUse(asked=heard)} if heard else {}, 0)
        shares.append(peers.share(ACME, amount))
    assert sum(shares) == pytest.approx(1), seed
    assert min(shares) > 0


def test_many_fronts_that_come_and_go_are_forgotten() -> None:
    peers = PeerUses()
    for number in range(1000):
        peers.take(number.to_bytes(16, "big"), 1, {ACME: LimitUse(num_open=1)}, number * 0.01)
    assert peers.num_present <= 256
    peers.expire(1000)
    assert peers.num_present == 0
