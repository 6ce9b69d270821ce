"""The top-k, top-p and min-p filters."""

from typing import cast

import numpy as np
import pytest
import torch
from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from tiercel.engine.sampling.filter import limits_no_sync
from tiercel.engine.sampling.row import RowTable
from tiercel.values.request import SamplingParams


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


def kept(scores, *params):
    """Return which tokens [M, vocab] each row may draw; scores are those after temperature."""
    table = RowTable(len(params), scores.shape[1])
    for row, each in enumerate(params):
        table.set_row(row, each, ())
    floats = torch.from_numpy(table.floats)
    return scores >= limits_no_sync(scores, table.features, floats, table.top_ks)


def kept_by_transformers(scores, params):
    """Return the same for one row [1, vocab], by the warpers of transformers in the order of this sampler."""
    nothing = cast(torch.LongTensor, torch.zeros((1, 0), dtype=torch.int64))
    if params.min_p > 0:
        scores = MinPLogitsWarper(params.min_p)(nothing, scores)
    if params.top_k > 0:
        scores = TopKLogitsWarper(params.top_k)(nothing, scores)
    if params.top_p < 1:
        scores = TopPLogitsWarper(params.top_p)(nothing, scores.double())
    return scores > -torch.inf


def random_params(rng):
    return SamplingParams(
        min_p=rng.choice([0.0, 0.0, 0.01, 0.2, 1.0]),
        top_k=int(rng.choice([0, 0, 1, 2, 7, 40, 5000])),
        top_p=rng.choice([1.0, 0.999, 0.9, 0.5, 0.1, 1e-6]),
    )


def test_filters_keep_the_same_tokens_as_the_warpers_of_transformers():
    rng = np.random.default_rng(1)
    for vocab_size in (50, 3000):
        scores = torch.from_numpy(rng.normal(0, 3, (200, vocab_size)).astype(np.float32))
        params = [random_params(rng) for _ in scores]
        actual = kept(scores, *params)
        for row, each in enumerate(params):
            assert torch.equal(actual[row], kept_by_transformers(scores[row : row + 1], each)[0]), (row, each)


def test_top_p_keeps_the_smallest_set_that_reaches_the_mass():
    scores = torch.tensor([[0.5, 0.25, 0.15, 0.1]]).log()
    assert kept(scores, SamplingParams(top_p=0.49)).tolist() == [[True, False, False, False]]
    assert kept(scores, SamplingParams(top_p=0.51)).tolist() == [[True, True, False, False]]
    assert kept(scores, SamplingParams(top_p=0.91)).tolist() == [[True, True, True, True]]


def test_top_p_counts_the_mass_that_top_k_and_min_p_left():
    scores = torch.tensor([[0.5, 0.25, 0.15, 0.1]]).log()
    assert kept(scores, SamplingParams(top_p=0.6, top_k=2)).tolist() == [[True, False, False, False]]
    assert kept(scores, SamplingParams(top_p=0.6, min_p=0.4)).tolist() == [[True, False, False, False]]


def test_tokens_tied_with_the_last_kept_one_are_kept():
    scores = torch.tensor([[2.0, 1.0, 1.0, 1.0, 0.0, 0.0]])
    tied = [True, True, True, True, False, False]
    assert kept(scores, SamplingParams(top_k=2)).tolist() == [tied]
    assert kept(scores, SamplingParams(top_p=0.6)).tolist() == [tied]
    assert kept(scores, SamplingParams(top_k=2, top_p=0.6)).tolist() == [tied]
    # the ties count in the mass: e^2 / (e^2 + 3 e) = 0.475
    assert kept(scores, SamplingParams(top_k=2, top_p=0.47)).tolist() == [[True] + [False] * 5]
    assert kept(scores, SamplingParams(top_k=2, top_p=0.48)).tolist() == [tied]


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(top_p=1e-9),
        SamplingParams(top_p=0.0),
        SamplingParams(top_p=0.0, top_k=3),
        SamplingParams(min_p=1.0),
    ],
)
def test_the_likeliest_token_is_always_kept(params):
    scores = torch.randn(8, 100, generator=torch.Generator().manual_seed(1))
    assert torch.equal(kept(scores, *[params] * 8), scores == scores.amax(-1, keepdim=True))


def test_filters_that_are_off_keep_everything():
    scores = torch.randn(3, 100, generator=torch.Generator().manual_seed(1))
    params = (SamplingParams(), SamplingParams(top_k=100), SamplingParams(top_k=-1, top_p=1.0, min_p=0.0))
    assert kept(scores, *params).all()


def test_possible_tokens_stay_possible_beside_impossible_ones():
    scores = torch.full((1, 50), -torch.inf)
    scores[0, [3, 30]] = torch.tensor([1.0, 1.5])
    for params in (SamplingParams(top_k=10), SamplingParams(top_p=0.99), SamplingParams(top_k=10, top_p=0.99)):
        assert (kept(scores, params) & scores.isfinite()).nonzero()[:, 1].tolist() == [3, 30]
