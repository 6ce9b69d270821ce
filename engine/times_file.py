"""Measured step times on disk: a file for each machine, model and set of limits, checked and not believed."""

import hashlib
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from tiercel.engine.own_file import read_own, replace_own
from tiercel.engine.step_grid import Shape, StepGrid

log = logging.getLogger(__name__)

_VERSION = 1  # to be raised when shapes or measuring change
_MOST_MS = 1e7
_Count = Annotated[int, Meta(ge=0, le=1 << 40)]


class StoredTime(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One measured shape."""

    prefill_tokens: _Count
    decodes: _Count
    context_tokens: _Count
    ms: Annotated[float, Meta(gt=0, le=_MOST_MS)]


class StoredTimes(Struct, frozen=True, forbid_unknown_fields=True):
    """The file."""

    version: int
    identity: Annotated[str, Meta(max_length=64)]
    times: Annotated[tuple[StoredTime, ...], Meta(max_length=10_000)]


class TimesFile:
    """Times of one identity. Neither reading nor writing ever fails: a table is only ever a head start."""

    def __init__(self, folder: str | None, facts: tuple[str, ...]) -> None:
        """`facts` name everything that times depend on; None for a folder keeps nothing."""
        self._identity = hashlib.sha256("\0".join((str(_VERSION), *facts)).encode()).hexdigest()
        self.path = None if folder is None else Path(folder) / f"step-times-{self._identity[:24]}.json"

    def read(self, grid: StepGrid) -> dict[Shape, float]:
        """The points of this grid that are on file; none when the file is missing, damaged or somebody else's."""
        if self.path is None:
            return {}
        try:
            stored = msgspec.json.decode(read_own(self.path), type=StoredTimes)
        except (FileNotFoundError, NotADirectoryError):
            return {}
        except OSError as exc:
            log.warning("step times not read path=%s error=%s", self.path, exc.strerror or exc)
            return {}
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
            log.warning("step times not taken path=%s error=%s", self.path, exc)
            return {}
        if stored.version != _VERSION or stored.identity != self._identity:
            log.warning("step times not taken path=%s error=of another model, machine or version", self.path)
            return {}
        times = {Shape(time.prefill_tokens, time.decodes, time.context_tokens): time.ms for time in stored.times}
        return {shape: ms for shape, ms in times.items() if grid.has(shape)}

    def write(self, times: Mapping[Shape, float]) -> None:
        """Replace the file at once, readable by its owner only."""
        if self.path is None:
            return
        rows = tuple(StoredTime(*shape, ms=min(max(ms, 1e-6), _MOST_MS)) for shape, ms in sorted(times.items()))
        text = msgspec.json.encode(StoredTimes(version=_VERSION, identity=self._identity, times=rows))
        try:
            replace_own(self.path, text)
        except OSError as exc:
            log.info("step times not kept path=%s error=%s", self.path, exc.strerror or exc)
