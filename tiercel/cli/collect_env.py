"""`tiercel collect-env`: print facts about the machine for a bug report, without its name, addresses or paths."""

import json
import os
import platform
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated

import typer

from tiercel.cli.console import print_tables
from tiercel.values.errors import ConfigError
from tiercel.values.units import show_bytes

_PACKAGES = (
    *("tiercel", "torch", "triton", "transformers", "tokenizers", "safetensors", "numpy"),
    *("fastapi", "starlette", "uvicorn", "uvloop", "httptools", "pydantic", "msgspec"),
)
_CGROUP = Path("/sys/fs/cgroup")

Report = dict[str, dict[str, str]]


def collect_env(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> int:
    """Print versions, processor, memory, limits and devices for a bug report."""
    report = _report()
    if as_json:
        print(json.dumps(report, indent=2))
    else:
        print_tables(report)
    return 0


def _report() -> Report:
    return {
        "System": dict(_system()),
        "Processor and memory": dict(_processor()),
        "Limits of the cgroup": dict(_cgroup()),
        "PyTorch": dict(_torch()),
        "Native kernels": dict(_kernels()),
        "Packages": {name: found for name in _PACKAGES if (found := _version(name))},
    }


def _system() -> Iterator[tuple[str, str]]:
    yield "system", _field(Path("/etc/os-release"), "PRETTY_NAME", "=") or platform.system()
    yield "kernel", platform.release()
    yield "machine", platform.machine()
    yield "libc", " ".join(platform.libc_ver())
    yield "python", f"{platform.python_implementation()} {platform.python_version()}"


def _processor() -> Iterator[tuple[str, str]]:
    yield "processor", _field(Path("/proc/cpuinfo"), "model name", ":") or platform.processor() or "unknown"
    flags = set((_field(Path("/proc/cpuinfo"), "flags", ":") or "").split())
    wanted = ("avx2", "avx512f", "avx512_bf16", "avx512_fp16", "amx_bf16")
    yield "instructions", " ".join(name for name in wanted if name in flags) or "unknown"
    yield "cores", f"{os.cpu_count()} (this process may use {len(os.sched_getaffinity(0))})"
    for name, field in (("memory", "MemTotal"), ("memory free", "MemAvailable"), ("swap", "SwapTotal")):
        text = _field(Path("/proc/meminfo"), field, ":")
        yield name, show_bytes(int(text.split()[0]) * 1024) if text else "unknown"


def _cgroup() -> Iterator[tuple[str, str]]:
    quota = _text(_CGROUP / "cpu.max").split()
    if len(quota) == 2 and quota[0].isdigit():
        yield "processor", f"{int(quota[0]) / int(quota[1]):g} cores"
    else:
        yield "processor", "none"
    for name, file in (("memory", "memory.max"), ("memory used", "memory.current"), ("swap", "memory.swap.max")):
        text = _text(_CGROUP / file)
        yield name, show_bytes(int(text)) if text.isdigit() else (text and "none") or "unknown"


def _torch() -> Iterator[tuple[str, str]]:
    try:
        # lazy: its import takes seconds
        import torch
    except ImportError as exc:
        yield "torch", f"cannot be imported: {exc}"
        return
    yield "torch", torch.__version__
    yield "built for CUDA", torch.version.cuda or "no"
    yield "threads", f"{torch.get_num_threads()}"
    yield "CPU capability", torch.backends.cpu.get_cpu_capability()
    for index in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(index)
        capability = f"{device.major}.{device.minor}"
        yield f"device {index}", f"{device.name}, {show_bytes(device.total_memory)}, compute capability {capability}"
    driver = _text(Path("/proc/driver/nvidia/version")).splitlines()
    if driver:
        yield "driver", driver[0].removeprefix("NVRM version: ")


def _kernels() -> Iterator[tuple[str, str]]:
    try:
        # lazy: it imports torch
        from tiercel.engine.native.build import FOLDER
        from tiercel.engine.native.library import find_library

        found = find_library()
    except (ImportError, ConfigError) as exc:
        yield "class", f"unknown: {exc}"
        return
    if isinstance(found, str):
        yield "class", "none: " + found.replace(f"{FOLDER}{os.sep}", "")
        return
    yield "class", found.class_name
    yield "switched off", " ".join(found.switched_off) or "none"


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _text(path: Path) -> str:
    """Return the text of a small file of the kernel, or an empty text if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _field(path: Path, name: str, separator: str) -> str | None:
    for line in _text(path).splitlines():
        key, found, value = line.partition(separator)
        if found and key.strip() == name:
            return value.strip().strip('"')
    return None
