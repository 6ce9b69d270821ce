"""The router: prefixes, shares, predicted waits, and books that agree with a plain sum over the sequences."""

import random

import pytest

from tests.seeds import fast_and_slow, fresh_seeds
from tiercel.fleet.engine_load import EngineLoad
from tiercel.fleet.prefix_index import PrefixIndex
from tiercel.fleet.router import PromptWork, Router
from tiercel.values.block_key import PromptHeads
from tiercel.values.errors import InvariantError
from tiercel.values.ids import EngineId, KeyHead, SeqId, TenantId
from tiercel.values.rates import EngineSpeed

SPEED = EngineSpeed(prefill_ms=0.1, prefill_context_ms=1e-5, decode_ms=0.1)
A, B = TenantId("a"), TenantId("b")
SEEDS = fast_and_slow([*range(6), *fresh_seeds(2)], range(6, 60))


def router_of(engines: int, seed: int = 0, quantum_ms: float = 2000.0) -> Router:
    router = Router(PrefixIndex(), random.Random(seed), quantum_ms=quantum_ms)
    for number in range(engines):
        router.join(EngineId(number), SPEED)
    return router


def work(
    tokens: int = 1000, tenant: TenantId = A, chain: int | None = None, depth: int = 8, max_outputs: int = 100
) -> PromptWork:
    """Return work whose prompt has `depth` announced keys of a chain, one every 100 tokens."""
    found = PromptHeads()
    if chain is not None:
        found = PromptHeads(
            tuple(KeyHead(1000 * chain + number) for number in range(depth)),
            tuple(100 * (number + 1) for number in range(depth)),
        )
    return PromptWork(tenant=tenant, num_tokens=tokens, max_outputs=max_outputs, heads=found)


def send(router: Router, seq: int, item: PromptWork) -> EngineId:
    choice = router.choose(item)
    assert choice is not None
    router.begin(SeqId(seq), item, choice)
    return choice.engine


def test_a_sequence_follows_its_prefix() -> None:
    router = router_of(8)
    router.index.store(EngineId(5), work(chain=1).heads.heads[:6])
    choice = router.choose(work(chain=1))
    assert choice is not None
    assert (choice.engine, choice.cached_tokens) == (EngineId(5), 600)
    assert choice.first_token_ms == pytest.approx(SPEED.prompt_ms(600, 1000))


def test_prompts_under_way_count_as_cached() -> None:
    router = router_of(8)
    first = send(router, 1, work(chain=1))
    choice = router.choose(work(chain=1), among=(first,))
    assert choice is not None
    assert choice.cached_tokens == 800
    assert choice.first_token_ms == pytest.approx(router.work_ms(first) + SPEED.prompt_ms(800, 1000))


def test_a_promise_that_was_not_kept_is_forgotten() -> None:
    router = router_of(8)
    send(router, 1, work(chain=1))
    router.end(SeqId(1))
    assert {router.choose(work(chain=1), among=(engine,)).cached_tokens for engine in router.engines} == {0}  # type: ignore[union-attr]


def test_the_last_token_of_a_prompt_is_always_computed() -> None:
    router = router_of(1)
    router.index.store(EngineId(0), work(chain=1).heads.heads)
    choice = router.choose(work(800, chain=1))
    assert choice is not None
    assert choice.cached_tokens == 799


def test_without_prefixes_the_work_of_a_tenant_is_spread() -> None:
    router = router_of(8)
    assert len({send(router, seq, work()) for seq in range(8)}) == 8


def test_ties_are_drawn() -> None:
    assert len({router_of(8, seed).choose(work()).engine for seed in range(60)}) == 8  # type: ignore[union-attr]


def test_a_tenant_leaves_its_prefix_when_its_work_there_exceeds_its_share() -> None:
    """A prompt that costs more than the queue would go on to its prefix, whatever else waits there."""
    long = work(60_000, chain=1, depth=599)
    engines = {}
    for quantum_ms in (2000.0, 1e9):
        router = router_of(4, quantum_ms=quantum_ms)
        router.index.store(EngineId(0), long.heads.heads)
        engines[quantum_ms] = [send(router, seq, long) for seq in range(40)]
    assert set(engines[1e9]) == {0}
    assert len(set(engines[2000.0])) > 1


