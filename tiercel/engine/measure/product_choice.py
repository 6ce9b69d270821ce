"""The choice between the native matrix products and oneDNN's, by measuring both at load and keeping the result."""

import logging
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated

import torch
from msgspec import Meta, Struct

from tiercel import __version__
from tiercel.engine.measure.cache_file import CacheFile
from tiercel.engine.measure.machine_facts import cpu_name
from tiercel.engine.models.layers import Linear
from tiercel.engine.models.precision import Precision
from tiercel.engine.native.build import source_digest
from tiercel.engine.native.library import NativeLibrary
from tiercel.values.facts import Facts

log = logging.getLogger(__name__)

_VERSION = 1  # of the file; raise it when the way of measuring changes
_ROWS = (1, 4, 16, 64, 256)  # all count the same
_TURNS = 3
_Size = Annotated[int, Meta(ge=1, le=1 << 30)]


class StoredChoice(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The choice for one shape of weight."""

    outputs: _Size
    inputs: _Size
    is_native: bool


class StoredChoices(Struct, frozen=True, forbid_unknown_fields=True):
    """The file of choices."""

    version: Annotated[int, Meta(ge=_VERSION, le=_VERSION)]
    identity: Annotated[str, Meta(max_length=64)]
    choices: Annotated[tuple[StoredChoice, ...], Meta(max_length=10_000)]


Measure = Callable[[int, int], float]
"""Returns by how much the native products are faster for a weight of these outputs and inputs, as a ratio of times."""


class ProductChoice:
    """Answers whether the native products of a shape of weight are faster; a shape is measured once per machine."""

    def __init__(self, file: CacheFile[StoredChoices], measure: Measure) -> None:
        self._file = file
        self._measure = measure
        stored = file.read()
        self._is_native_by_shape = {
            (choice.outputs, choice.inputs): choice.is_native for choice in (stored.choices if stored else ())
        }

    def prefers_native(self, outputs: int, inputs: int) -> bool:
        """Return whether the native products are faster. Cost: tens of milliseconds for a shape not known yet."""
        known = self._is_native_by_shape.get((outputs, inputs))
        if known is not None:
            return known
        ratio = self._measure(outputs, inputs)
        log.info("products measured outputs=%d inputs=%d native_speed_to_onednn=%.2f", outputs, inputs, ratio)
        self._is_native_by_shape[outputs, inputs] = ratio >= 1
        self._keep()
        return ratio >= 1

    def _keep(self) -> None:
        choices = tuple(StoredChoice(*shape, chosen) for shape, chosen in sorted(self._is_native_by_shape.items()))
        try:
            self._file.write(StoredChoices(version=_VERSION, identity=self._file.identity, choices=choices))
        except OSError as exc:
            log.info("choice of products not kept path=%s error=%s", self._file.path, exc.strerror or exc)


def open_product_choice(folder: str | None, threads: int, library: NativeLibrary) -> ProductChoice:
    """Return the choices for this machine, number of threads and these kernels."""
    facts: Facts = {
        "version": _VERSION,
        "processor": cpu_name(),
        "threads": threads,
        "native_kernels": library.class_name,
        "native_source": source_digest(),
        "torch": torch.__version__,
        "tiercel": __version__,
    }
    file = CacheFile(folder, "matrix-products", facts, StoredChoices)
    return ProductChoice(file, lambda outputs, inputs: compare_products(library, threads, outputs, inputs))


def compare_products(library: NativeLibrary, threads: int, outputs: int, inputs: int) -> float:
    """Return oneDNN's time over the native one: the geometric mean over numbers of rows, in bfloat16.

    The products run with the number of threads of the compute lane, in a thread of their own. Its team ends with it;
    a team of the calling thread would stay and slow down that of the lane (see `openmp.py`).
    """
    with ThreadPoolExecutor(1, initializer=lambda: torch.set_num_threads(threads)) as pool:
        return pool.submit(_compare, library, outputs, inputs).result()


def _compare(library: NativeLibrary, outputs: int, inputs: int) -> float:
    native, other = (
        Linear(inputs, (outputs,), False, Precision.of(torch.bfloat16), torch.device("cpu")) for _ in range(2)
    )
    for layer, kernels in ((native, library), (other, None)):
        layer.weight.normal_()
        layer.pack(kernels)
    ratios = [_time_of(other, rows, inputs) / _time_of(native, rows, inputs) for rows in _ROWS]
    return statistics.geometric_mean(ratios)


def _time_of(layer: Linear, rows: int, inputs: int) -> float:
    x = torch.ones(rows, inputs, dtype=torch.bfloat16)
    times: list[float] = []
    for _ in range(_TURNS):
        start = time.perf_counter()
        layer.forward(x)
        times.append(time.perf_counter() - start)
    return statistics.median(times)
