"""The store of objects: limits, isolation, shared turns, expiry."""

import random

import msgspec
import pytest

from tests.seeds import fresh_seeds
from tiercel.server.api.object_store import ENTRY_BYTES, ObjectStore, StoreLimits
from tiercel.server.api.stored_items import ITEM_BYTES, StoredItem, decode_item, encode_item
from tiercel.server.api.stored_response import TURN_BYTES, StoredResponse, StoredTurn
from tiercel.values.clock import ManualClock

ROOMY = StoreLimits(tenant_objects=100, tenant_bytes=1_000_000, total_bytes=10_000_000, lifetime_s=60.0)


def _store(limits: StoreLimits = ROOMY) -> tuple[ObjectStore, ManualClock, list[tuple[str, int]]]:
    clock, forgotten = ManualClock(), list[tuple[str, int]]()
    return (
        ObjectStore(lambda: limits, clock, lambda reason, count: forgotten.append((reason, count))),
        clock,
        forgotten,
    )


def _item(id: str, size: int = 10) -> StoredItem:
    return encode_item({"type": "message", "id": id, "role": "user", "content": "x" * size})


def _turn(parent: StoredTurn | None, name: str, size: int = 10) -> StoredTurn:
    return StoredTurn(parent, [_item(f"in_{name}", size)]).ended([_item(f"out_{name}", 1)])


def _entry(name: str, turn: StoredTurn | None = None) -> StoredResponse:
    return StoredResponse(name, b'{"output":', b"}", turn or _turn(None, name), is_over=True)


def _get(store: ObjectStore, tenant: str, id: str) -> StoredResponse | None:
    return store.get(tenant, StoredResponse, id)


def _remove(store: ObjectStore, tenant: str, id: str) -> bool:
    return store.remove(tenant, StoredResponse, id)


def _ids(turn: StoredTurn) -> list[str]:
    return [item.id for one in reversed(list(turn.backwards())) for item in (*one.input, *one.output)]


def test_a_response_is_found_by_its_tenant_alone() -> None:
    store, _, _ = _store()
    store.put("a", _entry("r"))
    found = _get(store, "a", "r")
    assert found is not None
    (shown,) = msgspec.json.decode(b"".join(found.body()))["output"]
    assert shown["id"] == "out_r"
    assert _get(store, "b", "r") is None
    assert not _remove(store, "b", "r")
    stored = store.item("a", "in_r")
    assert stored is not None
    assert decode_item(stored) == {"type": "message", "id": "in_r", "role": "user", "content": "x" * 10}
    assert store.item("b", "in_r") is None
    assert _remove(store, "a", "r")
    assert (_get(store, "a", "r"), store.item("a", "in_r"), store.num_bytes, store.num_objects) == (
        None,
        None,
        0,
        0,
    )


def test_the_least_recently_used_response_of_the_tenant_gives_way() -> None:
    store, _, forgotten = _store(msgspec.structs.replace(ROOMY, tenant_objects=2))
    store.put("other", _entry("z"))
    store.put("a", _entry("r1"))
    store.put("a", _entry("r2"))
    assert _get(store, "a", "r1") is not None
    store.put("a", _entry("r3"))
    assert [_get(store, "a", name) is not None for name in ("r1", "r2", "r3")] == [True, False, True]
    assert _get(store, "other", "z") is not None
    assert forgotten == [("full", 1)]


def test_beyond_the_total_the_largest_tenant_gives_way() -> None:
    one = ENTRY_BYTES + 3000
    store, _, _ = _store(msgspec.structs.replace(ROOMY, total_bytes=3 * one))
    for name in ("a1", "a2"):
        store.put("a", _entry(name, _turn(None, name, 2000)))
    store.put("b", _entry("b1", _turn(None, "b1", 2000)))
    store.put("b", _entry("b2", _turn(None, "b2", 10)))
    assert _get(store, "a", "a1") is None
    assert all(_get(store, tenant, name) is not None for tenant, name in (("a", "a2"), ("b", "b1"), ("b", "b2")))
    store.check_integrity()


def test_a_response_larger_than_the_limit_is_not_kept() -> None:
    store, _, forgotten = _store(msgspec.structs.replace(ROOMY, tenant_bytes=5000))
    store.put("a", _entry("r", _turn(None, "r", 6000)))
    assert _get(store, "a", "r") is None
    assert (store.num_bytes, forgotten) == (0, [("full", 1)])


def test_nothing_is_kept_without_room_for_responses() -> None:
    store, _, _ = _store(msgspec.structs.replace(ROOMY, tenant_objects=0))
    assert not store.keeps_any
    store.put("a", _entry("r"))
    assert (_get(store, "a", "r"), store.num_objects) == (None, 0)


def test_a_response_expires_some_time_after_its_last_use() -> None:
    store, clock, forgotten = _store()
    store.put("a", _entry("r1"))
    store.put("a", _entry("r2"))
    clock.advance(40)
    assert _get(store, "a", "r1") is not None
    clock.advance(30)
    assert _get(store, "a", "r2") is None
    assert _get(store, "a", "r1") is not None
    assert forgotten == [("expired", 1)]
    store.check_integrity()


