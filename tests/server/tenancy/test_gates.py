"""Both gates with tenants: which limit refuses with what, and that a refusal keeps nothing."""

import contextlib
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiercel.server.client.collector import Mailbox
from tiercel.server.client.sequences import SequenceFacts, SequenceStage, SequenceStart
from tiercel.server.tenancy.admission import Admission, AdmissionRequest, Entry, ServiceLevel, Terms
from tiercel.server.tenancy.tenants import BestEffort, Limits, Tenant, TenantTable, make_table
from tiercel.server.tenancy.usage import UsageBook
from tiercel.values.clock import ManualClock
from tiercel.values.errors import AdmissionError
from tiercel.values.ids import SeqId, TenantId
from tiercel.values.outcome import Finished, FinishReason
from tiercel.values.request import SamplingParams
from tiercel.values.tenant import PolicyName, Slo, TenantShare


def _tenant(
    name: str = "acme", limits: Limits | None = None, best_effort: BestEffort | None = None, **share: object
) -> Tenant:
    return Tenant(
        TenantShare(name=TenantId(name), **share),  # type: ignore[arg-type]
        limits=limits or Limits(),
        best_effort=best_effort,
    )


@dataclass
class Desk:
    """Both gates with a scripted engine."""

    clock: ManualClock
    usages: UsageBook
    max_queued: int = 100
    reasons: list[str] = field(default_factory=list)
    throttled: list[tuple[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.admission = Admission(self, self, self.clock, self.usages, max_queued=self.max_queued)

    @staticmethod
    def of(*tenants: Tenant, max_queued: int = 100, policy: PolicyName = "priority") -> "Desk":
        clock = ManualClock(1000.0)
        desk = Desk(clock, UsageBook(clock, policy), max_queued)
        desk.usages.set_table(_table(*tenants))
        return desk

    @property
    def num_tokenless(self) -> int:
        return sum(self.usages.of(tenant).waiting for tenant in self.tenants)

    tenants: tuple[Tenant, ...] = ()

    def on_rejected(self, reason: str) -> None:
        self.reasons.append(reason)

    def on_throttled(self, tenant: TenantId, reason: str) -> None:
        self.throttled.append((tenant, reason))

    def submit(self, tenant: Tenant, request: AdmissionRequest, terms: Terms) -> SequenceFacts:
        num_prompt = sum(request.prompts)
        start = SequenceStart(
            prompt=b"",
            num_prompt=num_prompt,
            params=SamplingParams(),
            n=1,
            tenant=tenant.name,
            band=terms.band,
            num_uncached=num_prompt * terms.uncached_share,
            queue_s=terms.queue_s,
            num_reserved=terms.reserved,
        )
        facts = SequenceFacts(start, 0, Mailbox(), self.clock.now_s())
        self._move(facts, SequenceStage.WAITING)
        return facts

    def run(self, tenant: Tenant, request: AdmissionRequest) -> SequenceFacts:
        with self.admission.enter(tenant, request.choices, prompts=len(request.prompts)) as entry:
            return self.submit(tenant, request, entry.admit(request))

    def first_token(self, facts: SequenceFacts) -> None:
        facts.first_token_s = self.clock.now_s()
        facts.outputs = array("I", [0])
        self._move(facts, SequenceStage.RUNNING)

    def finish(self, facts: SequenceFacts, num_outputs: int = 1, num_cached: int = 0) -> None:
        facts.outputs = array("I", bytes(4 * num_outputs))
        facts.finished = Finished(
            seq=SeqId(1), reason=FinishReason.STOP, num_prompt=facts.start.num_prompt, num_outputs=num_outputs,
            num_cached=num_cached,
        )  # fmt: skip
        self._move(facts, SequenceStage.GONE)
        self.usages.on_finished(facts)

    def _move(self, facts: SequenceFacts, stage: SequenceStage) -> None:
        before, facts.stage = facts.stage, stage
        if before is not stage:
            self.usages.on_moved(facts, before)


def _table(*tenants: Tenant) -> TenantTable:
    return make_table(tenants, version=1, source="file")


@contextlib.contextmanager
def _refused(status: int, code: str) -> Iterator[list[AdmissionError]]:
    found: list[AdmissionError] = []
    with pytest.raises(AdmissionError) as refusal:
        yield found
    found.append(refusal.value)
    assert (refusal.value.status, refusal.value.code) == (status, code)
    kind = {429: "rate_limit_error", 503: "server_error", 400: "invalid_request_error"}[status]
    assert refusal.value.kind == kind
    assert (refusal.value.retry_after_s is not None) == (status != 400)
    assert refusal.value.retry_after_s is None or 1 <= refusal.value.retry_after_s <= 61


def _enter(desk: Desk, tenant: Tenant, choices: int = 1) -> contextlib.AbstractContextManager[Entry]:
    return desk.admission.enter(tenant, choices)


def _keeps_nothing(desk: Desk, tenant: Tenant) -> None:
    usage = desk.usages.of(tenant)
    assert (usage.reserved, usage.waiting, usage.running, desk.admission.num_reserved) == (0, 0, 0, 0)
    assert usage.backlog_by_band == {}
    assert desk.usages.backlog == 0


def test_requests_a_minute() -> None:
    tenant, other = _tenant(limits=Limits(requests_per_minute=2)), _tenant("other")
    desk = Desk.of(tenant, other)
    for _ in range(2):
        with _enter(desk, tenant):
            pass
    with _refused(429, "rate_limit_exceeded") as refusal, _enter(desk, tenant):
        pass
    assert refusal[0].retry_after_s == 30
    assert "requests per min (RPM): Limit 2, Used 2, Requested 1. Please try again in 30s." in refusal[0].message
    assert desk.throttled == [("acme", "requests")]
    with _enter(desk, other):
        pass
    assert dict(desk.admission.rate_headers(tenant)) == {
        b"x-ratelimit-limit-requests": b"2",
        b"x-ratelimit-remaining-requests": b"0",
        b"x-ratelimit-reset-requests": b"1m0s",
    }
    assert desk.admission.rate_headers(other) == []
    desk.clock.advance(30)
    with _enter(desk, tenant):
        pass
    _keeps_nothing(desk, tenant)


def test_a_request_that_is_refused_for_another_reason_is_not_counted_by_the_minute() -> None:
    tenant = _tenant(limits=Limits(requests_per_minute=1, max_concurrency=1))
    desk = Desk.of(tenant, max_queued=1)
    with _refused(429, "rate_limit_exceeded"):
        desk.usages.of(tenant).running = 1
        with _enter(desk, tenant):
            pass
    desk.usages.of(tenant).running = 0
    with _enter(desk, tenant):
        pass


def test_sequences_at_once() -> None:
    tenant = _tenant(limits=Limits(max_concurrency=3))
    desk = Desk.of(tenant)
    with _refused(400, "invalid_value") as refusal, _enter(desk, tenant, 4):
        pass
    assert "your key may have 3" in refusal[0].message
    request = AdmissionRequest(prompts=[5])
    first, second = desk.run(tenant, request), desk.run(tenant, request)
    desk.first_token(second)
    with _enter(desk, tenant), _refused(429, "rate_limit_exceeded"), _enter(desk, tenant):
        pass
    desk.finish(first)
    with _enter(desk, tenant, 2):
        pass
    desk.finish(second)
    _keeps_nothing(desk, tenant)
    assert desk.throttled == [("acme", "concurrency")]


def test_a_share_of_the_queue() -> None:
    tenant = _tenant(limits=Limits(queue_share=0.2))
    desk = Desk.of(tenant, max_queued=10)
    waiting = [desk.run(tenant, AdmissionRequest(prompts=[5])) for _ in range(2)]
    with _refused(429, "rate_limit_exceeded"), _enter(desk, tenant):
        pass
    desk.first_token(waiting[0])
    with _enter(desk, tenant), _refused(429, "rate_limit_exceeded"), _enter(desk, tenant):
        pass
    assert desk.throttled == [("acme", "queue_share")] * 2


def test_a_full_queue_is_the_servers_fault_and_a_limit_the_tenants() -> None:
    limited, free = _tenant(limits=Limits(max_concurrency=1)), _tenant("free")
    desk = Desk.of(limited, free, max_queued=2)
    with _enter(desk, free), _enter(desk, limited):
        with _refused(503, "overloaded"), _enter(desk, free):
            pass
        with _refused(429, "rate_limit_exceeded"), _enter(desk, limited):
            pass
    assert desk.reasons == ["queue_full", "tenant_concurrency"]


def test_tokens_a_minute_are_charged_first_and_settled_at_the_end() -> None:
    tenant = _tenant(limits=Limits(tokens_per_minute=600))
    desk = Desk.of(tenant)
    facts = desk.run(tenant, AdmissionRequest(prompts=[100], max_tokens=200))
    assert _left(desk, tenant) == 300
    with _refused(429, "rate_limit_exceeded") as refusal:
        desk.run(tenant, AdmissionRequest(prompts=[100], max_tokens=400))
    assert refusal[0].retry_after_s == 20
    assert "tokens per min (TPM): Limit 600, Used 300, Requested 500" in refusal[0].message
    assert _left(desk, tenant) == 300
    desk.finish(facts, num_outputs=50)
    assert _left(desk, tenant) == 450
    _keeps_nothing(desk, tenant)


def test_an_open_answer_length_is_charged_as_generated() -> None:
    tenant = _tenant(limits=Limits(tokens_per_minute=600))
    desk = Desk.of(tenant)
    facts = desk.run(tenant, AdmissionRequest(prompts=[100], max_tokens=100_000, is_named=False))
    assert _left(desk, tenant) == 500
    desk.finish(facts, num_outputs=1100)
    assert _left(desk, tenant) == 0  # in the headers; it is overdrawn
    with _refused(429, "rate_limit_exceeded") as refusal:
        desk.run(tenant, AdmissionRequest(prompts=[1], max_tokens=1))
    assert refusal[0].retry_after_s == 61


def test_a_large_allowance_needs_a_full_bucket_and_a_large_prompt_is_refused_for_good() -> None:
    tenant = _tenant(limits=Limits(tokens_per_minute=600))
    desk = Desk.of(tenant)
    facts = desk.run(tenant, AdmissionRequest(prompts=[100], max_tokens=5000))
    assert _left(desk, tenant) == 0
    desk.finish(facts, num_outputs=10)
    assert _left(desk, tenant) == 490
    with _refused(400, "tenant_limit_exceeded"):
        desk.run(tenant, AdmissionRequest(prompts=[400, 300]))
    assert _left(desk, tenant) == 490


def _left(desk: Desk, tenant: Tenant) -> int:
    return int(dict(desk.admission.rate_headers(tenant))[b"x-ratelimit-remaining-tokens"])


def test_a_failure_behind_gate_two_gives_the_tokens_back() -> None:
    tenant = _tenant(limits=Limits(tokens_per_minute=600))
    desk = Desk.of(tenant)
    with pytest.raises(ZeroDivisionError), _enter(desk, tenant) as entry:
        entry.admit(AdmissionRequest(prompts=[100], max_tokens=100))
        raise ZeroDivisionError
    assert _left(desk, tenant) == 600
    _keeps_nothing(desk, tenant)


def _measured(desk: Desk, tokens_per_s: int) -> None:
    desk.usages.on_prompts(tokens_per_s, 1.0)


def _interactive(name: str = "acme", ttft_s: float = 2.0, **more: object) -> Tenant:
    return _tenant(name, slo=Slo(kind="interactive", ttft_s=ttft_s), **more)  # type: ignore[arg-type]


def test_a_goal_that_cannot_be_met_is_refused_with_the_required_time() -> None:
    tenant, batch = _interactive(), _tenant("batch", slo=Slo(kind="batch", ttft_s=0.001))
    desk = Desk.of(tenant, batch)
    desk.run(batch, AdmissionRequest(prompts=[5000]))
    assert desk.run(tenant, AdmissionRequest(prompts=[100])).stage is SequenceStage.WAITING  # no speed is known yet
    _measured(desk, 1000)
    with _refused(503, "overloaded") as refusal:
        desk.run(tenant, AdmissionRequest(prompts=[100]))
    assert refusal[0].retry_after_s == 4  # 5.2 s of work against a goal of 2 s
    assert desk.run(batch, AdmissionRequest(prompts=[100])).stage is SequenceStage.WAITING  # batch work has no deadline
    assert (desk.reasons, desk.throttled) == (["deadline"], [("acme", "deadline")])


def test_a_forecast_that_was_wrong_for_one_tenant_refuses_no_other() -> None:
    tenant, flood = _interactive(), _tenant("flood")
    desk = Desk.of(tenant, flood, policy="fair")
    _measured(desk, 1000)
    late = desk.run(flood, AdmissionRequest(prompts=[100]))
    desk.clock.advance(30)
    desk.first_token(late)
    desk.run(flood, AdmissionRequest(prompts=[100_000]))
    facts = desk.run(tenant, AdmissionRequest(prompts=[100]))
    desk.clock.advance(5)
    desk.first_token(facts)  # far later than foretold
    with _refused(503, "overloaded"):
        desk.run(tenant, AdmissionRequest(prompts=[100]))
    desk.clock.advance(30)  # nothing was heard since: it is tried again
    assert desk.run(tenant, AdmissionRequest(prompts=[100])).stage is SequenceStage.WAITING


def test_only_work_of_own_and_higher_bands_is_ahead() -> None:
    tenant, low = _interactive(), _tenant("low", band=5)
    desk = Desk.of(tenant, low)
    _measured(desk, 1000)
    desk.run(low, AdmissionRequest(prompts=[50_000]))
    facts = desk.run(tenant, AdmissionRequest(prompts=[100]))
    assert facts.start.queue_s == pytest.approx(0.1)
    with _refused(503, "overloaded"):
        desk.run(tenant, AdmissionRequest(prompts=[100], priority=5))


def test_under_fcfs_work_of_lower_bands_is_ahead_too() -> None:
    tenant, low = _interactive(), _tenant("low", band=5)
    desk = Desk.of(tenant, low, policy="fcfs")
    _measured(desk, 1000)
    desk.run(low, AdmissionRequest(prompts=[50_000]))
    with _refused(503, "overloaded"):
        desk.run(tenant, AdmissionRequest(prompts=[100]))
    desk.usages.set_policy("priority")
    assert desk.run(tenant, AdmissionRequest(prompts=[100])).start.queue_s == pytest.approx(0.1)


def test_a_prompt_that_misses_its_goal_alone_is_held_to_the_queue_only() -> None:
    tenant = _interactive()
    desk = Desk.of(tenant)
    _measured(desk, 1000)
    assert desk.run(tenant, AdmissionRequest(prompts=[10_000])).stage is SequenceStage.WAITING
    with _refused(503, "overloaded"):
        desk.run(tenant, AdmissionRequest(prompts=[10_000]))


def test_cached_prompts_take_no_time() -> None:
    tenant = _interactive()
    desk = Desk.of(tenant)
    _measured(desk, 1000)
    for _ in range(100):
        facts = desk.run(tenant, AdmissionRequest(prompts=[1000]))
        desk.first_token(facts)
        desk.finish(facts, num_cached=990)
    waiting = [desk.run(tenant, AdmissionRequest(prompts=[1000])) for _ in range(5)]
    assert waiting[-1].start.queue_s == pytest.approx(0.05, rel=0.1)


def test_where_a_band_is_shared_by_weight_the_queue_of_another_does_not_count() -> None:
    tenant, flood = _interactive(weight=3), _tenant("flood")
    desk = Desk.of(tenant, flood, policy="fair")
    _measured(desk, 1000)
    desk.run(flood, AdmissionRequest(prompts=[1_000_000]))
    facts = desk.run(tenant, AdmissionRequest(prompts=[300]))
    assert facts.start.queue_s == pytest.approx(0.4)  # at three quarters of the speed
    for _ in range(3):
        desk.run(tenant, AdmissionRequest(prompts=[300]))
    with _refused(503, "overloaded"):
        desk.run(tenant, AdmissionRequest(prompts=[600]))


@pytest.mark.parametrize("is_fair", [True, False])
def test_a_tenant_with_nothing_waiting_is_soon_tried_again_where_it_is_owed_its_share(is_fair: bool) -> None:
    tenant, flood = _interactive(), _tenant("flood")
    desk = Desk.of(tenant, flood, policy="fair" if is_fair else "priority")
    _measured(desk, 1000)
    desk.run(flood, AdmissionRequest(prompts=[300]))
    facts = desk.run(tenant, AdmissionRequest(prompts=[100]))
    desk.clock.advance(5)
    desk.first_token(facts)
    with _refused(503, "overloaded"):
        desk.run(tenant, AdmissionRequest(prompts=[100]))
    desk.clock.advance(3)
    if is_fair:
        assert desk.run(tenant, AdmissionRequest(prompts=[100])).stage is SequenceStage.WAITING
    else:
        with _refused(503, "overloaded"):
            desk.run(tenant, AdmissionRequest(prompts=[100]))


def test_a_queue_that_drains_more_slowly_than_its_share_is_forecast_by_its_own_speed() -> None:
    tenant, flood = _interactive(ttft_s=1000.0), _tenant("flood")
    desk = Desk.of(tenant, flood, policy="fair")
    _measured(desk, 1000)
    desk.run(flood, AdmissionRequest(prompts=[100_000]))
    waiting = [desk.run(tenant, AdmissionRequest(prompts=[100])) for _ in range(10)]
    for facts in waiting[:5]:
        desk.clock.advance(1)  # 100 tokens a second, a fifth of its share
        desk.first_token(facts)
    late = desk.run(tenant, AdmissionRequest(prompts=[100]))
    assert late.start.queue_s == pytest.approx(6.0)
    desk.clock.advance(60)  # not heard of since: its share of the speed counts again
    assert desk.run(tenant, AdmissionRequest(prompts=[100])).start.queue_s == pytest.approx(1.4, abs=0.01)


def test_a_tenant_that_has_the_engine_to_itself_waits_no_longer_than_for_all_that_waits() -> None:
    tenant, flood = _interactive(ttft_s=1000.0), _tenant("flood")
    desk = Desk.of(tenant, flood, policy="fair")
    _measured(desk, 1000)
    held = desk.run(flood, AdmissionRequest(prompts=[100_000]))
    waiting = [desk.run(tenant, AdmissionRequest(prompts=[100])) for _ in range(10)]
    desk.clock.advance(10)
    desk.first_token(waiting[0])
    desk.first_token(held)  # the flood is over
    assert desk.run(tenant, AdmissionRequest(prompts=[100])).start.queue_s == pytest.approx(1.0)


def test_a_tenant_that_allows_it_gets_less_instead_of_a_refusal() -> None:
    tenant = _interactive(best_effort=BestEffort(64, 7))
    desk = Desk.of(tenant)
    _measured(desk, 1000)
    with _enter(desk, tenant) as entry:
        assert entry.admit(AdmissionRequest(prompts=[10], max_tokens=500)).service is ServiceLevel.FULL
    desk.run(tenant, AdmissionRequest(prompts=[5000]))
    with _enter(desk, tenant) as entry:
        terms = entry.admit(AdmissionRequest(prompts=[10], max_tokens=500))
    assert (terms.service, terms.max_tokens, terms.band) == (ServiceLevel.DEFERRED, 64, 7)


def test_under_pressure_answers_get_shorter_then_later_and_whole_again() -> None:
    tenant, plain = _tenant(best_effort=BestEffort(64, 7)), _tenant("plain")
    desk = Desk.of(tenant, plain, max_queued=10)

    def asked(max_tokens: int = 500) -> Terms:
        with _enter(desk, tenant) as entry:
            return entry.admit(AdmissionRequest(prompts=[10], max_tokens=max_tokens))

    def wait(seconds: float) -> None:
        for _ in range(round(seconds * 10)):
            desk.clock.advance(0.1)
            asked()

    assert asked() == Terms(band=0, service=ServiceLevel.FULL)
    with _enter(desk, plain, 6):
        wait(1)
        assert asked() == Terms(band=0, service=ServiceLevel.SHORTENED, max_tokens=64)
        assert asked(64) == Terms(band=0, service=ServiceLevel.FULL)
        with _enter(desk, plain, 3):
            wait(1)
            assert asked() == Terms(band=7, service=ServiceLevel.DEFERRED, max_tokens=64)
            with _enter(desk, plain) as entry:
                assert entry.admit(AdmissionRequest(prompts=[10], max_tokens=500)) == Terms(band=0)
    wait(11)
    assert asked() == Terms(band=0, service=ServiceLevel.FULL)


def test_a_change_of_the_tenants_keeps_usage_and_drops_removed_tenants() -> None:
    tenant, leaver = _tenant(limits=Limits(requests_per_minute=4, max_concurrency=9)), _tenant("leaver")
    desk = Desk.of(tenant, leaver)
    facts = desk.run(leaver, AdmissionRequest(prompts=[5]))
    for _ in range(3):
        with _enter(desk, tenant):
            pass
    desk.usages.set_table(_table(_tenant(limits=Limits(requests_per_minute=8))))
    assert dict(desk.admission.rate_headers(tenant))[b"x-ratelimit-remaining-requests"] == b"2"
    assert len(desk.usages) == 2
    desk.finish(facts)
    assert len(desk.usages) == 1
    with _enter(desk, leaver):  # its key was checked just before the change
        assert len(desk.usages) == 2
    assert len(desk.usages) == 1
    desk.usages.set_table(_table(_tenant()))
    assert desk.admission.rate_headers(tenant) == []


_moves = st.lists(
    st.tuples(st.sampled_from(["run", "first", "finish", "leave", "fail"]), st.integers(0, 2), st.integers(1, 300)),
    max_size=60,
)


@given(_moves)
def test_nothing_is_left_of_any_history(moves: list[tuple[str, int, int]]) -> None:
    tenants = [
        _tenant("a", Limits(max_concurrency=3, tokens_per_minute=1000)),
        _tenant("b", Limits(queue_share=0.3, requests_per_minute=20), band=2),
        _interactive("c", best_effort=BestEffort(10, 9)),
    ]
    desk = Desk.of(*tenants, max_queued=8)
    desk.tenants = tuple(tenants)
    _measured(desk, 1000)
    live: list[SequenceFacts] = []
    for move, index, amount in moves:
        desk.clock.advance(amount / 100)
        tenant = tenants[index]
        chosen = live[amount % len(live)] if live else None
        if move == "run":
            with contextlib.suppress(AdmissionError):
                live.append(desk.run(tenant, AdmissionRequest(prompts=[amount], max_tokens=amount)))
        elif move == "fail":
            with contextlib.suppress(AdmissionError, ZeroDivisionError), _enter(desk, tenant) as entry:
                entry.admit(AdmissionRequest(prompts=[amount], max_tokens=amount))
                raise ZeroDivisionError
        elif chosen is not None and move == "first" and chosen.stage is SequenceStage.WAITING:
            desk.first_token(chosen)
        elif chosen is not None and move in ("finish", "leave"):
            live.remove(chosen)
            desk.finish(chosen, chosen.num_outputs)
        assert desk.usages.of(tenants[0]).open <= 3
        assert desk.usages.of(tenants[1]).queued <= 2
        assert sum(desk.usages.of(each).queued for each in tenants) <= 8
    for facts in live:
        desk.finish(facts)
    for tenant in tenants:
        _keeps_nothing(desk, tenant)
