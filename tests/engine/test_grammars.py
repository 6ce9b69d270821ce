"""Grammars are compiled beside the loop, cached, and requests wait for theirs."""

import threading
import time
from collections import Counter
from collections.abc import Callable

import pytest

from tests.engine.small_grammars import small_compiler
from tests.engine.test_loop import Bench
from tiercel.device.sim import SimMachine
from tiercel.engine.grammar_queue import GrammarKey
from tiercel.engine.grammars import CompileOrder, GrammarCache
from tiercel.engine.loop import EngineLoop
from tiercel.engine.sampling import Grammar, GrammarCompiler
from tiercel.scheduler.planner import Planner
from tiercel.scheduler.step_limits import StepLimits
from tiercel.values.clock import ManualClock
from tiercel.values.errors import ConfigError
from tiercel.values.grammar import GRAMMAR_FAILED
from tiercel.values.grammar_words import COMPILER_FAILED
from tiercel.values.ids import SeqId, TenantId
from tiercel.values.outcome import FinishReason
from tiercel.values.request import Request, SamplingParams, pack_tokens
from tiercel.wire.frames import Abort, Quit, Submit
from tiercel.wire.step_record import StepRecord

A, B, BAD = '{"grammars": [{"lark_grammar": "start: \\"a\\""}]}', 'start: "b"', "start: %%"


class SlowCompiler(GrammarCompiler):
    """A compiler that waits for a permission for each grammar."""

    def __init__(self) -> None:
        self.permits = threading.Semaphore(0)
        self.began: list[str] = []
        self.meanwhile: Callable[[], None] = lambda: None

    def compile(self, text: str) -> Grammar | str:
        self.began.append(text)
        self.permits.acquire()
        self.meanwhile()
        return small_compiler().compile(text)


class GrammarBench(Bench):
    """The loop on the simulated machine, with grammars. The machine draws as if there were none."""

    def __init__(self, opens: Callable[[], GrammarCompiler], cache_bytes: int = 1 << 20) -> None:
        super().__init__(blocks=40)
        self.wakes = 0
        self.record = StepRecord.open(8)
        self.grammars = GrammarCache(opens, ManualClock(), self.wake, self.record, cache_bytes)
        machine = SimMachine(self.book, 4, 11, self.clock, max_rows=7)
        self.loop = EngineLoop(
            self.book, self.cache, Planner(self.book, StepLimits(6, 16)), machine, self.client, self.clock, 1,
            grammars=self.grammars,
        )  # fmt: skip

    def wake(self) -> None:
        self.wakes += 1

    def ask(self, grammar: str, seq: int, tenant: str = "default", scope: bytes = b"") -> None:
        params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, grammar=grammar)
        request = Request(id=SeqId(seq), prompt=pack_tokens([seq, 2]), params=params, arrival_s=self.clock.now_s(),
                          tenant=TenantId(tenant), scope=scope)  # fmt: skip
        self.requests[seq] = request
        self.loop.take([Submit(request)])

    def run_until_ended(self, count: int) -> None:
        end_s = time.monotonic() + 20
        while len(self.client.finished) < count:
            if not self.loop.step():
                assert time.monotonic() < end_s, "nothing happens"
                time.sleep(0.001)
            self.loop.check_integrity()
        while self.loop.step():
            pass

    def close(self) -> None:
        self.grammars.close()


def test_a_request_waits_for_its_grammar_and_others_do_not() -> None:
    compiler = SlowCompiler()
    bench = GrammarBench(lambda: compiler)
    bench.ask(A, 1)
    bench.ask("", 2)
    bench.run_until_ended(1)
    assert list(bench.client.finished) == [2]
    assert not bench.loop.is_idle
    compiler.permits.release()
    bench.run_until_ended(2)
    bench.assert_all_right()
    assert bench.wakes == 1
    bench.close()


def test_requests_with_equal_grammars_wait_for_one_compilation() -> None:
    compiler = SlowCompiler()
    bench = GrammarBench(lambda: compiler)
    for seq in (1, 2, 3):
        bench.ask(A, seq)
    compiler.permits.release()
    bench.run_until_ended(3)
    bench.ask(A, 4)
    bench.run_until_ended(4)
    bench.assert_all_right()
    assert compiler.began == [A]
    gauges = bench.loop.gauges.read().grammars
    assert (gauges.compiled, gauges.failed, gauges.hits) == (1, 0, 1)
    bench.close()


