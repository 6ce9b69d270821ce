"""Offline inputs of the image build: base image, wheelhouse, copy of the tree.

Base image and wheelhouse are cached by a hash of their inputs.
"""

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

from tests.deploy.machine import CommandError, debian_mirror, run

ROOT = Path(__file__).resolve().parent.parent.parent
BASE = "tiercel-deploy/python:3.11-slim"
SUITE, PYTHON = "bookworm", (3, 11)  # the Debian of the base image, and its Python
BASE_PACKAGES = "python3,python3-pip,ca-certificates"
JUNK = ("var/cache/apt/archives", "var/lib/apt/lists", "usr/share/doc", "usr/share/man", "usr/share/locale")
EXTRAS = ("fast", "bench", "otel")
KERNELS = ROOT / "tiercel" / "engine" / "native" / "_kernels.so"
PROMETHEUS = """ARG BASE
FROM ${BASE}
COPY prometheus /bin/prometheus
ENTRYPOINT ["/bin/prometheus"]
"""
GLIBC = (17, 24, 26, 27, 28, 31, 34, 35, 36)  # 2.x, up to that of SUITE


def cache_folder() -> Path:
    """Return $XDG_CACHE_HOME/tiercel/deploy, creating it if needed."""
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    folder = (base if base.is_absolute() else Path.home() / ".cache") / "tiercel" / "deploy"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def make_base(cache: Path) -> Path:
    """Return a tar of a small Debian with Python and pip. Errors: CommandError."""
    mirror = debian_mirror()

    def make(folder: Path) -> None:
        root = folder / "root"
        words = ["debootstrap", "--variant=minbase", f"--include={BASE_PACKAGES}", SUITE, str(root)]
        run([*words, *([mirror] if mirror else [])])
        for junk in JUNK:
            shutil.rmtree(root / junk, ignore_errors=True)
        run(["tar", "-C", root, "-cf", folder / "base.tar", "."])
        shutil.rmtree(root)

    return _kept(cache, "base", (SUITE, BASE_PACKAGES, str(mirror)), make) / "base.tar"


def make_wheelhouse(cache: Path, torch: str, pip_args: list[str]) -> Path:
    """Return a folder with every wheel that the Dockerfile installs. Errors: CommandError."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [line for line in pins if not line.startswith("torch==")]
    wanted = [*project["build-system"]["requires"], *project["project"]["dependencies"]]
    wanted += [line for extra in EXTRAS for line in project["project"]["optional-dependencies"][extra]]

    def make(folder: Path) -> None:
        (folder / "pins.txt").write_text("\n".join(pins), encoding="utf-8")
        words = [sys.executable, "-m", "pip", "download", "--quiet", "--only-binary", ":all:", "--dest", folder]
        run([*words, *_for_base(), *pip_args, "--constraint", folder / "pins.txt", torch, *wanted])

    return _kept(cache, "wheels", (torch, *pip_args, *pins, *wanted, *_for_base()), make)


def fetch_prometheus(cache: Path) -> Path | None:
    """Return the folder for a Docker build of Debian's Prometheus, or None if apt has none."""

    def make(folder: Path) -> None:
        run(["sh", "-c", 'cd "$0" && apt-get -qq -o APT::Sandbox::User=root download prometheus', folder])
        (package,) = folder.glob("*.deb")
        run(["dpkg", "-x", package, folder / "unpacked"])
        shutil.copy2(folder / "unpacked/usr/bin/prometheus", folder / "prometheus")
        shutil.rmtree(folder / "unpacked")
        package.unlink()
        (folder / "Dockerfile").write_text(PROMETHEUS, encoding="utf-8")

    try:
        return _kept(cache, "prometheus", (PROMETHEUS,), make)
    except CommandError:
        return None


def stage_tree(cache: Path, wheelhouse: Path) -> Path:
    """Copy the tree, with the wheels in docker/wheels and the compiled kernels, and return the folder.

    The base image has no compiler. The folder is always the same, so that only changes are sent to the engine.
    """
    folder = cache / "tree"
    shutil.rmtree(folder, ignore_errors=True)
    for name in _files():
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target, follow_symlinks=False)
    if KERNELS.is_file():
        shutil.copy2(KERNELS, folder / KERNELS.relative_to(ROOT))
    for wheel in wheelhouse.glob("*.whl"):
        os.link(wheel, folder / "docker" / "wheels" / wheel.name)
    return folder


def _files() -> list[str]:
    """Return every file that git would have; in an unpacked archive, every file that is not hidden."""
    words = ["git", "ls-files", "-co", "--exclude-standard", "-z"]
    try:
        listed = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    except (OSError, subprocess.CalledProcessError):
        paths = [path.relative_to(ROOT) for path in ROOT.rglob("*")]
        listed = [str(path) for path in paths if not path.parts[0].startswith(".")]
        listed.append(".dockerignore")
    return [name for name in listed if name and ((ROOT / name).is_file() or (ROOT / name).is_symlink())]


def _for_base() -> list[str]:
    """Return arguments with which pip chooses wheels for the base image's Python."""
    if sys.version_info[:2] == PYTHON:
        return []
    tag = "".join(map(str, PYTHON))
    machine = platform.machine()
    names = ["2014", *(f"_2_{minor}" for minor in GLIBC)]
    platforms = [word for name in names for word in ("--platform", f"manylinux{name}_{machine}")]
    return ["--python-version", tag, "--implementation", "cp", *platforms]


def _kept(cache: Path, kind: str, inputs: tuple[str, ...], make: Callable[[Path], None]) -> Path:
    """Return the folder built from these inputs, building it if needed; folders of other inputs are deleted."""
    key = hashlib.sha256("\0".join((kind, *inputs)).encode()).hexdigest()[:16]
    folder = cache / f"{kind}-{key}"
    if folder.exists():
        return folder
    for old in cache.glob(f"{kind}-*"):
        shutil.rmtree(old)
    draft = cache / f"{kind}-draft"
    draft.mkdir()
    try:
        make(draft)
    except CommandError:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    draft.rename(folder)
    return folder
