"""The arithmetic of sizing compared with the worked example of arXiv 2405.08944: Yi-34B-200K on one A100-80G."""

from dataclasses import replace

import pytest

from tiercel.simulation.sizing import (
    DEVICES,
    ModelShape,
    Session,
    WorkloadBucket,
    admissible_rate,
    bucket_requests_per_s,
    concurrency,
    context_figures,
    critical_tokens,
    decode_s,
    free_kv_bytes,
    prefill_s,
    step_s,
    switch_s,
    workload_loads,
)
from tiercel.values.units import GIB

A100, H200, CPU = DEVICES["A100-80G"], DEVICES["H200"], DEVICES["cpu"]
YI_34B = ModelShape(34 * 10**9, 34 * 10**9, layers=60, kv_heads=8, head_dim=128, attention_width=7168, itemsize=2)
FITTED = replace(
    YI_34B, attention_width=4096
)  # not that of the model, but the width that gives the paper's prefill times
LLAMA_8B = ModelShape(8_030_261_248, 8_030_261_248, 32, 8, 128, attention_width=4096, itemsize=2)


def test_the_kv_of_the_example_is_the_papers() -> None:
    assert YI_34B.kv_token_bytes == 245_760
    assert YI_34B.weights_bytes == 68 * 10**9
    assert 4096 * YI_34B.kv_token_bytes / GIB == pytest.approx(0.9375)
    assert 50_000 * YI_34B.kv_token_bytes / GIB == pytest.approx(11.44, abs=0.005)


def test_prefill_of_the_example_agrees_with_the_paper_at_a_fitted_width_alone() -> None:
    assert prefill_s(FITTED, A100, 4000) == pytest.approx(0.89, rel=0.03)
    assert prefill_s(FITTED, A100, 50_000) == pytest.approx(14.1, rel=0.06)
    assert prefill_s(YI_34B, A100, 4000) == pytest.approx(0.89, rel=0.03)  # the quadratic term is still small
    assert prefill_s(YI_34B, A100, 50_000) > 1.25 * 14.1


def test_prefill_of_the_example_with_the_models_own_width() -> None:
    assert prefill_s(YI_34B, A100, 4000) == pytest.approx(0.9159, abs=5e-5)
    assert prefill_s(YI_34B, A100, 50_000) == pytest.approx(17.790, abs=5e-4)
    assert prefill_s(FITTED, A100, 50_000) == pytest.approx(14.836, abs=5e-4)


@pytest.mark.parametrize("tokens", [4000, 4096])
def test_decoding_and_concurrency_of_the_example_at_4k(tokens: int) -> None:
    assert decode_s(YI_34B, A100, tokens, 250) == pytest.approx(8.5, rel=0.02)
    assert 17 <= concurrency(YI_34B, A100, tokens) <= 20


def test_decoding_concurrency_and_switch_of_the_example_at_50k() -> None:
    assert decode_s(YI_34B, A100, 50_000, 250) == pytest.approx(9.8, rel=0.03)
    assert concurrency(YI_34B, A100, 50_000) == 1
    assert switch_s(YI_34B, A100, 50_000) == pytest.approx(1.1, rel=0.12)


def test_the_critical_batch_is_the_ratio_of_the_rates() -> None:
    assert critical_tokens(YI_34B, A100) == 156
    assert round(critical_tokens(LLAMA_8B, H200)) == 206


def test_an_8b_model_on_an_h200_keeps_877_thousand_tokens_in_115_gb() -> None:
    reserve = H200.memory_bytes - LLAMA_8B.weights_bytes - 115 * 10**9
    figures = context_figures(LLAMA_8B, H200, Session(32_768), reserve)
    assert LLAMA_8B.kv_token_bytes == 131_072
    assert figures.free_bytes == 115 * 10**9
    assert figures.longest_context_tokens == pytest.approx(877_000, rel=0.001)
    assert figures.concurrency == 26


