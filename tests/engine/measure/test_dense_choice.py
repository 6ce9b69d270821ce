"""The choice among ways to multiply on a GPU: by a margin, only if the result is right, and kept for the next start."""

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu import dummy
from tests.engine.kernels.bfloat16 import rounded_bfloat16 as rounded_bfloat16
from tests.engine.kernels.checking import relative_error
from tests.engine.models.paged_run import PagedRun
from tiercel.device.cpu import CpuDevice
from tiercel.engine.attention.sdpa import SdpaAttention
from tiercel.engine.kernels.dense_product import multiply_dense
from tiercel.engine.measure.cache_file import CacheFile
from tiercel.engine.measure.dense_choice import StoredRoutes, choose_routes, is_routable, route_products
from tiercel.engine.models.config import ConfigFields, parse_decoder
from tiercel.engine.models.decoder import Decoder
from tiercel.engine.models.dense_routes import DEFAULT, ROUTED_ROWS, DenseProduct, DenseRoutes, open_products
from tiercel.engine.models.layers import Linear, can_pack
from tiercel.engine.models.precision import Precision
from tiercel.engine.models.torch_ops import TorchOps
from tiercel.engine.models.weights import fill_dummy
from tiercel.settings.settings import EngineSettings
from tiercel.values.errors import DeviceError

CPU = torch.device("cpu")


