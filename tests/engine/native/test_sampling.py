"""The native draw of every class of processors against plain torch, on random rows."""

import random

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.engine.native.classes import CLASSES, library_of
from tests.seeds import fresh_seeds
from tiercel.engine.native.table import CpuClass
from tiercel.engine.sampling.filter import limits_no_sync
from tiercel.engine.sampling.masks import Masks, exclude_no_sync
from tiercel.engine.sampling.native import NativeDraw
from tiercel.engine.sampling.noise import gumbel_no_sync, noise_keys
from tiercel.engine.sampling.row import Column, DrawColumn, Feature

SEEDS = [1, 2, *fresh_seeds(2)]
OFF = (-np.inf, np.inf, 0)  # log_min_p, top_p, top_k


def draws_of(keys: np.ndarray, temperatures: list[float], filters: list[tuple[float, float, int]]) -> Tensor:
    draws = np.zeros((len(keys), len(DrawColumn)), np.int32)
    draws[:, : DrawColumn.TEMPERATURE] = keys
    floats = [(heat, log_min_p, top_p) for heat, (log_min_p, top_p, _) in zip(temperatures, filters, strict=True)]
    draws[:, DrawColumn.TEMPERATURE : DrawColumn.TOP_K] = np.array(floats, np.float32).view(np.int32)
    draws[:, DrawColumn.TOP_K] = [top_k for _, _, top_k in filters]
    return torch.from_numpy(draws)


def scores_by_torch(logits: Tensor, draws: Tensor) -> tuple[Tensor, Tensor]:
    """Return perturbed scores, and the same with -inf for the tokens that the filters exclude."""
    vocab_size = logits.shape[1]
    floats = draws[:, DrawColumn.TEMPERATURE : DrawColumn.TOP_K].view(torch.float32)
    heat, log_min_p, top_p = floats[..., None].unbind(1)
    scores = torch.where(heat > 0, logits.float() / heat, logits.float())
    noise = torch.where(heat > 0, gumbel_no_sync(draws[:, : DrawColumn.TEMPERATURE], vocab_size), 0)
    top_k = draws[:, DrawColumn.TOP_K].long().numpy()
    features = np.full(len(logits), Feature.MIN_P, np.uint16)
    features[top_p[:, 0].numpy() < 1] |= np.uint16(Feature.TOP_P)
    features[(top_k > 0) & (top_k < vocab_size)] |= np.uint16(Feature.TOP_K)
    table = torch.zeros(len(logits), len(Column))
    table[:, Column.LOG_MIN_P], table[:, Column.TOP_P] = log_min_p[:, 0], top_p[:, 0]
    limits = limits_no_sync(scores, features, table, np.maximum(top_k, 1))
    limits = torch.where(heat > 0, limits, -torch.inf)
    return scores + noise, (scores + noise).masked_fill(scores < limits, -torch.inf)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("cpu_class", CLASSES)
def test_tokens_are_those_of_torch(cpu_class: CpuClass, dtype: torch.dtype, seed: int) -> None:
    rng = random.Random(seed)
    rows, vocab_size = rng.choice((1, 3, 20)), rng.choice((1, 63, 128, 700, 5_001, 33_000))
    spread = rng.choice((0.3, 3.0, 9.0))
    generator = torch.Generator().manual_seed(seed)
    memory = torch.full((rows, vocab_size + 40), torch.nan, dtype=dtype)
    logits = memory[:, 9 : 9 + vocab_size]
    logits[:] = torch.randn(rows, vocab_size, generator=generator) * spread
    filters = [
        rng.choice(
            (
                OFF,
                (float(np.log(rng.uniform(0.01, 1))), np.inf, 0),
                (-np.inf, rng.uniform(0.05, 0.999), 0),
                (-np.inf, np.inf, rng.randrange(1, 60)),
                (float(np.log(rng.uniform(0.001, 0.2))), rng.uniform(0.3, 0.99), rng.randrange(1, 60)),
            )
        )
        for _ in range(rows)
    ]
    temperatures = [rng.choice((0.0, 0.3, 1.0, 1.7)) for _ in range(rows)]
    keys = noise_keys(np.arange(rows) * 7919 - seed, np.arange(rows) + 100)
    draws = draws_of(keys, temperatures, filters)
    all_scores, scores = scores_by_torch(logits, draws)

    tokens, bad_rows = NativeDraw(library_of(cpu_class))(logits, draws)

    assert not bad_rows.any()
    best = scores.max(dim=-1)
    got = all_scores.gather(1, tokens[:, None])[:, 0]
    is_same = tokens == best.indices
    # Rounding of noise or mass may exchange two tokens that are this close, or keep one more token.
    assert (is_same | ((got - best.values).abs() < 1e-5)).all()


