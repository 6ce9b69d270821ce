"""The facts of the machine, read by a process of its own, so that the run itself uses no device memory.

python -m benchmarks.gpu.machine    prints one JSON object; exit code 2 if torch sees no GPU
"""

import contextlib
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from pathlib import Path

PACKAGES = ("torch", "triton", "numpy", "transformers", "cuda-bindings", "vllm", "flash-attn-3")
_ROOT = Path(__file__).resolve().parents[2]


def versions() -> dict[str, str]:
    """Return the versions of installed packages."""
    found: dict[str, str] = {"python": platform.python_version()}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def commit() -> str:
    """Return the revision of the code, marked if files differ from it."""
    try:
        head = _words("git", "-C", str(_ROOT), "rev-parse", "HEAD")
        changed = _words("git", "-C", str(_ROOT), "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return f"{head} and changes" if changed else head


def driver() -> dict[str, str]:
    """Return the driver's facts of the first device."""
    fields = ("driver_version", "clocks.max.sm", "power.limit", "pcie.link.gen.current", "pcie.link.width.current")
    try:
        line = _words("nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader", "--id=0")
    except (OSError, subprocess.SubprocessError):
        return {}
    return dict(zip(fields, (value.strip() for value in line.split(",")), strict=False))


def facts() -> dict[str, object]:
    """Return all facts that a report of figures contains."""
    import torch  # lazy: the run itself only calls `commit`

    properties = torch.cuda.get_device_properties(0)
    return {
        "device": properties.name,
        "processors": properties.multi_processor_count,
        "device_bytes": properties.total_memory,
        "cache_bytes": properties.L2_cache_size,
        "capability": f"{properties.major}.{properties.minor}",
        "cuda": torch.version.cuda,
        "driver": driver(),
        "versions": versions(),
        "commit": commit(),
        "cores": len(os.sched_getaffinity(0)),
        "host_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": platform.release(),
    }


def _words(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip()


def main() -> int:
    """Print the facts, or one line with the reason why there are none."""
    try:
        import torch  # lazy: a missing package is reported in one line
    except ImportError as exc:
        print(f"no torch: {exc}", file=sys.stderr)
        return 2
    if not torch.cuda.is_available():
        build = torch.version.cuda or "none: a build for the CPU"
        print(f"no GPU: torch {torch.__version__} sees none (CUDA of the build: {build})", file=sys.stderr)
        return 2
    print(json.dumps(facts()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