def test_a_turn_lives_while_a_later_turn_refers_to_it() -> None:
    store, _, _ = _store()
    first = _turn(None, "1", 1000)
    store.put("a", _entry("r1", first))
    second = _turn(first, "2")
    store.put("a", _entry("r2", second))
    before = store.num_bytes
    assert _remove(store, "a", "r1")
    assert store.num_bytes > before - 1000 - ENTRY_BYTES  # the turn is still counted
    assert _ids(second) == ["in_1", "out_1", "in_2", "out_2"]
    assert store.item("a", "out_1") is not None
    assert _remove(store, "a", "r2")
    assert (store.num_bytes, store.item("a", "out_1")) == (0, None)


def test_an_item_that_is_there_a_thousand_times_is_counted_once() -> None:
    store, _, _ = _store()
    item = _item("in", 5000)
    store.put("a", _entry("r1", StoredTurn(None, [item])))
    once = store.num_bytes
    store.put("a", _entry("r2", StoredTurn(None, [item] * 1000)))
    assert store.num_bytes - once < 1000 * 8 + TURN_BYTES + ENTRY_BYTES + ITEM_BYTES
    assert _remove(store, "a", "r1")
    assert store.item("a", "in") is item
    store.check_integrity()
    assert _remove(store, "a", "r2")
    assert (store.num_bytes, store.item("a", "in")) == (0, None)


def test_bytes_that_are_read_are_counted_until_they_have_been_read() -> None:
    store, _, _ = _store()
    entry = _entry("r", _turn(None, "r", 5000))
    store.put("a", entry)
    before = store.num_bytes
    with store.read("a", entry.turn.input), store.read("a", entry.turn.input):
        assert store.num_bytes == before
        assert _remove(store, "a", "r")
        assert store.item("a", "in_r") is None  # deleted is deleted
        assert store.num_bytes == entry.turn.input[0].num_bytes
        store.put("a", _entry("s", StoredTurn(None, entry.turn.input)))
        assert store.item("a", "in_r") is not None
        assert _remove(store, "a", "s")
    assert (store.num_bytes, store.num_objects) == (0, 0)


def test_what_a_request_refers_to_stays_while_it_is_prepared() -> None:
    store, _, _ = _store()
    parent = _turn(None, "1", 3000)
    store.put("a", _entry("r", parent))
    hold = store.use("a", [parent])
    assert _remove(store, "a", "r")
    assert store.num_bytes > 3000
    store.put("a", _entry("s", StoredTurn(parent, [])))
    hold.release()
    hold.release()
    store.check_integrity()
    assert store.item("a", "in_1") is not None


def test_held_bytes_count_against_the_limits_of_their_tenant() -> None:
    store, _, _ = _store(msgspec.structs.replace(ROOMY, tenant_bytes=12_000, total_bytes=14_000))
    first = _entry("r", _turn(None, "r", 5000))
    store.put("a", first)
    store.put("b", _entry("b"))
    with store.read("a", first.read_parts), store.read("a", first.turn.input):
        assert _remove(store, "a", "r")
        store.put("a", _entry("s", _turn(None, "s", 6000)))
        assert _get(store, "a", "s") is None
        assert _get(store, "b", "b") is not None
        assert store.num_bytes <= 14_000
    store.put("a", _entry("s", _turn(None, "s", 6000)))
    assert _get(store, "a", "s") is not None
    store.check_integrity()


def test_a_long_chain_of_turns_is_forgotten() -> None:
    store, _, _ = _store(msgspec.structs.replace(ROOMY, tenant_bytes=10**9, total_bytes=10**9))
    turn = None
    for _ in range(50_000):
        turn = StoredTurn(turn, [])
    assert turn is not None
    store.put("a", _entry("r", turn))
    assert store.num_bytes >= 50_000 * TURN_BYTES
    assert _remove(store, "a", "r")
    del turn
    assert store.num_bytes == 0


@pytest.mark.parametrize("seed", [1, 2, *fresh_seeds(2)])
def test_the_books_agree_after_random_changes(seed: int) -> None:
    rng = random.Random(seed)
    limits = StoreLimits(tenant_objects=6, tenant_bytes=30_000, total_bytes=60_000, lifetime_s=50.0)
    store, clock, _ = _store(limits)
    turns: dict[str, list[StoredTurn]] = {name: [] for name in "abc"}
    for number in range(400):
        tenant = rng.choice("abc")
        match rng.randrange(5):
            case 0 | 1 | 2:
                parent = rng.choice(turns[tenant]) if turns[tenant] and rng.random() < 0.7 else None
                turn = _turn(parent, f"{number}", rng.choice((10, 1000, 9000)))
                turns[tenant] = [*turns[tenant][-8:], turn]
                store.put(tenant, _entry(f"r{rng.randrange(12)}", turn))
                if rng.random() < 0.3:
                    with store.read(tenant, turn.input), store.use(tenant, [turn]):
                        _remove(store, tenant, f"r{rng.randrange(12)}")
                    store.put(tenant, _entry(f"r{rng.randrange(12)}", StoredTurn(turn, turn.input * 3)))
            case 3:
                _remove(store, tenant, f"r{rng.randrange(12)}")
            case _:
                _get(store, tenant, f"r{rng.randrange(12)}")
                clock.advance(rng.choice((0, 1, 20)))
        store.check_integrity()
        assert store.num_bytes <= limits.total_bytes
        assert store.num_objects <= 3 * limits.tenant_objects
