"""The index of prefixes: the same as a set of heads for each engine, on random walks; bounds and late messages."""

import random
import tracemalloc

import pytest

from tests.seeds import fast_and_slow, fresh_seeds
from tiercel.fleet.prefix_index import PrefixIndex
from tiercel.values.errors import InvariantError
from tiercel.values.ids import EngineId, KeyHead

A, B = EngineId(1), EngineId(2)
SEEDS = fast_and_slow([*range(6), *fresh_seeds(2)], range(6, 60))


def heads(*numbers: int) -> tuple[KeyHead, ...]:
    return tuple(map(KeyHead, numbers))


class NaiveIndex:
    """For each engine the set of heads that it has stored, and the list of those promised."""

    def __init__(self) -> None:
        self.stored: dict[EngineId, set[KeyHead]] = {}
        self.promised: dict[EngineId, list[KeyHead]] = {}

    def find(self, chain: tuple[KeyHead, ...]) -> dict[EngineId, int]:
        found: dict[EngineId, int] = {}
        for engine, stored in self.stored.items():
            depth = 0
            while depth < len(chain) and (chain[depth] in stored or chain[depth] in self.promised[engine]):
                depth += 1
            if depth:
                found[engine] = depth
        return found


@pytest.mark.parametrize("seed", SEEDS)
def test_the_index_finds_what_a_set_for_each_engine_has(seed: int) -> None:
    rng = random.Random(seed)
    index, naive = PrefixIndex(), NaiveIndex()
    chains = [heads(*(rng.randrange(1 << 64) for _ in range(rng.randint(1, 12)))) for _ in range(12)]
    open_promises: list[tuple[EngineId, tuple[KeyHead, ...]]] = []
    count = 0
    for _ in range(600):
        chain = rng.choice(chains)
        part = chain[: rng.randint(0, len(chain))]
        engine = rng.choice(list(naive.stored) or [A])
        match rng.randrange(12):
            case 0 if len(naive.stored) < 9:
                count += 1
                index.join(EngineId(count), part)
                naive.stored[EngineId(count)], naive.promised[EngineId(count)] = set(part), []
            case 1 if rng.random() < 0.4:
                index.leave(engine)
                naive.stored.pop(engine, None)
                naive.promised.pop(engine, None)
            case 2 | 3 | 4:
                index.store(engine, part)
                if engine in naive.stored:
                    naive.stored[engine] |= set(part)
            case 5 | 6:
                index.drop(engine, part)
                if engine in naive.stored:
                    naive.stored[engine] -= set(part)
            case 7 | 8:
                promised = index.promise(engine, part)
                open_promises.append((engine, promised))
                if engine in naive.stored:
                    assert set(promised) == set(part) - naive.stored[engine]
                    naive.promised[engine] += promised
            case 9 | 10 if open_promises:
                engine, promised = open_promises.pop(rng.randrange(len(open_promises)))
                index.retract(engine, promised)
                for head in promised if engine in naive.promised else ():
                    naive.promised[engine].remove(head)
            case _:
                pass
        assert index.find(chain) == naive.find(chain)
        index.check_integrity()


def test_the_bit_of_an_engine_that_left_is_given_out_again_only_when_it_is_clear() -> None:
    index = PrefixIndex()
    index.join(A, heads(*range(1000)))
    index.join(B, heads(1, 2))
    index.leave(A)
    assert index.find(heads(1, 2, 3)) == {B: 2}
    for number in range(3, 400):
        index.join(EngineId(number))
        assert index.find(heads(5, 6)) == {}
        index.leave(EngineId(number))
        index.check_integrity()
    assert index.num_keys == 2


def test_late_messages_of_an_engine_that_left_change_nothing() -> None:
    index = PrefixIndex()
    index.join(A, heads(1))
    promised = index.promise(A, heads(2, 3))
    index.leave(A)
    index.store(A, heads(4))
    index.drop(A, heads(1))
    index.retract(A, promised)
    assert index.promise(A, heads(5)) == ()
    assert index.find(heads(1)) == index.find(heads(4)) == {}
    index.check_integrity()


def test_an_engine_joins_once() -> None:
    index = PrefixIndex()
    index.join(A)
    with pytest.raises(InvariantError, match=r"prefix_index\.joined"):
        index.join(A)


def test_the_number_of_heads_is_limited() -> None:
    index, rng = PrefixIndex(max_keys=1024), random.Random(0)
    index.join(A)
    index.store(A, heads(*(rng.randrange(1 << 64) for _ in range(5000))))
    assert index.num_keys <= 1024
    assert index.num_forgotten == 5000 - index.num_keys
    index.check_integrity()
    with pytest.raises(InvariantError, match="least=256"):
        PrefixIndex(max_keys=255)


@pytest.mark.parametrize(("engines", "most_bytes"), [(64, 180), (1000, 320)])
def test_a_head_takes_the_stated_memory(engines: int, most_bytes: int) -> None:
    rng, count = random.Random(0), 40_000
    tracemalloc.start()
    index = PrefixIndex()
    for number in range(engines):
        index.join(EngineId(number))
    before, _ = tracemalloc.get_traced_memory()
    for number in range(count):
        index.store(EngineId(number % engines), (KeyHead(rng.randrange(1 << 64)),))
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert index.num_keys == count
    assert (after - before) / count <= most_bytes
