"""The suites of exactness with the steps of a GPU (`gpu_sizes.py`), whole."""

import pytest

from tests.conformance import test_engine_exactness as engine_suite
from tests.conformance import test_tiers_exactness as tier_suite
from tests.conformance.gpu_sizes import CROWDED, GPU_SCALES, run_a_thousand, with_steps
from tests.conformance.test_engine_exactness import Compare, Family, Reference, exact, make_reference
from tests.conformance.test_tiers_exactness import arena_fd

__all__ = ["arena_fd", "exact"]  # fixtures

pytestmark = pytest.mark.slow

FAMILIES: tuple[Family, ...] = ("llama3",)

test_sixteen_at_once = engine_suite.test_sixteen_at_once
test_prefix_hits = engine_suite.test_prefix_hits
test_log_probabilities_are_those_of_transformers = engine_suite.test_log_probabilities_are_those_of_transformers
test_prefixes_that_come_back_from_the_disk_after_a_restart = (
    tier_suite.test_prefixes_that_come_back_from_the_disk_after_a_restart
)
test_a_new_engine_finds_the_blocks_in_shared_memory = tier_suite.test_a_new_engine_finds_the_blocks_in_shared_memory


@pytest.fixture(
    scope="module",
    params=[(family, size) for family in FAMILIES for size in GPU_SCALES],
    ids=lambda one: f"{one[0]}, {one[1]} tokens a step",
)
def reference(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    family, size = request.param
    return make_reference(family, tmp_path_factory.mktemp(family), GPU_SCALES[size])


def test_a_thousand_sequences_run_at_once(reference: Reference, exact: Compare) -> None:
    # With 2,048 tokens a step, the first sequences end before the last prompts have been read.
    assert run_a_thousand(reference, exact) > min(800, (reference.scale.step_tokens or 0) // 5)


@pytest.mark.parametrize("family", FAMILIES)
def test_sequences_of_a_small_pool_preempt_each_other_and_come_back_from_ddr(
    family: Family, tmp_path_factory: pytest.TempPathFactory
) -> None:
    crowded = make_reference(family, tmp_path_factory.mktemp(family), CROWDED)
    for size in GPU_SCALES:
        there = with_steps(crowded, size)

        def compare(got: list[list[int]], there: Reference = there) -> None:
            engine_suite.assert_exact(got, there)

        engine_suite.test_preempted_by_a_cache_that_is_too_small(there, compare, False)
        tier_suite.test_prefixes_that_come_back_from_ddr(there, compare)
