"""The processor: its name, its class of instructions, its caches."""

import os
import platform
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from benchmarks.cpu.refusal import refuse

ProcessorClass = Literal["portable", "avx2", "avx512_bf16", "amx"]
"""A class of x86-64 processors by the fastest products of 16-bit numbers; each includes those before it."""

CLASSES: tuple[ProcessorClass, ...] = get_args(ProcessorClass)

_FLAGS_BY_CLASS: dict[ProcessorClass, frozenset[str]] = {
    "avx2": frozenset({"avx2", "fma", "f16c"}),
    "avx512_bf16": frozenset({"avx512f", "avx512bw", "avx512vl", "avx512_bf16", "avx512_vnni"}),
    "amx": frozenset({"amx_tile", "amx_bf16", "amx_int8"}),
}
_CLASS_BY_SETTING: dict[str, ProcessorClass] = {
    "portable": "portable",
    "avx2": "avx2",
    "avx512": "avx512_bf16",
    "amx": "amx",
}
_CPUINFO = Path("/proc/cpuinfo")
_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")


@dataclass(frozen=True, slots=True)
class Processor:
    """The processor of a measurement."""

    name: str
    kind: ProcessorClass
    forced: bool  # `kind` comes from TIERCEL_CPU_CLASS and is below what the processor can do
    threads: int  # cores that this process may use
    caches: dict[str, str]  # size by name, such as L2: 1024K, of the first core
    memory_gb: float


def class_of(flags: Collection[str]) -> ProcessorClass:
    """Return the class of a processor with these flags of /proc/cpuinfo."""
    found: ProcessorClass = "portable"
    for kind, needed in _FLAGS_BY_CLASS.items():
        if not needed.issubset(flags):
            break
        found = kind
    return found


def read_processor(setting: str | None = None) -> Processor:
    """Return the processor of this machine. `setting`: a value of TIERCEL_CPU_CLASS, which lowers the class.

    Errors: SystemExit if the setting is unknown or above the machine's class.
    """
    lines = _CPUINFO.read_text(encoding="utf-8").splitlines() if _CPUINFO.exists() else []
    fields = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    highest = class_of(fields.get("flags", "").split())
    kind = highest if not setting else _CLASS_BY_SETTING.get(setting)
    if kind is None or CLASSES.index(kind) > CLASSES.index(highest):
        allowed = ", ".join(name for name, known in _CLASS_BY_SETTING.items() if known in _up_to(highest))
        refuse(f"TIERCEL_CPU_CLASS is {setting!r}; this processor allows {allowed}")
    name = fields.get("model name", platform.machine())
    family = ", ".join(f"{key} {fields[key]}" for key in ("cpu family", "model") if key in fields)
    return Processor(
        name=f"{name} ({family})" if family else name,
        kind=kind,
        forced=kind != highest,
        threads=len(os.sched_getaffinity(0)),
        caches=_read_caches(),
        memory_gb=round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e9, 1),
    )


def _up_to(kind: ProcessorClass) -> tuple[ProcessorClass, ...]:
    return CLASSES[: CLASSES.index(kind) + 1]


def _read_caches() -> dict[str, str]:
    found: dict[str, str] = {}
    for folder in sorted(_CACHES.glob("index*")):
        level, kind, size = (_text(folder / name) for name in ("level", "type", "size"))
        if level and size:
            found[f"L{level}{kind[0].lower() if level == '1' else ''}"] = size
    return found


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""
