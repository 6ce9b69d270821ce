"""News of an engine: keys and service as they change, each change once."""

import hashlib
from collections.abc import Iterable

from tiercel.engine.news import NEWS_S, NewsTeller
from tiercel.kvcache.key_news import KeyNews
from tiercel.values.block_key import is_announced, key_head
from tiercel.values.clock import ManualClock
from tiercel.values.ids import BlockKey, KeyHead, TenantId
from tiercel.wire.fleet_frames import unpack_heads
from tiercel.wire.frames import EngineNews, FromEngine

A, B = TenantId("a"), TenantId("b")
KEYS = [key for n in range(200) if is_announced(key := BlockKey(hashlib.sha256(bytes([n])).digest()))]


class Posted:
    """Keeps what is posted."""

    def __init__(self) -> None:
        self.news: list[EngineNews] = []

    def post(self, message: FromEngine) -> None:
        assert isinstance(message, EngineNews)
        self.news.append(message)


def heads(keys: Iterable[BlockKey]) -> set[KeyHead]:
    return {key_head(key) for key in keys}


def test_changes_are_told_once_and_not_too_often() -> None:
    clock, posted, keys, served_ms = ManualClock(), Posted(), KeyNews(), dict[TenantId, float]()
    steps = 0
    teller = NewsTeller(keys, lambda: served_ms, lambda: steps, posted, clock)
    teller.tend()
    assert not posted.news
    for key in KEYS[:5]:
        keys.note_named(key)
    served_ms[A] = 7.0
    clock.advance(NEWS_S / 2)
    teller.tend()
    assert not posted.news
    clock.advance(NEWS_S)
    teller.tend()
    (first,) = posted.news
    assert set(unpack_heads(first.stored)) == heads(KEYS[:5])
    assert (first.dropped, first.served_ms) == (b"", {A: 7.0})
    clock.advance(NEWS_S)
    teller.tend()
    assert len(posted.news) == 1
    keys.note_lost(KEYS[0])
    served_ms |= {A: 6.5, B: 2.0}
    clock.advance(NEWS_S)
    teller.tend()
    second = posted.news[1]
    assert set(unpack_heads(second.dropped)) == heads(KEYS[:1])
    assert (second.stored, second.served_ms) == (b"", {A: -0.5, B: 2.0})
    steps = 1
    clock.advance(NEWS_S)
    teller.tend()
    assert posted.news[2:] == [EngineNews()]
