"""The sampling kernels against plain torch."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from tests.engine.kernels.checking import draw
from tiercel.engine.kernels.sampling import _gumbel, draw_no_sync, search_no_sync
from tiercel.engine.sampling.filter import least_no_sync
from tiercel.engine.sampling.noise import gumbel_no_sync, noise_keys

pytestmark = pytest.mark.usefixtures("poisoned")


def draws_of(keys: Tensor, temperatures: Tensor) -> Tensor:
    return torch.cat((keys, temperatures.float().view(torch.int32)[:, None]), dim=1)


def draw_by_torch(logits: Tensor, keys: Tensor, temperatures: Tensor) -> tuple[Tensor, Tensor]:
    """Return the tokens and their margins."""
    wide, heat = logits.float(), temperatures.float()[:, None]
    scores = torch.where(heat > 0, wide / heat + gumbel_no_sync(keys, logits.shape[1]), wide)
    if logits.shape[1] == 1:
        return torch.zeros(len(logits), dtype=torch.int64), torch.ones(len(logits))
    best = scores.topk(2).values
    return scores.max(dim=-1).indices, best[:, 0] - best[:, 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("rows", "vocab_size"), [(3, 1), (24, 63), (8, 4096), (8, 4097), (4, 13_000)])
@pytest.mark.sampled(5)
def test_the_tokens_are_those_of_torch(rows: int, vocab_size: int, dtype: torch.dtype) -> None:
    logits = draw(vocab_size, rows, vocab_size, dtype=dtype) * 3
    keys = torch.from_numpy(noise_keys(np.arange(rows) * 7919 - 5, np.arange(rows) + 100))
    temperatures = torch.tensor([0.0, 0.3, 1.0, 1.7])[torch.arange(rows) % 4]
    wanted, margins = draw_by_torch(logits, keys, temperatures)

    tokens, bad_rows = draw_no_sync(logits, draws_of(keys, temperatures))

    assert tokens.dtype is torch.int64
    assert margins[temperatures > 0].min() > 1e-5  # no margin is within rounding, so all rows are compared
    assert torch.equal(tokens, wanted)
    assert not bad_rows.any()


def test_ids_without_a_token_are_never_drawn() -> None:
    """Their logits are -inf; see `engine.models.logit_mask`."""
    rows, vocab_size, end = 12, 5000, 4100
    logits = draw(vocab_size, rows, vocab_size) * 3
    tokenless = torch.arange(vocab_size) >= end
    tokenless[[0, 17, 4099]] = True
    logits[:, tokenless] = -torch.inf
    keys = torch.from_numpy(noise_keys(np.arange(rows) * 7919 - 5, np.arange(rows) + 100))
    temperatures = torch.tensor([0.0, 0.3, 1.0, 5.0])[torch.arange(rows) % 4]
    wanted, _ = draw_by_torch(logits, keys, temperatures)

    tokens, bad_rows = draw_no_sync(logits, draws_of(keys, temperatures))

    assert torch.equal(tokens, wanted)
    assert not tokenless[tokens].any()
    assert not bad_rows.any()


def test_the_lowest_of_equal_ones_wins() -> None:
    logits = draw(1, 3, 9000)
    logits[0, [20, 300, 8999]] = 50.0
    logits[1, [4096, 8192]] = 50.0
    logits[2] = 1.0

    tokens, _ = draw_no_sync(logits, torch.zeros(3, 3, dtype=torch.int32))

    assert tokens.tolist() == [20, 4096, 0]


def test_rows_may_lie_apart() -> None:
    wide = draw(2, 3, 5000)
    logits = wide[:, :4500]

    tokens, _ = draw_no_sync(logits, torch.zeros(3, 3, dtype=torch.int32))

    assert torch.equal(tokens, logits.argmax(-1))


def test_without_rows_nothing_is_launched() -> None:
    tokens, bad_rows = draw_no_sync(torch.empty(0, 10), torch.empty(0, 3, dtype=torch.int32))

    assert (tokens.shape, bad_rows.shape) == ((0,), (0,))


@pytest.mark.parametrize(("temperature", "place"), [(0.0, 0), (0.0, 4999), (0.8, 4095), (0.8, 4096)])
def test_a_bad_row_is_flagged_and_does_not_affect_others(temperature: float, place: int) -> None:
    logits = draw(place, 6, 5000)
    keys = torch.from_numpy(noise_keys(np.arange(6), np.full(6, 7)))
    draws = draws_of(keys, torch.full((6,), temperature))
    clean, _ = draw_no_sync(logits, draws)
    logits[1, place], logits[2, place], logits[3], logits[4, place] = torch.nan, torch.inf, -torch.inf, -torch.inf
    logits[5] = torch.nan

    tokens, bad_rows = draw_no_sync(logits, draws)

    assert bad_rows.tolist() == [
        False,
        True,
        True,
        True,
        False,
        True,
    ]  # a single impossible token does not make a row bad
    assert tokens[0] == clean[0]
    assert tokens[2] == place
    assert ((tokens >= 0) & (tokens < 5000)).all()


@triton.jit
def noise_kernel(keys, out, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    # _gumbel is private: only a Triton kernel can call it, and its values cannot be observed from outside
    tl.store(out + at, _gumbel(at, tl.load(keys), tl.load(keys + 1)))


def test_the_noise_is_that_of_torch() -> None:
    size = 1 << 16
    keys = torch.from_numpy(noise_keys(np.array([-3]), np.array([11])))
    out = torch.empty(size)

    noise_kernel[(1,)](keys, out, size)

    torch.testing.assert_close(out, gumbel_no_sync(keys, size)[0], rtol=3e-6, atol=3e-7)


@pytest.mark.parametrize("hashed", [0, 0x7FFF8000])
def test_the_ends_of_the_noise_are_those_of_torch(hashed: int) -> None:
    before = (hashed * pow(0x846CA68B, -1, 2**32)) & 0xFFFFFFFF
    before ^= before >> 15 ^ before >> 30
    keys = torch.tensor(np.array([[0, before]], np.uint32).view(np.int32))
    out = torch.empty(1)

    noise_kernel[(1,)](keys, out, 1)

    torch.testing.assert_close(out, gumbel_no_sync(keys, 1)[0], rtol=1e-6, atol=0)


@pytest.mark.parametrize(("rows", "vocab_size"), [(3, 1), (6, 77), (3, 5000)])
@pytest.mark.parametrize("spread", [0.1, 4.0])
def test_the_search_for_a_mass_ends_where_that_of_torch_does(spread: float, rows: int, vocab_size: int) -> None:
    probabilities = (draw(rows, rows, vocab_size) * spread).softmax(dim=-1)
    mass = torch.tensor([0.1, 0.5, 0.95]).repeat(2)[:rows]

    least = search_no_sync(probabilities, mass)

    torch.testing.assert_close(
        least.view(torch.float32), least_no_sync(probabilities, mass).view(torch.float32), rtol=1e-6, atol=0
    )


def test_a_mass_beyond_the_whole_keeps_everything() -> None:
    probabilities = draw(1, 2, 300).softmax(dim=-1)

    assert search_no_sync(probabilities, torch.tensor([1.5, torch.inf])).tolist() == [[0], [0]]
