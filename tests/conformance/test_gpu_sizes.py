"""Tests of the suites of exactness with the steps of a GPU (`gpu_sizes.py`). `test_every_gpu_size.py` runs the rest."""

import pytest

from tests.conformance import test_engine_exactness as engine_suite
from tests.conformance import test_tiers_exactness as tier_suite
from tests.conformance.gpu_sizes import CROWDED, GPU_SCALES, run_a_thousand, with_steps
from tests.conformance.test_engine_exactness import Compare, Reference, assert_exact, exact, make_reference

test_prefix_hits = engine_suite.test_prefix_hits
test_prefixes_that_come_back_from_the_disk_after_a_restart = (
    tier_suite.test_prefixes_that_come_back_from_the_disk_after_a_restart
)

__all__ = ["exact"]  # a fixture


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return make_reference("llama3", tmp_path_factory.mktemp("2048"), GPU_SCALES[2048])


@pytest.fixture(scope="module")
def crowded(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return make_reference("llama3", tmp_path_factory.mktemp("crowded"), CROWDED)


def _compare_with(reference: Reference) -> Compare:
    def compare(got: list[list[int]]) -> None:
        assert_exact(got, reference)

    return compare


@pytest.mark.parametrize("size", [2048, 8192])
def test_sequences_of_a_small_pool_preempt_each_other_and_come_back_from_ddr(crowded: Reference, size: int) -> None:
    there = with_steps(crowded, size)
    engine_suite.test_preempted_by_a_cache_that_is_too_small(there, _compare_with(there), False)
    tier_suite.test_prefixes_that_come_back_from_ddr(there, _compare_with(there))


def test_a_thousand_sequences_run_at_once(crowded: Reference) -> None:
    there = with_steps(crowded, 8192)
    assert run_a_thousand(there, _compare_with(there)) > 800
