"""Programs of the system that some tests of `make test` need: strace, and promtool of the package prometheus.

`python -m tests.programs` installs those that are missing: strace by apt where the user is root, promtool out of
Debian's package into the virtual environment, without the service that the package brings. The environment variable
TOOLS, which the Makefile passes on, sets the effect of a missing program: with `required` a
test that needs it fails, otherwise it is skipped.
"""

import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import NoReturn

import pytest

from tests.deploy.machine import APT, CommandError, run

PACKAGES = {"strace": "strace", "promtool": "prometheus"}
BIN = Path(sys.executable).parent


def find_program(name: str, bin_folder: Path = BIN) -> str:
    """Return the path of a program. Without it the calling test ends: see `end_unavailable`."""
    return _which(name, bin_folder) or end_unavailable(
        f"there is no {name} (Debian and Ubuntu: apt install {PACKAGES[name]})"
    )


def end_unavailable(reason: str) -> NoReturn:
    """Skip the calling test, or fail it if TOOLS is `required`."""
    if os.environ.get("TOOLS") == "required":
        pytest.fail(f"{reason}, and TOOLS=required", pytrace=False)
    pytest.skip(reason)


def install_missing(bin_folder: Path = BIN) -> list[str]:
    """Install missing programs. Return the reasons for those that could not be installed."""
    missing = [name for name in PACKAGES if _which(name, bin_folder) is None]
    if not missing:
        return []
    is_root = os.geteuid() == 0
    reasons: list[str] = []
    try:
        if is_root:
            run(["apt-get", "update", "-qq"], environment=APT)
        if "strace" in missing and not is_root:
            reasons.append("strace: only root may install it")
        elif "strace" in missing:
            run(["apt-get", "install", "-qq", "--yes", "--no-install-recommends", "strace"], environment=APT)
        if "promtool" in missing:
            _unpack_promtool(bin_folder)
    except CommandError as exc:
        reasons.append(str(exc))
    return reasons


def main(bin_folder: Path = BIN) -> int:
    """Install missing programs and report those still missing. Return 1 if any are and TOOLS=required, else 0."""
    reasons = install_missing(bin_folder)
    missing = [name for name in PACKAGES if _which(name, bin_folder) is None]
    if missing:
        packages = " ".join(PACKAGES[name] for name in missing)
        print(f"The tests that need {' and '.join(missing)} cannot run here: {'; '.join(reasons)}.", file=sys.stderr)
        print(f"On Debian and Ubuntu: apt install {packages}", file=sys.stderr)
    return int(bool(missing) and os.environ.get("TOOLS") == "required")


def _which(name: str, bin_folder: Path) -> str | None:
    return shutil.which(name) or shutil.which(name, path=str(bin_folder))


def _unpack_promtool(bin_folder: Path) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run(["sh", "-c", 'cd "$0" && apt-get -qq -o APT::Sandbox::User=root download prometheus', folder])
        (package,) = folder.glob("*.deb")
        run(["dpkg", "-x", package, folder])
        shutil.copy2(folder / "usr/bin/promtool", bin_folder / "promtool")


if __name__ == "__main__":
    sys.exit(main())