def test_another_tenants_queue_counts_as_much_as_it_is_given_meanwhile() -> None:
    """With equal weights the long queue of another tenant delays a short prompt by about the prompt's own time."""
    load = EngineLoad(SPEED)
    load.add(B, 1.0, 10_000.0)
    assert load.ahead_ms(A, 1.0, 50.0) == pytest.approx(50.0)
    assert load.ahead_ms(A, 4.0, 50.0) == pytest.approx(12.5)
    load.add(A, 1.0, 200.0)
    assert load.ahead_ms(A, 1.0, 50.0) == pytest.approx(200.0 + 250.0)
    assert load.ahead_ms(A, 1.0, 1e6) == pytest.approx(200.0 + 10_000.0)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_work_ahead_is_that_of_a_sum_over_tenants_within_the_stated_error(seed: int) -> None:
    rng, load, ms_by_tenant = random.Random(seed), EngineLoad(SPEED), dict[TenantId, float]()
    weights = {TenantId(str(number)): rng.choice((0.5, 1.0, 3.0)) for number in range(20)}
    for _ in range(300):
        tenant = rng.choice(list(weights))
        change = max(rng.uniform(-2.0, 2.0) * 10 ** rng.uniform(0, 4), -ms_by_tenant.get(tenant, 0.0))
        ms_by_tenant[tenant] = ms_by_tenant.get(tenant, 0.0) + change
        load.add(tenant, weights[tenant], change)
    for tenant, weight in weights.items():
        prompt_ms = 10 ** rng.uniform(0, 4)
        turn_ms = (ms_by_tenant.get(tenant, 0.0) + prompt_ms) / weight
        others = sum(min(ms, weights[one] * turn_ms) for one, ms in ms_by_tenant.items() if one != tenant)
        ahead_ms = load.ahead_ms(tenant, weight, prompt_ms) - ms_by_tenant.get(tenant, 0.0)
        assert others * (1 - 1e-9) - 1e-3 <= ahead_ms <= 2 * others + 1e-3


def test_a_closed_engine_is_not_chosen_and_keeps_its_work() -> None:
    router = router_of(2)
    router.close(EngineId(0))
    assert {send(router, seq, work()) for seq in range(6)} == {1}
    router.close(EngineId(1))
    assert router.choose(work()) is None
    assert router.num_underway == 6


def test_only_the_given_engines_are_chosen() -> None:
    router = router_of(4)
    choice = router.choose(work(), among=(EngineId(3), EngineId(9)))
    assert choice is not None
    assert choice.engine == 3
    assert router.choose(work(), among=()) is None


def test_an_engine_that_leaves_gives_its_sequences_back() -> None:
    router = router_of(2)
    sent = {SeqId(seq): send(router, seq, work(chain=seq)) for seq in range(10)}
    assert router.leave(EngineId(0)) == [seq for seq, engine in sent.items() if engine == 0]
    assert router.leave(EngineId(0)) == []
    assert {router.engine_of(seq) for seq in sent} == {None, EngineId(1)}


def test_a_sequence_begins_once() -> None:
    router = router_of(2)
    send(router, 1, work())
    with pytest.raises(InvariantError, match=r"router\.twice"):
        send(router, 1, work())


def test_the_length_of_answers_is_learned() -> None:
    router = router_of(1)
    for seq in range(60):
        send(router, seq, work(max_outputs=4000))
        router.end(SeqId(seq), 700)
    send(router, 100, work(max_outputs=4000))
    assert router.work_ms(EngineId(0), A) == pytest.approx(SPEED.prompt_ms(0, 1000) + 700 * SPEED.decode_ms, rel=0.01)
    send(router, 101, work(max_outputs=10, tenant=B))
    assert router.work_ms(EngineId(0), B) == pytest.approx(SPEED.prompt_ms(0, 1000) + 10 * SPEED.decode_ms)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_books_are_the_sums_over_the_sequences(seed: int) -> None:
    rng = random.Random(seed)
    router, engines = router_of(5, seed), 5
    live: dict[SeqId, tuple[EngineId, TenantId, float, float]] = {}
    for number in range(500):
        match rng.randrange(8):
            case 0 | 1 | 2:
                tenant = rng.choice((A, B))
                item = work(rng.randint(1, 3000), tenant, rng.randrange(6), max_outputs=rng.randint(1, 100))
                choice = router.choose(item)
                if choice is not None:
                    router.begin(SeqId(number), item, choice)
                    prompt_ms = SPEED.prompt_ms(choice.cached_tokens, item.num_tokens)
                    live[SeqId(number)] = (choice.engine, tenant, prompt_ms, SPEED.decode_ms * item.max_outputs)
            case 3 if live:
                seq = rng.choice(list(live))
                router.note_first_token(seq)
                live[seq] = (*live[seq][:2], 0.0, live[seq][3])
            case 4 | 5 if live:
                seq = rng.choice(list(live))
                router.end(seq)
                del live[seq]
            case 6 if rng.random() < 0.2 and router.engines:
                engine = rng.choice(list(router.engines))
                assert router.leave(engine) == sorted(seq for seq, one in live.items() if one[0] == engine)
                live = {seq: one for seq, one in live.items() if one[0] != engine}
            case 7 if len(router.engines) < 7:
                router.join(EngineId(engines), SPEED)
                engines += 1
            case _:
                pass
        for engine in router.engines:
            for tenant in (A, B):
                expected = sum(one[2] + one[3] for one in live.values() if one[:2] == (engine, tenant))
                assert router.work_ms(engine, tenant) == pytest.approx(expected, abs=1e-3)
            total = sum(one[2] + one[3] for one in live.values() if one[0] == engine)
            assert router.work_ms(engine) == pytest.approx(total, abs=1e-3)
        router.index.check_integrity()
    for seq in list(live):
        router.end(seq)
    assert router.num_underway == 0
    assert all(router.work_ms(engine) == 0 for engine in router.engines)
