"""The decoder's operators as kernels against those in plain torch."""

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.conformance.models import Family, make_checkpoint
from tests.engine.kernels.checking import relative_error
from tests.engine.models.paged_run import PagedRun
from tests.engine.native.classes import library_of
from tiercel.engine.attention.base import PagedReader
from tiercel.engine.attention.cache_rows import gather_rows
from tiercel.engine.attention.grouped import GroupedAttention
from tiercel.engine.attention.sdpa import SdpaAttention, attend_sequence
from tiercel.engine.attention.triton import TritonAttention
from tiercel.engine.forward.state import AttentionParams, ForwardState
from tiercel.engine.models.config import parse_decoder, read_config
from tiercel.engine.models.decoder import Decoder
from tiercel.engine.models.native_ops import NativeOps
from tiercel.engine.models.ops import Ops
from tiercel.engine.models.precision import Precision
from tiercel.engine.models.registry import open_ops
from tiercel.engine.models.torch_ops import TorchOps
from tiercel.engine.models.triton_ops import TritonOps
from tiercel.engine.models.weights import fill_dummy
from tiercel.engine.native.table import CpuClass

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


class SdpaReader:
    """A `PagedReader` on the reference backend."""

    is_capturable = False

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, kv: Tensor, state: ForwardState, params: AttentionParams
    ) -> Tensor:
        raise NotImplementedError("the kernels have written the keys and values")

    def read(self, query: Tensor, kv: Tensor, state: ForwardState, params: AttentionParams) -> Tensor:
        out = torch.full_like(query, torch.nan)
        for index, context in enumerate(state.context_lengths):
            start, end = state.query_starts[index], state.query_starts[index + 1]
            keys, values = gather_rows(kv, state.block_tables[index], context, query.dtype)
            out[start:end] = attend_sequence(query[start:end], keys, values, params)
        return out


def decoder(folder: Path, ops: Ops, dtype: torch.dtype) -> Decoder:
    model = Decoder(parse_decoder(read_config(folder)), ops, Precision.of(dtype), CPU)
    fill_dummy(dict(model.targets()), seed=3)
    return model


def native_ops(cpu_class: CpuClass) -> NativeOps:
    return NativeOps(library_of(cpu_class), GroupedAttention())


@pytest.mark.parametrize(
    ("family", "ops", "dtype", "tolerance"),
    [
        ("llama2", lambda: TritonOps(SdpaReader()), torch.float32, 1e-5),
        ("yarn", lambda: TritonOps(SdpaReader()), torch.float16, 1e-3),
        ("qwen3", lambda: TritonOps(TritonAttention(processors=4)), torch.float32, 1e-5),
        *(("llama2", partial(native_ops, each), torch.float32, 1e-5) for each in CpuClass),
        *(("yarn", partial(native_ops, each), torch.bfloat16, 1e-2) for each in CpuClass),
        *(("qwen3", partial(native_ops, each), torch.float32, 1e-5) for each in CpuClass),
    ],
)
@pytest.mark.sampled(2)
def test_a_model_computes_the_same_with_kernels(
    family: Family, ops: Callable[[], Ops], dtype: torch.dtype, tolerance: float, tmp_path: Path
) -> None:
    fused_ops = ops()
    make_checkpoint(family, tmp_path)
    plain = PagedRun(decoder(tmp_path, TorchOps(SdpaAttention()), dtype), 2, 12, block_size=4)
    fused = PagedRun(decoder(tmp_path, fused_ops, dtype), 2, 12, block_size=4)
    tokens = torch.randint(0, 256, (2, 12), generator=torch.Generator().manual_seed(1))

    for starts, ends in (((0, 0), (5, 2)), ((5, 2), (6, 4))):  # prompts; a decode and a chunk
        pieces = [(row, starts[row], tokens[row, starts[row] : ends[row]]) for row in range(2)]
        for got, wanted in zip(fused.step(pieces), plain.step(pieces), strict=True):
            assert relative_error(got, wanted) < tolerance
    assert relative_error(fused.kv.nan_to_num(), plain.kv.nan_to_num()) < tolerance
    assert torch.equal(fused.kv.isnan(), plain.kv.isnan())


def test_a_cpu_uses_native_kernels_if_there_are_any_and_attention_can_read_their_rows() -> None:
    assert isinstance(open_ops(CPU, SdpaReader()), TorchOps)
    library = library_of(CpuClass.PORTABLE)
    assert isinstance(open_ops(CPU, SdpaReader(), library), NativeOps)
    assert isinstance(open_ops(CPU, SdpaAttention(), library), TorchOps)


def test_a_gpu_uses_kernels_if_attention_can_read_their_rows() -> None:
    assert isinstance(SdpaReader(), PagedReader)
    assert isinstance(open_ops(torch.device("cuda"), SdpaReader()), TritonOps)


def test_a_gpu_without_such_attention_uses_plain_torch_and_logs_it(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert isinstance(open_ops(torch.device("cuda"), SdpaAttention()), TorchOps)

    assert [record.getMessage() for record in caplog.records] == [
        "model ops run without kernels attention=SdpaAttention"
    ]
