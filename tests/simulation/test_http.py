"""The HTTP process of a simulation: the order of its work, and the delay of clients and steps."""

import random

import pytest
from msgspec.structs import replace

from tiercel.scheduler.cost import StepTimes, linear_times
from tiercel.simulation.fitting import ClosedLoop, Corrections, fit_steps, play
from tiercel.simulation.http import HttpProcess, HttpTimes
from tiercel.simulation.machine import CostMachine
from tiercel.simulation.replay import Replay
from tiercel.simulation.result import figures
from tiercel.simulation.simulator import SimSettings
from tiercel.simulation.workload import (
    Lengths,
    PromptPart,
    SimRequest,
    Sources,
    Workload,
    draw_requests,
    ordered_workload,
)
from tiercel.values.clock import ManualClock
from tiercel.values.ids import TenantId
from tiercel.values.tenant import TenantShare

A = TenantShare(name=TenantId("a"))
TIMES = linear_times(base_ms=2.0, prefill_ms=0.05, decode_ms=0.1, context_ms=0.0)
SMALL = SimSettings(times=TIMES, blocks=1024, max_num_seqs=16, max_num_batched_tokens=256)


def requests(*at_s: float, prompt: int = 20, outputs: int = 5) -> Workload:
    return ordered_workload(
        (A,),
        [SimRequest(sent_s, A.name, (PromptPart(number + 1, prompt),), outputs) for number, sent_s in enumerate(at_s)],
    )


def drawn(count: int, seed: int = 0) -> Workload:
    lengths = Lengths(input_len=120, output_len=16, sigma=0.5)
    rng = random.Random(seed)
    return ordered_workload((A,), draw_requests(A, [0.0] * count, lengths, rng, Sources()))


def process(times: HttpTimes, concurrency: int | None = None) -> HttpProcess:
    return HttpProcess(times, [CostMachine(TIMES, ManualClock())], concurrency=concurrency)


def test_requests_reach_the_engine_one_after_the_other() -> None:
    http = process(HttpTimes(request_ms=10.0, prompt_token_ms=1.0))
    http.expect(requests(0.0, 0.001).requests)
    assert http.next_s == 0.0
    assert http.take(0.029) == []
    assert http.next_s == pytest.approx(0.030)
    assert len(http.take(0.030)) == 1
    assert http.next_s == pytest.approx(0.060)


def test_a_report_waits_for_the_requests_before_it() -> None:
    http = process(HttpTimes(request_ms=10.0, report_ms=1.0, token_ms=2.0))
    http.expect(requests(0.0, 0.020).requests)
    assert http.report(0.005) == pytest.approx(0.011)
    assert http.token(0.005) == pytest.approx(0.013)
    assert http.token(0.005) == pytest.approx(0.015)
    assert http.report(0.021) == pytest.approx(0.031)


def test_a_first_token_is_as_late_as_http_makes_it() -> None:
    times = HttpTimes(request_ms=4.0, report_ms=1.0, token_ms=0.5)
    bare, real = (play(replace(SMALL, http=http), requests(0.0)).simulation.tally for http in (HttpTimes(), times))
    assert real.by_tenant[A.name].ttft_s[0] == pytest.approx(bare.by_tenant[A.name].ttft_s[0] + 0.0055)


def test_zero_times_change_nothing() -> None:
    workload = requests(*(0.01 * number for number in range(50)))
    plain = Replay(SMALL, workload)
    plain.run()
    listened = Replay(SMALL, workload)
    listened.simulation.tally.http = listened.http
    listened.run()
    assert figures(plain) == figures(listened)


def test_contention_lengthens_a_step_by_its_cost_and_is_free_when_idle() -> None:
    clock = ManualClock()
    machine = CostMachine(TIMES, clock)
    machine.delay(1.0)
    assert machine.busy_s == 0.0
    workload = requests(*(0.002 * number for number in range(200)))
    without, shared = (
        play(replace(SMALL, http=HttpTimes(request_ms=1.0, contention=part)), workload).simulation
        for part in (0.0, 1.0)
    )
    assert without.machine.delayed_s == 0.0
    assert 0.1 < shared.machine.delayed_s <= 0.2 + 1e-9
    assert shared.now_s > without.now_s


def test_a_closed_loop_keeps_its_concurrency_and_ends_all_requests() -> None:
    replay = Replay(replace(SMALL, concurrency=4), drawn(60))
    most = 0
    simulation = replay.simulation
    step = simulation.step

    def watched(until_s: float = float("inf")) -> bool:
        nonlocal most
        most = max(most, len(simulation.book))
        return step(until_s)

    simulation.step = watched  # type: ignore[method-assign]
    replay.run()
    found = figures(replay)
    assert most == 4
    assert found.finished == found.requests == 60


def test_a_closed_loop_sends_nothing_after_its_time() -> None:
    replay = play(replace(SMALL, concurrency=2), drawn(500), 0.5)
    tally = replay.simulation.tally
    assert 2 < tally.finished < 500
    assert tally.finished == tally.by_tenant[A.name].submitted
    assert replay.simulation.now_s < 1.5


@pytest.mark.parametrize("concurrency", [None, 3])
def test_a_seed_gives_the_same_figures_with_http(concurrency: int | None) -> None:
    times = HttpTimes(request_ms=1.5, prompt_token_ms=0.01, token_ms=0.2, contention=0.7)
    settings = replace(SMALL, http=times, concurrency=concurrency, noise=0.1)
    assert figures(play(settings, drawn(80))) == figures(play(settings, drawn(80)))


def test_the_fit_finds_the_factor_and_the_addend_of_another_machine() -> None:
    http = HttpTimes(request_ms=2.0, token_ms=0.1, contention=1.0)
    truth = Corrections(step_factor=1.4, step_ms=1.5, http=http)
    loops: list[ClosedLoop] = []
    for seed, concurrency in enumerate((1, 4, 16)):
        workload = drawn(400, seed)
        replay = play(truth.applied(replace(SMALL, concurrency=concurrency)), workload, 1.5)
        loops.append(
            ClosedLoop(
                workload=workload, concurrency=concurrency, begun_s=1.5, lasted_s=replay.simulation.now_s,
                requests=replay.simulation.tally.finished,
            )
        )  # fmt: skip
    found = fit_steps(SMALL, http, loops)
    assert found.step_factor == pytest.approx(1.4, rel=0.02)
    assert found.step_ms == pytest.approx(1.5, rel=0.05)


def test_a_corrected_table_keeps_its_axes() -> None:
    times = StepTimes(prefill_tokens=(0, 64), decodes=(0, 8), context_tokens=(0,), ms=(1.0, 2.0, 3.0, 4.0))
    fixed = Corrections(step_factor=2.0, step_ms=1.0).corrected(times)
    assert fixed.ms == (3.0, 5.0, 7.0, 9.0)
    assert (fixed.prefill_tokens, fixed.decodes, fixed.context_tokens) == ((0, 64), (0, 8), (0,))


@pytest.mark.parametrize("fields", [{"request_ms": -1.0}, {"contention": -0.1}])
def test_times_below_zero_are_refused(fields: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="at least 0"):
        HttpTimes(**fields)
