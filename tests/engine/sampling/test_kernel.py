"""The sampler with its kernel: every row draws the same as without it."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.engine.native.classes import CLASSES, library_of
from tests.engine.sampling.rows import END_TOKENS, random_logits, random_params
from tiercel.engine.kernels.sampling import draw_no_sync, search_no_sync
from tiercel.engine.native.table import CpuClass
from tiercel.engine.sampling import Sampler, open_sampler
from tiercel.engine.sampling.filter import least_no_sync
from tiercel.engine.sampling.row import DrawColumn
from tiercel.engine.sampling.sampler import DrawKernel
from tiercel.engine.sampling.subset import Subset
from tiercel.engine.sampling.upload import CopyLink, HostLink
from tiercel.values.request import SamplingParams, pack_tokens

CPU = torch.device("cpu")
PLAIN = [SamplingParams(temperature=0.0), SamplingParams(temperature=0.7, seed=4), SamplingParams(seed=-9, logprobs=2)]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


Kernel = DrawKernel | CpuClass | None
KERNELS = [pytest.param(draw_no_sync, id="triton"), *CLASSES]


def filled(params: list[SamplingParams], vocab_size: int, kernel: Kernel, link: HostLink | None = None) -> Sampler:
    """Return a sampler whose row r has params[r]; all rows have the same prompt. Of a class: the native kernel."""
    if isinstance(kernel, CpuClass):
        sampler = open_sampler(len(params), vocab_size, CPU, torch.float32, library_of(kernel))
    else:
        search = least_no_sync if kernel is None else search_no_sync
        sampler = Sampler(len(params), vocab_size, CPU, kernel, search, link=link)
    for row, each in enumerate(params):
        sampler.set_row(row, each, pack_tokens([5, 9, 30]), pack_tokens([2, 5]), END_TOKENS)
    return sampler


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(
    ("vocab_size", "dtype"),
    [
        (61, torch.float32),
        (61, torch.bfloat16),
        pytest.param(4100, torch.float32, marks=pytest.mark.slow),  # more than one tile
    ],
)
@pytest.mark.sampled(4)
def test_rows_draw_the_same_with_and_without_the_kernel(vocab_size: int, dtype: torch.dtype, kernel: Kernel) -> None:
    rng = np.random.default_rng(vocab_size)
    params = [*PLAIN * 4, *(random_params(rng, vocab_size, greedy=row % 5 == 0) for row in range(16))]
    rows = rng.permutation(len(params))
    plain, fused = filled(params, vocab_size, None), filled(params, vocab_size, kernel)

    for step in range(2):
        logits = random_logits(step, len(params), vocab_size).to(dtype)
        positions, output_index = rng.integers(1, 10**6, len(params)), np.full(len(params), 2 + step)
        wanted = plain.sample_no_sync(logits.float(), rows, positions, output_index)
        got = fused.sample_no_sync(logits, rows, positions, output_index)

        assert torch.equal(got.tokens, wanted.tokens)
        assert torch.equal(got.bad_rows, wanted.bad_rows)
        assert got.logprobs is not None and wanted.logprobs is not None
        assert got.logprobs.indices == wanted.logprobs.indices
        for name in ("sampled", "ranks", "top_tokens", "top_logprobs"):
            assert torch.equal(getattr(got.logprobs, name), getattr(wanted.logprobs, name))


class CountingLink(CopyLink):
    """A link that notes the shapes of the arrays that it sends."""

    def __init__(self) -> None:
        super().__init__(CPU)
        self.sent: list[tuple[int, ...]] = []

    def send_no_sync(self, array: np.ndarray) -> Tensor:
        self.sent.append(array.shape)
        return super().send_no_sync(array)


def test_unused_features_upload_nothing() -> None:
    link = CountingLink()
    plain = [SamplingParams(temperature=0.0), SamplingParams(temperature=0.7, seed=4)]
    sampler = filled(plain, 61, draw_no_sync, link=link)
    sampler.sample_no_sync(random_logits(1, 2, 61), [0, 1], [4, 4], [1, 1])
    assert link.sent == [(2, len(DrawColumn))]  # keys and temperatures for the kernel
    link.sent.clear()
    filters = [SamplingParams(seed=3, top_p=0.9), SamplingParams(seed=4, top_p=0.8)]
    sampler = filled(filters, 61, draw_no_sync, link=link)
    sampler.sample_no_sync(random_logits(1, 2, 61), [0, 1], [4, 4], [1, 1])
    assert link.sent and all(0 not in shape for shape in link.sent)


def test_parameters_that_are_on_the_device_already_are_not_sent() -> None:
    link = CountingLink()
    sampler = filled([SamplingParams(temperature=0.7, seed=4)] * 2, 61, draw_no_sync, link=link)
    plan, logits = sampler.plan([0, 1], [4, 4], [1, 1]), random_logits(1, 2, 61)
    assert plan.draws is not None
    drawn = sampler.draw_no_sync(logits, plan, torch.from_numpy(plan.draws))
    assert link.sent == []
    assert torch.equal(drawn.tokens, sampler.sample_no_sync(logits, [0, 1], [4, 4], [1, 1]).tokens)


def test_an_empty_subset_selects_no_rows() -> None:
    values = torch.arange(3.0)
    link = CopyLink(CPU)
    none, all_three = Subset(np.zeros(3, np.bool_), link), Subset(np.ones(3, np.bool_), link)
    assert not none and none.take(values).shape == (0,)
    assert none.put(values.clone(), values[:0]).tolist() == values.tolist()
    assert all_three and all_three.take(values) is values


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("temperature", [0.2, 1.0, 2.5])
@pytest.mark.sampled(6)
def test_many_seeds_draw_the_same(temperature: float, kernel: Kernel) -> None:
    params = [SamplingParams(temperature=temperature, seed=seed * 104_729) for seed in range(64)]
    logits = random_logits(3, 1, 700).repeat(64, 1)
    asked = (range(64), range(50, 114), [0] * 64)

    wanted = filled(params, 700, None).sample_no_sync(logits, *asked).tokens
    got = filled(params, 700, kernel).sample_no_sync(logits, *asked).tokens

    assert torch.equal(got, wanted)
    assert len(got.unique()) > 2


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.sampled(6)
def test_bad_rows_are_flagged_with_any_parameters(poison: float, kernel: Kernel) -> None:
    rng = np.random.default_rng(2)
    params = [*PLAIN, *(random_params(rng, 80) for _ in range(6))]
    logits = random_logits(1, 9, 80)
    asked = (range(9), [9] * 9, [2] * 9)
    clean = filled(params, 80, kernel).sample_no_sync(logits, *asked)
    logits[1::2] = poison

    result = filled(params, 80, kernel).sample_no_sync(logits, *asked)

    assert result.bad_rows.nonzero()[:, 0].tolist() == [1, 3, 5, 7]
    assert torch.equal(result.tokens[::2], clean.tokens[::2])
    assert not clean.bad_rows.any()


def test_a_step_without_a_row_samples_nothing() -> None:
    result = filled(PLAIN, 20, draw_no_sync).sample_no_sync(torch.empty(0, 20), [], [], [])

    assert result.tokens.tolist() == []


class CountedKernel:
    """A fake kernel that takes the first token and keeps its arguments."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, Tensor]] = []

    def __call__(self, logits: Tensor, draws: Tensor) -> tuple[Tensor, Tensor]:
        self.calls.append((len(logits), draws))
        return torch.zeros(len(logits), dtype=torch.int64), torch.zeros(len(logits), dtype=torch.bool)