def test_the_figures_together_are_the_figures_alone() -> None:
    figures = context_figures(YI_34B, A100, Session(50_000, turns=5, answer_tokens=100, think_s=10), GIB)
    assert figures.concurrency == concurrency(YI_34B, A100, 50_000, GIB)
    assert figures.prefill_s == prefill_s(YI_34B, A100, 50_000)
    assert figures.decode_s == decode_s(YI_34B, A100, 50_000, 100)
    assert figures.switch_s == switch_s(YI_34B, A100, 50_000)
    assert figures.session_s == figures.prefill_s + 5 * (figures.decode_s + 10)


def test_users_with_a_seat_each_are_bound_by_their_number_and_pay_no_switch() -> None:
    session = Session(4096, turns=10, think_s=60, users=4)
    figures = context_figures(YI_34B, A100, session)
    assert figures.bound_by == "users"
    assert figures.session_s == pytest.approx(figures.prefill_s + 10 * (figures.decode_s + 60))
    assert figures.sessions_per_s == pytest.approx(4 / figures.session_s)


def test_without_a_number_of_users_every_seat_is_taken() -> None:
    figures = context_figures(YI_34B, A100, Session(4096, turns=10))
    assert figures.bound_by == "seats"
    assert figures.sessions_per_s == pytest.approx(figures.concurrency / figures.session_s)


def test_every_turn_of_users_without_a_seat_adds_a_switch() -> None:
    figures = context_figures(YI_34B, A100, Session(50_000, turns=10, think_s=60, users=2))
    turn_s = figures.decode_s + figures.switch_s
    assert figures.session_s == pytest.approx(figures.prefill_s + 10 * (turn_s + 60))
    assert figures.bound_by == "users"


def test_a_seat_is_free_while_its_user_thinks() -> None:
    alone = context_figures(YI_34B, A100, Session(50_000, turns=10, think_s=60))
    crowd = context_figures(YI_34B, A100, Session(50_000, turns=10, think_s=60, users=1000))
    assert crowd.bound_by == "seats"
    assert crowd.sessions_per_s == pytest.approx(1 / (crowd.session_s - 600))
    assert crowd.sessions_per_s > 5 * alone.sessions_per_s


def test_a_slow_link_and_a_slow_processor_bound_a_crowd() -> None:
    crowd = Session(4096, turns=10, users=10_000)
    slow_link = context_figures(YI_34B, replace(A100, link_bytes_per_s=1e8), crowd)
    slow_compute = context_figures(YI_34B, replace(A100, flops_per_s=1e12), crowd)
    assert slow_link.bound_by == "link"
    assert slow_link.sessions_per_s == pytest.approx(1 / (10 * slow_link.switch_s))
    assert slow_compute.bound_by == "compute"


@pytest.mark.parametrize("users", [None, 3])
def test_a_context_without_room_has_no_sessions(users: int | None) -> None:
    figures = context_figures(YI_34B, A100, Session(100_000, users=users))
    assert (figures.concurrency, figures.sessions_per_s, figures.bound_by) == (0, 0.0, "memory")
    assert figures.longest_context_tokens < 100_000
    assert concurrency(YI_34B, A100, figures.longest_context_tokens) == 1


def test_weights_without_room_leave_nothing() -> None:
    assert free_kv_bytes(YI_34B, CPU) == 0
    assert concurrency(YI_34B, CPU, 1) == 0


@pytest.mark.parametrize("users", [1, 2, 17, 18, 100, 10_000])
def test_more_turns_never_make_more_sessions(users: int) -> None:
    rates = [context_figures(YI_34B, A100, Session(4096, turns, users=users)).sessions_per_s for turns in range(1, 9)]
    assert rates == sorted(rates, reverse=True)