@pytest.mark.parametrize("reason", [FinishReason.ABORT, FinishReason.TIMEOUT, FinishReason.STOP])
def test_an_abort_ends_a_request_that_waits_for_its_grammar_like_a_queued_one(reason: FinishReason) -> None:
    compiler = SlowCompiler()
    bench = GrammarBench(lambda: compiler)
    bench.ask(A, 1)
    while not compiler.began:
        time.sleep(0.001)
    bench.loop.take([Abort((SeqId(1),), reason)])
    bench.run_until_ended(1)
    plain = Bench()
    plain.submit([1, 2], max_tokens=4, ignore_eos=True)
    plain.loop.take([Abort((SeqId(1),), reason)])
    plain.loop.step()
    assert bench.client.finished == plain.client.finished
    compiler.permits.release()
    while not bench.wakes:
        time.sleep(0.001)
    assert not bench.loop.step()
    assert bench.loop.is_idle
    assert bench.client.endings[1] == 1
    bench.ask(A, 2)  # the compilation was not in vain
    bench.run_until_ended(2)
    assert compiler.began == [A]
    bench.close()


def test_an_abort_of_queued_choices_counts_one_that_waits_for_its_grammar_as_queued() -> None:
    compiler = SlowCompiler()
    bench = GrammarBench(lambda: compiler)
    bench.ask("", 1)
    bench.loop.step()
    bench.ask(A, 2)
    bench.loop.take([Abort((SeqId(1), SeqId(2)), if_queued=True)])  # the first one runs
    compiler.permits.release()
    bench.run_until_ended(2)
    bench.assert_all_right()
    bench.ask(B, 3)
    bench.ask(B, 4)
    bench.loop.take([Abort((SeqId(3), SeqId(4)), if_queued=True)])
    bench.run_until_ended(4)
    assert {bench.client.finished[seq].reason for seq in (3, 4)} == {FinishReason.ABORT}
    compiler.permits.release()
    bench.close()


def test_a_bad_grammar_fails_its_requests_and_no_other() -> None:
    bench = GrammarBench(small_compiler)
    bench.ask(BAD, 1)
    bench.ask(B, 2)
    bench.ask(BAD, 3)
    bench.run_until_ended(3)
    for seq in (1, 3):
        end = bench.client.finished[seq]
        assert end.reason is FinishReason.ERROR
        assert end.error is not None and end.error.startswith("the grammar of the request failed: ")
    assert bench.client.finished[2].reason is FinishReason.LENGTH
    bench.close()


def test_without_a_tokenizer_requests_with_grammars_fail_and_say_why() -> None:
    def fail() -> GrammarCompiler:
        raise ConfigError("grammar.no_tokenizer", "there is no tokenizer.json")

    bench = GrammarBench(fail)
    assert not bench.grammars.wait()
    bench.ask(A, 1)
    bench.ask("", 2)
    bench.run_until_ended(2)
    assert "there is no tokenizer.json" in (bench.client.finished[1].error or "")
    assert bench.client.finished[2].reason is FinishReason.LENGTH
    bench.close()


def test_an_engine_without_grammars_fails_requests_that_have_one() -> None:
    bench = Bench()
    params = SamplingParams(temperature=0.0, grammar=A)
    request = Request(id=SeqId(1), prompt=pack_tokens([1]), params=params, arrival_s=0.0)
    bench.loop.take([Submit(request)])
    bench.loop.step()
    assert bench.client.finished[1].reason is FinishReason.ERROR
    assert "applies no grammars" in (bench.client.finished[1].error or "")


def test_an_exception_of_the_compiler_fails_the_request() -> None:
    compiler = SlowCompiler()

    def panic() -> None:
        raise BaseException("a panic of Rust is no Exception")

    compiler.meanwhile = panic
    bench = GrammarBench(lambda: compiler)
    bench.ask(A, 1)
    compiler.permits.release()
    bench.run_until_ended(1)
    assert bench.client.finished[1].error == f"{GRAMMAR_FAILED}: {COMPILER_FAILED}"
    bench.close()


def test_the_record_names_the_request_whose_grammar_is_compiled() -> None:
    compiler, seen = SlowCompiler(), []
    bench = GrammarBench(lambda: compiler)
    compiler.meanwhile = lambda: seen.append(bench.record.read().entering)
    bench.ask(A, 7)
    compiler.permits.release()
    bench.run_until_ended(1)
    assert seen == [7]
    assert bench.record.read().is_empty
    bench.close()


def test_a_quit_does_not_wait_for_a_compilation() -> None:
    compiler = SlowCompiler()
    bench = GrammarBench(lambda: compiler)
    bench.ask(A, 1)
    bench.loop.take([Quit()])
    assert bench.loop.has_quit
    compiler.permits.release()
    bench.close()