class Race:
    """Ways of given speeds, and a stopwatch that returns the time of the way that a job uses."""

    def __init__(self, ms_by_name: Mapping[str, float | Callable[[int], float]]) -> None:
        self._ms_by_name = ms_by_name
        self._last = ("", 0)
        self.timed = 0
        self.products: dict[str, DenseProduct] = {name: self._way(name) for name in ms_by_name}

    def _way(self, name: str) -> DenseProduct:
        def multiply(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            self._last = name, x.shape[0]
            return F.linear(x, weight, bias)

        return multiply

    def stopwatch(self, job: Callable[[], object]) -> float:
        job()
        self.timed += 1
        ms, (name, rows) = self._ms_by_name, self._last
        found = ms[name]
        return found(rows) if callable(found) else found


def file_of(folder: Path | None, fact: str = "machine") -> CacheFile[StoredRoutes]:
    return CacheFile(None if folder is None else str(folder), "dense-products", {"fact": fact}, StoredRoutes)


WEIGHT = torch.randn(16, 24, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)


def test_another_way_has_to_be_faster_by_a_margin() -> None:
    race = Race({DEFAULT: 1.0, "cublaslt": lambda rows: 0.98 if rows < 256 else 0.9, "triton": lambda rows: 384 / rows})

    routes = choose_routes([WEIGHT], race.products, file_of(None), race.stopwatch)

    assert routes.names_by_shape == {(16, 24): (DEFAULT, DEFAULT, "cublaslt", "cublaslt", "triton")}


@pytest.mark.parametrize(
    ("rows", "name"),
    [(1, DEFAULT), (64, DEFAULT), (65, "a"), (128, "a"), (129, "b"), (200, "c"), (512, "e"), (513, DEFAULT)],
)
def test_rows_count_as_the_next_larger_measured_number(rows: int, name: str) -> None:
    routes = DenseRoutes({}, {(16, 24): ("a", "b", "c", "d", "e")})

    assert routes.name_of(rows, 16, 24) == name
    assert routes.name_of(rows, 24, 16) == DEFAULT


def test_a_way_that_is_wrong_or_fails_is_not_used(caplog: pytest.LogCaptureFixture) -> None:
    race = Race({DEFAULT: 1.0, "wrong": 0.1, "nan": 0.1, "refused": 0.1, "other": 0.5})

    def refuse(*_: object) -> Tensor:
        raise DeviceError("product.no_kernel", "")

    products = race.products | {
        "wrong": lambda x, weight, bias: 1.02 * F.linear(x, weight, bias),
        "nan": lambda x, weight, bias: F.linear(x, weight, bias) * torch.nan,
        "refused": refuse,
    }

    routes = choose_routes([WEIGHT], products, file_of(None), race.stopwatch)

    assert set(routes.names_by_shape[16, 24]) == {"other"}
    for told in ("wrong are wrong", "nan are wrong", "refused fail"):
        assert f"products by {told}" in caplog.text


def test_a_shape_is_measured_once_per_machine_and_not_at_all_without_a_budget(tmp_path: Path) -> None:
    race = Race({DEFAULT: 1.0, "triton": 0.5})
    other = torch.ones(8, 24, dtype=torch.bfloat16)

    assert choose_routes([WEIGHT], race.products, file_of(tmp_path), None).names_by_shape == {}
    first = choose_routes([WEIGHT], race.products, file_of(tmp_path), race.stopwatch)
    timed = race.timed
    again = choose_routes([WEIGHT], race.products, file_of(tmp_path), race.stopwatch)
    assert race.timed == timed == 2 * len(ROUTED_ROWS)
    assert choose_routes([WEIGHT, other], race.products, file_of(tmp_path), None) == again == first
    assert choose_routes([other], race.products, file_of(tmp_path), race.stopwatch).names_by_shape.keys() == {
        *((16, 24), (8, 24))
    }
    assert race.timed == 2 * timed
    choose_routes([WEIGHT], race.products, file_of(tmp_path, "another"), race.stopwatch)
    assert race.timed == 3 * timed


def test_a_choice_of_a_way_that_is_gone_is_measured_again(tmp_path: Path) -> None:
    race = Race({DEFAULT: 1.0, "triton": 0.5, "older": 0.1})
    choose_routes([WEIGHT], race.products, file_of(tmp_path), race.stopwatch)
    del race.products["older"]

    routes = choose_routes([WEIGHT], race.products, file_of(tmp_path), race.stopwatch)

    assert set(routes.names_by_shape[16, 24]) == {"triton"}


def test_weights_that_a_way_cannot_read_keep_the_default() -> None:
    race = Race({DEFAULT: 1.0, "triton": 0.5})
    odd = torch.ones(12, 24, dtype=torch.bfloat16), torch.ones(24, 20, dtype=torch.bfloat16), WEIGHT.t()

    assert not any(map(is_routable, odd))
    assert choose_routes(odd, race.products, file_of(None), race.stopwatch).names_by_shape == {}
    assert race.timed == 0


def test_a_layer_multiplies_in_the_chosen_way() -> None:
    layer = Linear(24, (8, 8), True, Precision.of(torch.bfloat16), CPU)
    assert layer.bias is not None
    layer.weight[:], layer.bias[:] = WEIGHT, torch.arange(16)
    x = torch.randn(130, 24).to(torch.bfloat16)
    wanted, used = layer.forward(x), []

    def multiply(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        used.append((x.shape[0], tuple(weight.shape)))
        return multiply_dense(x, weight, bias, 2)

    layer.route(DenseRoutes({DEFAULT: F.linear, "triton": multiply}, {(16, 24): ("triton",) * 5}))

    torch.testing.assert_close(layer.forward(x), wanted, atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(layer.forward(x[:3]), wanted[:3], atol=2e-2, rtol=2e-2)
    assert used == [(130, (16, 24))]


def test_ways_of_a_device_have_the_default_first() -> None:
    products = open_products(132)

    assert list(products) == [DEFAULT, "cublaslt", "triton"]
    assert torch.equal(products[DEFAULT](WEIGHT, WEIGHT, None), WEIGHT @ WEIGHT.T)
    assert products["triton"](WEIGHT, WEIGHT, None).shape == (16, 16)


def a_decoder(dtype: torch.dtype) -> Decoder:
    """Return a model of two layers with random weights."""
    config = parse_decoder(ConfigFields(dict(dummy.TINY), "config.json"))
    model = Decoder(config, TorchOps(SdpaAttention()), Precision.of(dtype), CPU)
    fill_dummy(dict(model.targets()), 3)
    return model


def test_a_model_computes_the_same_in_every_way() -> None:
    model, tokens = a_decoder(torch.bfloat16), torch.arange(70) % 512
    wanted = PagedRun(model, 1, 80).prefill(tokens, 70)
    shapes = {tuple(linear.weight.shape) for linear in model.plain_linears}
    used: set[tuple[int, ...]] = set()

    def multiply(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        used.add(tuple(weight.shape))
        return multiply_dense(x, weight, bias, 2)

    assert len(model.plain_linears) == 2 * 4 + 1
    for linear in model.plain_linears:
        linear.route(DenseRoutes({DEFAULT: F.linear, "triton": multiply}, {shape: ("triton",) * 5 for shape in shapes}))

    got = PagedRun(model, 1, 80).prefill(tokens, 70)

    assert used == shapes
    assert relative_error(got, wanted) < 2e-2


def test_a_cpu_and_layers_that_are_packed_keep_their_products() -> None:
    model = a_decoder(torch.bfloat16)
    route_products(EngineSettings(model="tiny", device="cpu"), model, CpuDevice(1))
    assert all(linear._routes is None for linear in model.plain_linears)
    if can_pack(model.precision, CPU):
        model.pack()
        assert len(model.plain_linears) == 0