def test_a_step_multiplies_beyond_the_critical_batch_and_reads_below_it() -> None:
    read_s = YI_34B.weights_bytes / A100.memory_bytes_per_s
    assert step_s(YI_34B, A100, 0, 1) == step_s(YI_34B, A100, 0, 155) == read_s
    assert step_s(YI_34B, A100, 0, 312) == pytest.approx(2 * read_s)


def test_float32_has_a_rate_of_its_own() -> None:
    wide = replace(LLAMA_8B, itemsize=4)
    assert prefill_s(wide, A100, 1000) == pytest.approx(prefill_s(LLAMA_8B, A100, 1000) * 16)
    assert prefill_s(wide, replace(A100, float32_flops_per_s=None), 1000) == prefill_s(LLAMA_8B, A100, 1000)


def test_a_mixture_of_experts_multiplies_and_reads_its_active_experts() -> None:
    mixture = replace(YI_34B, active_parameters=YI_34B.parameters // 4)
    assert prefill_s(mixture, A100, 100) < prefill_s(YI_34B, A100, 100) / 3
    assert decode_s(mixture, A100, 0, 1) == decode_s(YI_34B, A100, 0, 1) / 4
    assert decode_s(mixture, A100, 0, 1, sequences=4) == decode_s(YI_34B, A100, 0, 1, sequences=4)
    assert concurrency(mixture, A100, 4096) == concurrency(YI_34B, A100, 4096)


def test_a_bucket_takes_its_prefill_and_its_part_of_the_steps() -> None:
    one_token = bucket_requests_per_s(YI_34B, A100, WorkloadBucket(1000, 1, 1.0), 256)
    assert one_token == pytest.approx(1 / prefill_s(YI_34B, A100, 1000))
    bucket = WorkloadBucket(1000, 201, 1.0)
    alone = bucket_requests_per_s(YI_34B, A100, bucket, max_sequences=1)
    assert 1 / alone == pytest.approx(1 / one_token + 200 * step_s(YI_34B, A100, 1100.5, 1))
    assert bucket_requests_per_s(YI_34B, A100, bucket, max_sequences=8) > 5 * alone
    full = bucket_requests_per_s(YI_34B, A100, bucket, max_sequences=10**9)
    assert full == bucket_requests_per_s(YI_34B, A100, bucket, max_sequences=66)  # what memory holds
    assert full > bucket_requests_per_s(YI_34B, A100, bucket, max_sequences=65)


def test_a_bucket_that_does_not_fit_has_no_throughput() -> None:
    assert bucket_requests_per_s(YI_34B, A100, WorkloadBucket(70_000, 5000, 1.0), 256) == 0.0


def test_loads_are_shares_over_throughputs_and_sum_to_one_at_the_admissible_rate() -> None:
    buckets = (WorkloadBucket(100, 100, 0.75, requests_per_s=10.0), WorkloadBucket(4000, 400, 0.25, requests_per_s=1.0))
    loads = workload_loads(LLAMA_8B, H200, buckets, 256)
    assert [part.load for part in loads] == pytest.approx([0.075, 0.25])
    assert admissible_rate(loads) == pytest.approx(1 / 0.325)


def test_a_workload_of_one_bucket_is_admitted_at_its_throughput() -> None:
    bucket = WorkloadBucket(1024, 512, 0.3)
    loads = workload_loads(LLAMA_8B, H200, [bucket], 256)
    assert admissible_rate(loads) == pytest.approx(bucket_requests_per_s(LLAMA_8B, H200, bucket, 256))


def test_splitting_a_bucket_changes_nothing() -> None:
    whole = workload_loads(LLAMA_8B, H200, [WorkloadBucket(1024, 512, 0.6), WorkloadBucket(64, 64, 0.4)], 256)
    parts = workload_loads(
        LLAMA_8B,
        H200,
        [WorkloadBucket(1024, 512, 0.2), WorkloadBucket(64, 64, 0.4), WorkloadBucket(1024, 512, 0.4)],
        256,
    )
    assert admissible_rate(whole) == pytest.approx(admissible_rate(parts))
