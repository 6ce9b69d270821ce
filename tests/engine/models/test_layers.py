"""Linear layers, packed and not."""

import pytest
import torch

from tests.engine.native.classes import CLASSES, library_of
from tiercel.engine.models.layers import Linear, can_pack
from tiercel.engine.models.precision import Precision
from tiercel.engine.native.table import CpuClass

CPU = torch.device("cpu")
FLOAT32 = Precision.of(torch.float32)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize("rows", [1, 2, 16, 17, 300])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 8e-3)])
def test_a_packed_layer_computes_the_same(dtype: torch.dtype, tolerance: float, has_bias: bool, rows: int) -> None:
    if not can_pack(Precision.of(dtype), CPU):
        pytest.skip(f"this processor has no packed linear layers in {dtype}")
    draw = torch.Generator().manual_seed(rows)
    layer = Linear(1024, (1000, 24, 24), has_bias, Precision.of(dtype), CPU)
    for _, tensor in layer.targets("q", "k", "v"):
        tensor.normal_(generator=draw)
    x = torch.randn(rows, 1024, generator=draw).to(dtype)
    expected = layer.forward(x)

    layer.pack()

    assert layer.weight.numel() == 0
    assert (layer.forward(x) - expected).norm() <= tolerance * expected.norm()


def test_small_float32_layers_stay_as_they_are() -> None:
    layer = Linear(64, (32,), False, FLOAT32, CPU)

    layer.pack()

    assert layer.weight.shape == (32, 64)


def test_a_layer_that_shares_its_weight_leaves_it_to_the_owner() -> None:
    if not can_pack(Precision.of(torch.bfloat16), CPU):
        pytest.skip("this processor has no packed linear layers in bfloat16")
    embedding = torch.randn(300, 64, dtype=torch.bfloat16)
    layer, x = Linear.sharing(embedding, Precision.of(torch.bfloat16)), torch.randn(5, 64, dtype=torch.bfloat16)
    expected = layer.forward(x)

    layer.pack()

    assert embedding.shape == (300, 64)
    torch.testing.assert_close(layer.forward(x), expected)


def test_other_dtypes_and_devices_are_not_packed() -> None:
    assert not can_pack(Precision.of(torch.float16), CPU)
    assert not can_pack(FLOAT32, torch.device("cuda"))
    assert not can_pack(FLOAT32, torch.device("meta"))


def test_rows_of_a_fused_layer_go_to_their_checkpoint_names() -> None:
    layer = Linear(8, (4, 2), True, FLOAT32, CPU)

    shape_by_name = {name: tuple(tensor.shape) for name, tensor in layer.targets("a.q", "a.k")}

    assert shape_by_name == {"a.q.weight": (4, 8), "a.k.weight": (2, 8), "a.q.bias": (4,), "a.k.bias": (2,)}


@pytest.mark.parametrize("cpu_class", CLASSES)
def test_a_layer_packed_for_the_native_kernels_computes_the_same(cpu_class: CpuClass) -> None:
    precision = Precision(torch.bfloat16, torch.float32, torch.bfloat16)
    layer, x = Linear(300, (64, 8, 8), True, precision, CPU), torch.randn(9, 300)
    for _, tensor in layer.targets("q", "k", "v"):
        tensor.normal_()
    expected, tokens = layer.forward(x), torch.tensor([0, 79])
    rows = layer.embed(tokens, torch.float32)

    layer.pack(library_of(cpu_class))

    assert layer.weight.numel() == 0
    torch.testing.assert_close(layer.forward(x), expected, rtol=1e-4, atol=1e-3)
    assert torch.equal(layer.embed(tokens, torch.float32), rows)