class OperatorLog(TorchDispatchMode):
    """Collects the names of all operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def test_plain_rows_take_one_pass_and_one_upload() -> None:
    kernel = CountedKernel()
    params = [SamplingParams(temperature=0.0), SamplingParams(temperature=0.5, seed=1)] * 8
    sampler = filled(params, 50, kernel)
    logits = random_logits(1, 16, 50)

    with OperatorLog() as log:
        sampler.sample_no_sync(logits, range(16), [3] * 16, [2] * 16)

    assert [rows for rows, _ in kernel.calls] == [16]
    assert kernel.calls[0][1].shape == (16, len(DrawColumn))
    made = {"aten::zeros"}  # by the kernel above
    assert [name for name in log.names if name not in made | {"aten::detach", "aten::lift_fresh"}] == []


def test_only_rows_with_further_parameters_are_read_again() -> None:
    kernel = CountedKernel()
    params = [*PLAIN, SamplingParams(top_k=3), SamplingParams(min_p=0.1), SamplingParams(presence_penalty=1.0)]
    sampler = filled(params, 50, kernel)

    sampler.sample_no_sync(random_logits(1, 6, 50), range(6), [3] * 6, [2] * 6)

    (first, _), (again, draws) = kernel.calls
    assert (first, again) == (6, 3)
    assert draws[:, DrawColumn.TEMPERATURE].view(torch.float32).tolist() == [
        1.0,
        1.0,
        1.0,
    ]  # the scores were already divided


def test_a_cpu_without_native_kernels_keeps_plain_torch() -> None:
    sampler = open_sampler(2, 30, CPU, torch.float32)
    sampler.set_row(0, SamplingParams(temperature=0.0), b"", b"", END_TOKENS)

    assert sampler.sample_no_sync(torch.arange(30.0)[None], [0], [1], [0]).tokens.tolist() == [29]


@pytest.mark.parametrize("cpu_class", CLASSES)
def test_a_kernel_that_filters_reads_other_rows_once(cpu_class: CpuClass) -> None:
    sampler = open_sampler(3, 50, CPU, torch.float32, library_of(cpu_class))
    for row, params in enumerate((SamplingParams(temperature=0.0), SamplingParams(top_k=3, seed=1), PLAIN[1])):
        sampler.set_row(row, params, b"", b"", END_TOKENS)
    logits = random_logits(1, 3, 50)

    with OperatorLog() as log:
        sampler.sample_no_sync(logits, range(3), [3] * 3, [2] * 3)

    made = {"aten::empty.memory_format", "aten::detach", "aten::lift_fresh"}
    assert [name for name in log.names if name not in made] == []
