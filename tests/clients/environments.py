"""Environments of client libraries: virtual environments and node_modules, each with pinned versions.

    python -m tests.clients.environments [NAME ...]

makes the environments of these names, or all, in the folder .clients of the checkout. `requirements/NAME.txt` lists the
packages of a virtual environment, `node/package.json` those of node. An environment that is up to date is left alone.
The variable CLIENT_ENVIRONMENTS names another folder, and PIP_ARGS holds further arguments of `pip install`.
"""

import os
import shlex
import shutil
import subprocess
import sys
import venv
from pathlib import Path

from tests.programs import end_unavailable

FOLDER = Path(os.environ.get("CLIENT_ENVIRONMENTS", Path(__file__).parents[2] / ".clients"))
TOURS = Path(__file__).parent
NODE = "node"
_UNSET = ("PYTHON", "OPENAI_", "ANTHROPIC_", "TIERCEL_", "VLLM_")


def names() -> list[str]:
    """Return the names of all environments."""
    return [*sorted(path.stem for path in (TOURS / "requirements").glob("*.txt")), NODE]


def make_environment(name: str) -> None:
    """Make an environment anew unless it is up to date. Raises CalledProcessError if an installation fails."""
    if _is_current(name):
        return
    folder = FOLDER / name
    shutil.rmtree(folder, ignore_errors=True)
    if name == NODE:
        folder.mkdir(parents=True)
        shutil.copy(_pins(name), folder)
        subprocess.run(["npm", "install", "--silent", "--no-audit", "--no-fund"], cwd=folder, check=True)
    else:
        venv.create(folder, with_pip=True)
        more = shlex.split(os.environ.get("PIP_ARGS", ""))
        pip = [folder / "bin/python", "-m", "pip", "--disable-pip-version-check", "--quiet", "install", *more]
        subprocess.run([*pip, "--requirement", _pins(name)], check=True)
    _marker(name).write_text(_pins(name).read_text())


def client_python(name: str) -> Path:
    """Return the Python that has a client library. Without it the calling test ends: see `end_unavailable`."""
    _require(name)
    return FOLDER / name / "bin" / "python"


def take_tour(name: str, tour: str, *arguments: str, patience_s: float = 280.0) -> str:
    """Run a script of this folder with a client library and return its output; the test fails with the output."""
    return run_client([str(client_python(name)), str(TOURS / tour), *arguments], patience_s=patience_s)


def take_node_tour(tour: str, *arguments: str, patience_s: float = 280.0) -> str:
    """Run a script of the folder `node` with the packages there; the same."""
    _require(NODE)
    # node looks for packages beside the script
    return run_client(["node", shutil.copy(TOURS / NODE / tour, FOLDER / NODE), *arguments], patience_s=patience_s)


def run_client(
    command: list[str], *, patience_s: float, cwd: Path | None = None, variables: dict[str, str] | None = None
) -> str:
    """Run a command without variables that steer clients or the project; the test fails if the command fails."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(_UNSET)}
    ended = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=patience_s, cwd=cwd,
        env=environment | (variables or {}), check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout
    return ended.stdout


def _pins(name: str) -> Path:
    return TOURS / NODE / "package.json" if name == NODE else TOURS / "requirements" / f"{name}.txt"


def _marker(name: str) -> Path:
    return FOLDER / name / ".made"


def _is_current(name: str) -> bool:
    return _marker(name).exists() and _marker(name).read_text() == _pins(name).read_text()


def _require(name: str) -> None:
    if not _is_current(name):
        end_unavailable(f"{FOLDER / name} is missing or has other versions (make test-clients CLIENTS={name})")


def main() -> int:
    """Make the environments named on the command line, or all."""
    wanted = sys.argv[1:] or names()
    unknown = sorted(set(wanted).difference(names()))
    if unknown:
        print(f"no such client: {' '.join(unknown)}. There are: {' '.join(names())}", file=sys.stderr)
        return 2
    for name in wanted:
        if name == NODE and shutil.which("npm") is None:
            print(
                "npm is missing: the tours of node are skipped. On Debian and Ubuntu: apt install npm", file=sys.stderr
            )
            if os.environ.get("TOOLS") == "required":
                return 1
            continue
        make_environment(name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