def test_grammars_in_use_stay_and_the_least_recently_used_of_the_others_are_dropped() -> None:
    texts = [f'start: "{letter}"' for letter in "abcdef"]
    bench = GrammarBench(small_compiler, cache_bytes=2 * 100_300)  # two
    for seq, text in enumerate(texts, start=1):
        bench.ask(text, seq)
    assert bench.grammars.wait()
    while bench.wakes < 6:
        time.sleep(0.001)
    bench.loop.step()
    assert all(bench.grammars.get(bench.requests[seq]) for seq in range(1, 7))
    bench.run_until_ended(6)
    bench.ask(texts[5], 7)  # kept, and now the more recent one
    bench.run_until_ended(7)
    bench.ask(texts[0], 8)
    bench.run_until_ended(8)
    for seq, hits in ((9, 2), (10, 2)):  # kept, and dropped
        bench.ask(texts[5] if seq == 9 else texts[4], seq)
        bench.run_until_ended(seq)
        assert bench.loop.gauges.read().grammars.hits == hits
    bench.close()


def test_a_grammar_is_compiled_for_each_tenant_and_scope() -> None:
    """So that the time to the first token does not tell whether another tenant used the same schema."""
    bench = GrammarBench(small_compiler)
    owners = [("alice", b"a"), ("bob", b"b"), ("alice", b"a, of a salt"), ("bob", b"a")]
    for number, (tenant, scope) in enumerate(owners):
        for again in (1, 2):
            seq = 2 * number + again
            bench.ask(A, seq, tenant, scope)
            bench.run_until_ended(seq)
        gauges = bench.loop.gauges.read().grammars
        assert (gauges.compiled, gauges.hits) == (number + 1, number + 1)
    bench.close()


def test_the_grammars_of_one_tenant_do_not_drop_those_of_another() -> None:
    bench = GrammarBench(small_compiler, cache_bytes=4 * 100_300)
    bench.ask(A, 1, "quiet")
    bench.run_until_ended(1)
    for seq in range(2, 22):
        bench.ask(f'start: "{"ab" * seq}"', seq, "busy")
        bench.run_until_ended(seq)
    bench.ask(A, 22, "quiet")
    bench.run_until_ended(22)
    assert bench.loop.gauges.read().grammars.hits == 1
    bench.close()


def test_a_flood_of_grammars_delays_the_grammar_of_another_tenant_by_one() -> None:
    compiler = SlowCompiler()
    bench = GrammarBench(lambda: compiler)
    flood = [f'start: "{"a" * count}"' for count in range(1, 7)]
    for seq, text in enumerate(flood, start=1):
        bench.ask(text, seq, "flood")
    while not compiler.began:
        time.sleep(0.001)
    bench.ask(B, 7, "other")
    for _ in range(7):
        compiler.permits.release()
    bench.run_until_ended(7)
    assert compiler.began[:2] == [flood[0], B]
    assert compiler.began[2:] == flood[1:]
    bench.close()


def _served(order: CompileOrder, cost_s: dict[str, float], count: int) -> Counter[str]:
    served: Counter[str] = Counter()
    for _ in range(count):
        taken = order.take()
        assert taken is not None
        tenant = str(taken[0].tenant)
        served[tenant] += 1
        order.charge(taken[0].tenant, cost_s[tenant])
    return served


def _waiting(order: CompileOrder, tenant: str, count: int) -> None:
    for number in range(count):
        order.add(GrammarKey(TenantId(tenant), b"", f"{tenant} {number}"), SeqId(1))


def test_compilations_share_their_time_by_weight() -> None:
    order = CompileOrder()
    order.set_weights({TenantId("a"): 2.0})
    _waiting(order, "a", 100)
    _waiting(order, "b", 100)
    assert _served(order, {"a": 0.1, "b": 0.1}, 30) == {"a": 20, "b": 10}
    assert _served(order, {"a": 0.1, "b": 0.4}, 27)["a"] in (23, 24, 25)  # by time, not by number


def test_an_idle_tenant_saves_up_nothing() -> None:
    order = CompileOrder()
    _waiting(order, "busy", 100)
    _served(order, {"busy": 1.0}, 50)
    _waiting(order, "late", 50)
    assert _served(order, {"busy": 1.0, "late": 1.0}, 20) == {"busy": 10, "late": 10}


def test_a_grammar_that_nobody_wants_any_more_is_left_out() -> None:
    order = CompileOrder()
    _waiting(order, "a", 2)
    first, second = (GrammarKey(TenantId("a"), b"", f"a {number}") for number in (0, 1))
    assert order.remove(second)
    assert order.take() == (first, SeqId(1))
    assert not order.remove(first)
    assert order.take() is None