@pytest.mark.parametrize("cpu_class", CLASSES)
@pytest.mark.parametrize("seed", [1, *fresh_seeds(2)])
def test_masked_rows_draw_like_rows_without_the_excluded_tokens(cpu_class: CpuClass, seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows, vocab_size = int(rng.integers(1, 9)), int(rng.integers(1, 3000))
    if seed % 2:
        rows, vocab_size = 1, 40_000 + vocab_size  # the threads share the row
    logits = torch.from_numpy(rng.standard_normal((rows, vocab_size), np.float32) * 4)
    words = rng.integers(-(2**31), 2**31, (rows, -(-vocab_size // 32)), np.int32)
    words[:, 0] |= 1  # one token may be drawn
    places = rng.permutation(rows)
    places[rng.random(rows) < 0.3] = -1
    filters = [((-np.inf, np.inf, 0), (-3.0, 0.9, 20), (-np.inf, 0.7, 0))[int(rng.integers(3))] for _ in range(rows)]
    temperatures = [float(rng.choice((0.0, 1.0))) for _ in range(rows)]
    draws = draws_of(noise_keys(np.arange(rows) + seed % 1000, np.arange(rows)), temperatures, filters)
    excluding = logits.clone()
    lines = Masks(words, places).lines(np.arange(rows))
    exclude_no_sync(excluding, lines)
    draw = NativeDraw(library_of(cpu_class))

    tokens, bad_rows = draw(logits, draws, Masks(words, places))

    assert not bad_rows.any()
    assert tokens.tolist() == draw(excluding, draws)[0].tolist()
    for row, token in enumerate(tokens.tolist()):
        assert lines[row, token // 32] >> (token % 32) & 1


@pytest.mark.parametrize("cpu_class", CLASSES)
def test_a_row_is_bad_whatever_its_mask_excludes(cpu_class: CpuClass) -> None:
    logits = torch.zeros(2, 200)
    logits[0, 150] = torch.nan
    words = np.zeros((1, 7), np.int32)
    words[0, 0] = 1 << 5
    draws = draws_of(noise_keys(np.arange(2), np.arange(2)), [1.0] * 2, [OFF] * 2)

    tokens, bad_rows = NativeDraw(library_of(cpu_class))(logits, draws, Masks(words, np.zeros(2, np.int64)))

    assert (tokens[1], bad_rows.tolist()) == (5, [True, False])


@pytest.mark.parametrize("cpu_class", CLASSES)
@pytest.mark.parametrize("threads", [1, 2])
def test_the_token_of_a_row_depends_on_no_other_row_and_no_thread(cpu_class: CpuClass, threads: int) -> None:
    draw = NativeDraw(library_of(cpu_class))
    logits = torch.randn(5, 60_000, generator=torch.Generator().manual_seed(2))
    filters = [OFF, (-np.inf, 0.9, 0), OFF, (-3.0, 0.8, 40), OFF]
    draws = draws_of(noise_keys(np.arange(5), np.arange(5)), [0.0, 1.0, 1.0, 0.7, 2.0], filters)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        together = draw(logits, draws)[0].tolist()
        alone = [draw(logits[row : row + 1], draws[row : row + 1])[0].item() for row in range(5)]
    finally:
        torch.set_num_threads(before)

    assert together == alone
    assert together == NativeDraw(library_of(CpuClass.PORTABLE))(logits, draws)[0].tolist()


@pytest.mark.parametrize("cpu_class", CLASSES)
def test_the_lowest_of_equal_ones_wins(cpu_class: CpuClass) -> None:
    logits = torch.randn(4, 50_000, generator=torch.Generator().manual_seed(1))
    logits[0, [20, 300, 8999]] = 50.0
    logits[1, [4096, 8192, 49_999]] = 50.0
    logits[2] = 1.0
    logits[3, :-1] = -torch.inf

    tokens, bad_rows = NativeDraw(library_of(cpu_class))(logits, torch.zeros(4, len(DrawColumn), dtype=torch.int32))

    assert tokens.tolist() == [20, 4096, 0, 49_999]
    assert not bad_rows.any()


@pytest.mark.parametrize("cpu_class", CLASSES)
def test_tokens_tied_with_the_last_kept_one_are_kept(cpu_class: CpuClass) -> None:
    draw, count = NativeDraw(library_of(cpu_class)), 2000
    logits = torch.tensor([[2.0, 1.0, 1.0, 1.0, 0.0, -torch.inf]]).repeat(count, 1)
    for kept, filters in (
        ({0, 1, 2, 3}, (-np.inf, np.inf, 2)),
        ({0, 1, 2, 3}, (-np.inf, 0.75, 0)),
        ({0}, (-0.5, np.inf, 0)),
    ):
        draws = draws_of(noise_keys(np.arange(count), np.arange(count)), [1.0] * count, [filters] * count)
        assert set(draw(logits, draws)[0].tolist()) == kept


@pytest.mark.parametrize("cpu_class", CLASSES)
@pytest.mark.sampled(2)
def test_frequencies_are_the_probabilities(cpu_class: CpuClass) -> None:
    count, vocab_size = 20_000, 40
    row = torch.randn(vocab_size, generator=torch.Generator().manual_seed(5))
    for filters, is_kept in ((OFF, row > -torch.inf), ((-np.inf, np.inf, 7), row >= row.topk(7).values[-1])):
        draws = draws_of(noise_keys(np.arange(count), np.arange(count)), [1.0] * count, [filters] * count)
        tokens = NativeDraw(library_of(cpu_class))(row.expand(count, -1), draws)[0]
        wanted = row.masked_fill(~is_kept, -torch.inf).softmax(-1).double() * count
        found = tokens.bincount(minlength=vocab_size).double()
        assert not found[~is_kept].any()
        assert (((found - wanted)[is_kept] ** 2 / wanted[is_kept]).sum() < 90).item()  # chi-squared, 39 degrees: p 1e-6


@pytest.mark.parametrize("filters", [OFF, (-np.inf, 0.9, 0), (-2.0, 0.9, 5)])
@pytest.mark.parametrize(("temperature", "place"), [(0.0, 0), (0.0, 4999), (0.8, 4095), (0.8, 4096)])
@pytest.mark.parametrize("cpu_class", CLASSES)
def test_a_bad_row_is_flagged_and_does_not_affect_others(
    cpu_class: CpuClass, temperature: float, place: int, filters: tuple[float, float, int]
) -> None:
    draw = NativeDraw(library_of(cpu_class))
    logits = torch.randn(6, 5000, generator=torch.Generator().manual_seed(place))
    draws = draws_of(noise_keys(np.arange(6), np.full(6, 7)), [temperature] * 6, [filters] * 6)
    clean, _ = draw(logits, draws)
    logits[1, place], logits[2, place], logits[3], logits[4, place] = torch.nan, torch.inf, -torch.inf, -torch.inf
    logits[5] = torch.nan

    tokens, bad_rows = draw(logits, draws)

    assert bad_rows.tolist() == [False, True, True, True, False, True]
    assert tokens[0] == clean[0]
    assert ((tokens >= 0) & (tokens < 5000)).all()


def test_without_rows_nothing_is_drawn() -> None:
    draw = NativeDraw(library_of(CpuClass.PORTABLE))
    tokens, bad_rows = draw(torch.empty(0, 10), torch.empty(0, len(DrawColumn), dtype=torch.int32))

    assert (tokens.shape, bad_rows.shape) == ((0,), (0,))
