"""The file of measured step times. Imports no torch: `tiercel simulate` reads it, too."""

import logging
from collections.abc import Mapping
from typing import Annotated

from msgspec import Meta, Struct

from tiercel.engine.measure.cache_file import CacheFile
from tiercel.engine.measure.step_grid import StepGrid, StepShape
from tiercel.values.facts import Facts

log = logging.getLogger(__name__)

_VERSION = 1  # of the file; raise it when shapes or the way of measuring change
_MAX_MS = 1e7
_Count = Annotated[int, Meta(ge=0, le=1 << 40)]


class StoredTime(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The time of one measured shape."""

    prefill_tokens: _Count
    decodes: _Count
    context_tokens: _Count
    ms: Annotated[float, Meta(gt=0, le=_MAX_MS)]


class StoredTimes(Struct, frozen=True, forbid_unknown_fields=True):
    """The file of measured step times."""

    version: Annotated[int, Meta(ge=_VERSION, le=_VERSION)]
    identity: Annotated[str, Meta(max_length=64)]
    times: Annotated[tuple[StoredTime, ...], Meta(max_length=10_000)]

    def on_grid(self, grid: StepGrid) -> dict[StepShape, float]:
        """Return milliseconds by shape, for the shapes that are points of this grid."""
        ms_by_shape = {
            StepShape(time.prefill_tokens, time.decodes, time.context_tokens): time.ms for time in self.times
        }
        return {shape: ms for shape, ms in ms_by_shape.items() if grid.has(shape)}


def open_times_file(folder: str | None, facts: Facts) -> CacheFile[StoredTimes]:
    """Return the file of step times for these facts."""
    return CacheFile(folder, "step-times", {**facts, "version": _VERSION}, StoredTimes)


def read_times(file: CacheFile[StoredTimes], grid: StepGrid) -> dict[StepShape, float]:
    """Return the stored milliseconds of the shapes on this grid; none if the file cannot be used."""
    stored = file.read()
    return {} if stored is None else stored.on_grid(grid)


def write_times(file: CacheFile[StoredTimes], ms_by_shape: Mapping[StepShape, float]) -> None:
    """Keep measured times for the next start. A file that cannot be written is logged: the times are used anyway."""
    times = tuple(StoredTime(*shape, ms=min(max(ms, 1e-6), _MAX_MS)) for shape, ms in sorted(ms_by_shape.items()))
    try:
        file.write(StoredTimes(version=_VERSION, identity=file.identity, times=times))
    except OSError as exc:
        log.info("step times not kept path=%s error=%s", file.path, exc.strerror or exc)
