"""The choice among ways to compute products of 16-bit numbers on a GPU, measured once per machine and shape."""

import logging
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from statistics import median
from typing import Annotated

import torch
from msgspec import Meta, Struct
from torch import Tensor

from tiercel import __version__
from tiercel.device.base import Device
from tiercel.engine.measure.cache_file import CacheFile
from tiercel.engine.models.decoder import Decoder
from tiercel.engine.models.dense_routes import DEFAULT, ROUTED_ROWS, DenseProduct, DenseRoutes, open_products
from tiercel.engine.models.precision import dtype_name
from tiercel.settings.settings import EngineSettings
from tiercel.values.errors import DeviceError
from tiercel.values.facts import Facts

log = logging.getLogger(__name__)

_VERSION = 1  # of the file; raise it when the way of measuring changes
LEAST_CAPABILITY = (9, 0)  # of the kernel
_MARGIN = 1.03  # times faster than the default: less is within the scatter of one measurement
_MOST_ERROR = 1e-2  # relative to the default: a way that computes something else is not used
_ALIGNED = 8  # elements: sizes that the kernel takes
_FLUSH_BYTES = 512 << 20  # written before each run: the weights leave the cache, and the host has time to queue the run
_WARM_UP, _TURNS = 2, 7
_Size = Annotated[int, Meta(ge=1, le=1 << 30)]
_Name = Annotated[str, Meta(max_length=20)]

Stopwatch = Callable[[Callable[[], object]], float]
"""Returns the milliseconds of a job on the device, with weights that come from memory and not from a cache."""


class StoredRoute(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The ways for one shape of weight, for each of ROUTED_ROWS."""

    outputs: _Size
    inputs: _Size
    names: Annotated[tuple[_Name, ...], Meta(min_length=len(ROUTED_ROWS), max_length=len(ROUTED_ROWS))]


class StoredRoutes(Struct, frozen=True, forbid_unknown_fields=True):
    """The file of choices."""

    version: Annotated[int, Meta(ge=_VERSION, le=_VERSION)]
    identity: Annotated[str, Meta(max_length=64)]
    routes: Annotated[tuple[StoredRoute, ...], Meta(max_length=10_000)]


def route_products(settings: EngineSettings, model: Decoder, device: Device) -> None:
    """Let the linear layers of a model use the fastest way for each shape, before graphs are recorded.

    Only on GPUs from Hopper on, with weights and activations of one type of 16 bits. Without `--calibration-seconds`
    nothing is measured, and choices of an earlier start are used.

    Cost:    about a second for the first start of a machine; 512 MiB of device memory meanwhile.
    Effects: the layers are changed; the file of choices is written.
    """
    capability, precision = device.capability, model.precision
    is_able = capability is not None and capability >= LEAST_CAPABILITY and find_spec("triton") is not None
    if not is_able or precision.weights is not precision.activations or precision.weights.itemsize != 2:
        return
    linears = model.plain_linears
    weights = {(linear.weight.shape[0], linear.weight.shape[1]): linear.weight for linear in linears}
    facts: Facts = {
        "version": _VERSION,
        "processor": torch.cuda.get_device_name(),
        "processors": device.processors,
        "weights": dtype_name(precision.weights),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "tiercel": __version__,
    }
    file = CacheFile(settings.cache_folder, "dense-products", facts, StoredRoutes)
    stopwatch = device_stopwatch if settings.calibration_s > 0 else None
    with torch.inference_mode():
        routes = choose_routes(list(weights.values()), open_products(device.processors), file, stopwatch)
    torch.cuda.empty_cache()
    for linear in linears:
        linear.route(routes)


def choose_routes(
    weights: Sequence[Tensor],
    products: Mapping[str, DenseProduct],
    file: CacheFile[StoredRoutes],
    stopwatch: Stopwatch | None,
) -> DenseRoutes:
    """Return the routes for weights of these shapes, from the file and by measuring those that it lacks.

    `stopwatch`: None if nothing may be measured; unknown shapes then take the default.
    """
    stored = file.read()
    known = {(one.outputs, one.inputs): one.names for one in (stored.routes if stored else ())}
    known = {shape: names for shape, names in known.items() if set(names) <= products.keys()}
    missing = [weight for weight in weights if tuple(weight.shape) not in known and is_routable(weight)]
    if stopwatch is not None and missing:
        for weight in missing:
            outputs, inputs = weight.shape
            known[outputs, inputs] = _fastest(weight, products, stopwatch)
        _keep(file, known)
    return DenseRoutes(products, known)


def is_routable(weight: Tensor) -> bool:
    """Return whether all ways take a weight of this shape."""
    return all(size % _ALIGNED == 0 for size in weight.shape) and weight.is_contiguous()


def _keep(file: CacheFile[StoredRoutes], known: Mapping[tuple[int, int], tuple[str, ...]]) -> None:
    routes = tuple(StoredRoute(*shape, names) for shape, names in sorted(known.items()))
    try:
        file.write(StoredRoutes(version=_VERSION, identity=file.identity, routes=routes))
    except OSError as exc:
        log.info("choice of products not kept path=%s error=%s", file.path, exc.strerror or exc)


def _fastest(weight: Tensor, products: Mapping[str, DenseProduct], stopwatch: Stopwatch) -> tuple[str, ...]:
    """Return the fastest way for each of ROUTED_ROWS; the default unless another one is faster by a margin."""
    names: list[str] = []
    for rows in ROUTED_ROWS:
        x = torch.randn(rows, weight.shape[1], dtype=torch.float32, device=weight.device).to(weight.dtype)
        wanted = products[DEFAULT](x, weight, None)
        default_ms = stopwatch(lambda x=x: products[DEFAULT](x, weight, None))
        ms_by_name = {DEFAULT: default_ms / _MARGIN}
        for name, product in products.items():
            if name != DEFAULT:
                ms = _time_of(name, product, x, weight, wanted, stopwatch)
                ms_by_name |= {} if ms is None else {name: ms}
        names.append(min(ms_by_name, key=lambda name: ms_by_name[name]))
        told = " ".join(f"{name}={ms:.4f}" for name, ms in {**ms_by_name, DEFAULT: default_ms}.items())
        log.info("products measured rows=%d outputs=%d inputs=%d ms %s", rows, *weight.shape, told)
    return tuple(names)


def _time_of(
    name: str, product: DenseProduct, x: Tensor, weight: Tensor, wanted: Tensor, stopwatch: Stopwatch
) -> float | None:
    """Return the time of a way; None if it cannot be used."""
    try:
        got = product(x, weight, None)
        error = float((got.float() - wanted.float()).norm() / wanted.float().norm())
        if not error <= _MOST_ERROR:  # a NaN is not, either
            log.warning("products by %s are wrong rows=%d outputs=%d error=%.3g", name, *wanted.shape, error)
            return None
        return stopwatch(lambda: product(x, weight, None))
    except (DeviceError, RuntimeError) as exc:
        log.warning("products by %s fail rows=%d outputs=%d error=%s", name, *wanted.shape, exc)
        return None


def device_stopwatch(job: Callable[[], object]) -> float:
    """Return the median milliseconds of some runs between two marks; each after a write that clears the cache."""
    flush = torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    marks: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
    for _ in range(_WARM_UP + _TURNS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        flush.zero_()
        begin.record()
        job()
        end.record()
        marks.append((begin, end))
    torch.cuda.synchronize()
    return median(begin.elapsed_time(end) for begin, end in marks[_WARM_UP:])
