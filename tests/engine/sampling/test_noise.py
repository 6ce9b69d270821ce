"""The Gumbel noise of sampling."""

import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from tiercel.engine.sampling.noise import gumbel_no_sync, noise_keys

LOW = -(2**63)
HIGH = 2**63 - 1


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def noise(seeds: Iterable[int], positions: Iterable[int], vocab_size: int) -> Tensor:
    """Return Gumbel noise [M, vocab] for lists of seeds and positions."""
    keys = noise_keys(np.array(list(seeds), np.int64), np.array(list(positions), np.int64))
    return gumbel_no_sync(torch.from_numpy(keys), vocab_size)


def uniform_of(gumbel: Tensor) -> NDArray[np.float64]:
    """Return the uniform numbers of the noise, by its distribution function."""
    return torch.exp(-torch.exp(-gumbel.double())).numpy()


def excess(observed: NDArray[Any], expected: NDArray[Any]) -> float:
    """Return chi-square in standard deviations above its mean; it is small for fair draws."""
    observed, expected = np.ravel(observed), np.ravel(expected)
    freedom = len(observed) - 1
    return float((((observed - expected) ** 2 / expected).sum() - freedom) / math.sqrt(2 * freedom))


def mix64(value: int) -> int:
    mask = 2**64 - 1
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & mask
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & mask
    return value ^ (value >> 31)


def reference_noise(seed: int, position: int, token: int) -> float:
    """Compute the definition in Python integers and doubles."""
    golden, mask = 0x9E3779B97F4A7C15, 2**64 - 1
    key = mix64((mix64((seed + golden) & mask) + position * golden) & mask)
    bits = token ^ (key & 0xFFFFFFFF)
    bits = ((bits ^ (bits >> 16)) * 0x7FEB352D) & 0xFFFFFFFF
    bits ^= key >> 32
    bits = ((bits ^ (bits >> 15)) * 0x846CA68B) & 0xFFFFFFFF
    sign = 0xFFFF0000 if bits >> 31 else 0
    bits ^= (bits >> 16) | sign
    return -math.log(-math.log1p(-min((bits + 0.5) / 2**31, 1 - 2.0**-24)))


def test_noise_is_the_documented_function_of_seed_position_and_token() -> None:
    seeds, positions = [0, 1, -1, LOW, HIGH, 1234567890123], [1, 2, 0, 7, 100_000, 2**31]
    actual = noise(seeds, positions, 64)
    for row, (seed, position) in enumerate(zip(seeds, positions, strict=True)):
        wanted = [reference_noise(seed, position, token) for token in range(64)]
        torch.testing.assert_close(actual[row], torch.tensor(wanted), rtol=1e-5, atol=1e-5)


def test_noise_of_a_row_does_not_depend_on_other_rows_or_on_the_vocabulary() -> None:
    many = noise(range(64), range(100, 164), 1000)
    assert torch.equal(noise([13], [113], 1000)[0], many[13])
    assert torch.allclose(noise([13], [113], 257)[0], many[13, :257], rtol=1e-6, atol=0)


def test_extreme_hashes_stay_inside_the_open_interval() -> None:
    inverse = pow(0x846CA68B, -1, 2**32)
    before = (0x7FFF8000 * inverse) & 0xFFFFFFFF  # hashes to 0x7fffffff
    before ^= before >> 15 ^ before >> 30
    keys = torch.tensor(np.array([[0, 0], [0, before]], np.uint32).view(np.int32))
    ends = gumbel_no_sync(keys, 1)[:, 0]
    assert ends[0].item() == pytest.approx(32 * math.log(2))
    assert ends[1].item() == pytest.approx(-math.log(24 * math.log(2)))
    everywhere = noise(range(100), range(100), 20_000)
    assert everywhere.isfinite().all()
    assert everywhere.min() >= ends[1]
    assert everywhere.max() <= ends[0]


def test_noise_has_the_gumbel_distribution() -> None:
    sample = uniform_of(noise(range(40), [5] * 40, 25_000)).ravel()
    counts = np.histogram(sample, bins=1000, range=(0, 1))[0]
    assert abs(excess(counts, np.full(1000, len(sample) / 1000))) < 4
    # the tail that decides which token wins: 1 - u below 2^-10, in eight octaves
    tail = np.floor(-np.log2(1 - sample[sample > 1 - 2**-10])).astype(int)
    octaves = np.bincount(np.minimum(tail, 17))[10:18]
    shares = np.array([2.0**-n for n in range(11, 18)] + [2.0**-17])
    assert abs(excess(octaves, shares * len(sample))) < 4


@pytest.mark.parametrize(
    ("first", "second"),
    [
        pytest.param(
            lambda n: noise([3] * n, range(n), 8)[:-1], lambda n: noise([3] * n, range(n), 8)[1:], id="position"
        ),
        pytest.param(lambda n: noise(range(n), [9] * n, 8)[:-1], lambda n: noise(range(n), [9] * n, 8)[1:], id="seed"),
        pytest.param(
            lambda n: noise(range(n), [9] * n, 9)[:, :-1], lambda n: noise(range(n), [9] * n, 9)[:, 1:], id="token"
        ),
        pytest.param(
            lambda n: noise(range(n), range(1, n + 1), 8), lambda n: noise(range(1, n + 1), range(n), 8), id="swap"
        ),
        pytest.param(
            lambda n: noise(range(n), [4] * n, 8), lambda n: noise(range(0, -n, -1), [4] * n, 8)[1:], id="sign"
        ),
        pytest.param(
            lambda n: noise(range(n), [4] * n, 8),
            lambda n: noise([s << 32 for s in range(1, n + 1)], [4] * n, 8),
            id="high",
        ),
        pytest.param(
            lambda n: noise([5] * (n // 16), range(n // 16), 256)[:, ::2],
            lambda n: noise([5] * (n // 16), range(n // 16), 256)[:, 1::2],
            id="even-odd",
        ),
        pytest.param(
            lambda n: noise([5] * (n // 256), range(n // 256), 4096)[:, :2048],
            lambda n: noise([5] * (n // 256), range(n // 256), 4096)[:, 2048:],
            id="half",
        ),
    ],
)
def test_neighbours_are_independent(first: Callable[[int], Tensor], second: Callable[[int], Tensor]) -> None:
    a, b = uniform_of(first(60_000)), uniform_of(second(60_000))
    length = min(len(a), len(b))
    a, b = a[-length:].ravel(), b[-length:].ravel()
    assert abs(np.corrcoef(a, b)[0, 1]) * math.sqrt(len(a)) < 4
    joint = np.histogram2d(a, b, bins=32, range=((0, 1), (0, 1)))[0]
    assert abs(excess(joint, np.full(1024, len(a) / 1024))) < 4


def test_every_bit_of_seed_and_position_changes_half_of_the_noise_bits() -> None:
    base = uniform_of(noise([77], [1000], 4096))[0]
    for bit in range(63):
        for changed in (noise([77 ^ (1 << bit)], [1000], 4096), noise([77], [1000 ^ (1 << bit)], 4096)):
            agree = np.count_nonzero((uniform_of(changed)[0] < 0.5) == (base < 0.5))
            assert abs(agree - 2048) < 5 * 32
