"""The store of responses: limits, isolation, shared turns, expiry."""

import random

import msgspec
import pytest

from tests.seeds import fresh_seeds
from tiercel.clock import ManualClock
from tiercel.server.api.response_store import ENTRY_BYTES, ConversationTurn, ResponseStore, StoredResponse, StoreLimits

ROOMY = StoreLimits(tenant_responses=100, tenant_bytes=1_000_000, total_bytes=10_000_000, lifetime_s=60.0)


def _store(limits: StoreLimits = ROOMY) -> tuple[ResponseStore, ManualClock, list[tuple[str, int]]]:
    clock, forgotten = ManualClock(), list[tuple[str, int]]()
    return (
        ResponseStore(lambda: limits, clock, lambda reason, count: forgotten.append((reason, count))),
        clock,
        forgotten,
    )


def _turn(parent: ConversationTurn | None, name: str, size: int = 10) -> ConversationTurn:
    turn = ConversationTurn.begin(parent, [{"type": "message", "id": f"in_{name}", "content": "x" * size}])
    return turn.ended(msgspec.json.encode([{"type": "message", "id": f"out_{name}"}]))


def _entry(name: str, turn: ConversationTurn | None = None) -> StoredResponse:
    return StoredResponse(name, b'{"output":', b"}", turn or _turn(None, name), is_over=True)


def test_a_response_is_found_by_its_tenant_alone() -> None:
    store, _, _ = _store()
    store.put("a", _entry("r"))
    found = store.get("a", "r")
    assert found is not None
    assert found.body == b'{"output":[{"type":"message","id":"out_r"}]}'
    assert store.get("b", "r") is None
    assert not store.remove("b", "r")
    assert store.item("a", "in_r") == {"type": "message", "id": "in_r", "content": "x" * 10}
    assert store.item("b", "in_r") is None
    assert store.remove("a", "r")
    assert (store.get("a", "r"), store.item("a", "in_r"), store.num_bytes, store.num_responses) == (None, None, 0, 0)


def test_the_least_recently_used_response_of_the_tenant_gives_way() -> None:
    store, _, forgotten = _store(msgspec.structs.replace(ROOMY, tenant_responses=2))
    store.put("other", _entry("z"))
    store.put("a", _entry("r1"))
    store.put("a", _entry("r2"))
    assert store.get("a", "r1") is not None
    store.put("a", _entry("r3"))
    assert [store.get("a", name) is not None for name in ("r1", "r2", "r3")] == [True, False, True]
    assert store.get("other", "z") is not None
    assert forgotten == [("full", 1)]


def test_beyond_the_total_the_largest_tenant_gives_way() -> None:
    one = ENTRY_BYTES + 3000
    store, _, _ = _store(msgspec.structs.replace(ROOMY, total_bytes=3 * one))
    for name in ("a1", "a2"):
        store.put("a", _entry(name, _turn(None, name, 2000)))
    store.put("b", _entry("b1", _turn(None, "b1", 2000)))
    store.put("b", _entry("b2", _turn(None, "b2", 10)))
    assert store.get("a", "a1") is None
    assert all(store.get(tenant, name) is not None for tenant, name in (("a", "a2"), ("b", "b1"), ("b", "b2")))
    store.check_integrity()


def test_a_response_larger_than_the_limit_is_not_kept() -> None:
    store, _, forgotten = _store(msgspec.structs.replace(ROOMY, tenant_bytes=5000))
    store.put("a", _entry("r", _turn(None, "r", 6000)))
    assert store.get("a", "r") is None
    assert (store.num_bytes, forgotten) == (0, [("full", 1)])


def test_nothing_is_kept_without_room_for_responses() -> None:
    store, _, _ = _store(msgspec.structs.replace(ROOMY, tenant_responses=0))
    assert not store.keeps_any
    store.put("a", _entry("r"))
    assert (store.get("a", "r"), store.num_responses) == (None, 0)


def test_a_response_expires_some_time_after_its_last_use() -> None:
    store, clock, forgotten = _store()
    store.put("a", _entry("r1"))
    store.put("a", _entry("r2"))
    clock.advance(40)
    assert store.get("a", "r1") is not None
    clock.advance(30)
    assert store.get("a", "r2") is None
    assert store.get("a", "r1") is not None
    assert forgotten == [("expired", 1)]
    store.check_integrity()


def test_a_turn_lives_while_a_later_turn_refers_to_it() -> None:
    store, _, _ = _store()
    first = _turn(None, "1", 1000)
    store.put("a", _entry("r1", first))
    second = _turn(first, "2")
    store.put("a", _entry("r2", second))
    before = store.num_bytes
    assert store.remove("a", "r1")
    assert store.num_bytes > before - 1000 - ENTRY_BYTES  # the turn is still counted
    assert [item["id"] for item in second.conversation()] == ["in_1", "out_1", "in_2", "out_2"]
    assert store.item("a", "out_1") is not None
    assert store.remove("a", "r2")
    assert (store.num_bytes, store.item("a", "out_1")) == (0, None)


@pytest.mark.parametrize("seed", [1, 2, *fresh_seeds(2)])
def test_the_books_agree_after_random_changes(seed: int) -> None:
    rng = random.Random(seed)
    limits = StoreLimits(tenant_responses=6, tenant_bytes=30_000, total_bytes=60_000, lifetime_s=50.0)
    store, clock, _ = _store(limits)
    turns: dict[str, list[ConversationTurn]] = {name: [] for name in "abc"}
    for number in range(400):
        tenant = rng.choice("abc")
        match rng.randrange(5):
            case 0 | 1 | 2:
                parent = rng.choice(turns[tenant]) if turns[tenant] and rng.random() < 0.7 else None
                turn = _turn(parent, f"{number}", rng.choice((10, 1000, 9000)))
                turns[tenant] = [*turns[tenant][-8:], turn]
                store.put(tenant, _entry(f"r{rng.randrange(12)}", turn))
            case 3:
                store.remove(tenant, f"r{rng.randrange(12)}")
            case _:
                store.get(tenant, f"r{rng.randrange(12)}")
                clock.advance(rng.choice((0, 1, 20)))
        store.check_integrity()
        assert store.num_bytes <= limits.total_bytes
        assert store.num_responses <= 3 * limits.tenant_responses
