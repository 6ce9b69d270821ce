"""An engine, the image and a running daemon for the deployment tests, or the reason why no engine can run.

TORCH, PIP_ARGS   as in the Makefile: where the wheels of the image come from
ENGINE            `required`: without an engine the tests fail instead of being skipped
"""

import contextlib
import fcntl
import os
import shlex
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NoReturn

import pytest

from tests.deploy import machine, supplies
from tests.deploy.engine import Engine, docker_engine
from tests.deploy.machine import CommandError, NoEngineError
from tests.deploy.stack import Stack
from tests.deploy.supplies import BASE

PROMETHEUS = "tiercel-deploy/prometheus"
PORT = 8000
KEPT_BUILDS = "12GB"

REASON = pytest.StashKey[str]()
FIGURES = pytest.StashKey[list[str]]()


@pytest.fixture(scope="session")
def figures(pytestconfig: pytest.Config) -> list[str]:
    """Return the list of measurements that are printed at the end of the run."""
    return pytestconfig.stash.setdefault(FIGURES, [])


@pytest.fixture(scope="session")
def cache() -> Iterator[Path]:
    """Return the cache folder, locked for one run at a time."""
    folder = supplies.cache_folder()
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield folder


@pytest.fixture(scope="session")
def base(cache: Path, pytestconfig: pytest.Config) -> Path:
    """Return the tar of the base image, after installing what an engine needs."""
    try:
        machine.require_namespaces()
        machine.install_programs()
        with ThreadPoolExecutor() as pool:
            plugins = pool.submit(machine.fetch_plugins, _plugins(cache))
            base = pool.submit(supplies.make_base, cache)
            plugins.result()
            return base.result()
    except (NoEngineError, CommandError) as exc:
        _give_up(pytestconfig, str(exc))


@pytest.fixture(scope="session")
def engine(cache: Path, base: Path, pytestconfig: pytest.Config) -> Iterator[Engine]:
    """Yield a running engine with the base image."""
    with contextlib.ExitStack() as stack:
        try:
            engine = stack.enter_context(docker_engine(cache / "engine", _plugins(cache)))
        except (NoEngineError, CommandError) as exc:
            _give_up(pytestconfig, str(exc))
        digest = engine.docker("images", "--quiet", "--filter", f"label=base={base.parent.name}")
        if not digest:
            change = ["--change", f"LABEL base={base.parent.name}", "--change", 'CMD ["python3"]']
            engine.docker("import", *change, "--change", "ENV LANG=C.UTF-8", base, BASE)
        yield engine


@pytest.fixture(scope="session")
def tree(engine: Engine, cache: Path, figures: list[str]) -> Path:
    """Build the image and return the copy of the repository that it was built from."""
    torch = os.environ.get("TORCH") or "torch"
    wheels = supplies.make_wheelhouse(cache, torch, shlex.split(os.environ.get("PIP_ARGS", "")))
    tree = supplies.stage_tree(cache, wheels)
    began_s = time.monotonic()
    compose = ["compose", "--file", str(tree / "docker" / "compose.yaml")]
    variables = {"BASE": BASE, "COMPILER": BASE, "TORCH": torch, "PIP_ARGS": "--no-index", "TIERCEL_API_KEY": "none"}
    engine.docker(*compose, "build", "--quiet", variables=variables, patience_s=1200)
    figures.append(f"image built in {time.monotonic() - began_s:.1f} s")
    engine.docker("image", "prune", "--force")
    engine.docker("builder", "prune", "--force", "--keep-storage", KEPT_BUILDS)
    return tree


@pytest.fixture(scope="session")
def prometheus(engine: Engine, cache: Path) -> str | None:
    """Return an image of Prometheus, if apt has one."""
    folder = supplies.fetch_prometheus(cache)
    if folder is None:
        return None
    engine.docker("build", "--quiet", "--tag", PROMETHEUS, "--build-arg", f"BASE={BASE}", folder)
    return PROMETHEUS


@pytest.fixture(scope="session")
def network(engine: Engine, tree: Path, prometheus: str | None) -> Iterator[None]:
    """Enter the engine's network; all downloads are done before."""
    with engine.network():
        yield


@pytest.fixture(scope="session")
def stack(engine: Engine, tree: Path, network: None) -> Iterator[Stack]:
    """Yield the daemon as docker/compose.yaml runs it. Tests leave it running and ready."""
    stack = Stack(engine, "tiercel", (tree / "docker" / "compose.yaml",), PORT)
    stack.compose("down", "--volumes", "--remove-orphans")  # remains of a killed run
    try:
        yield stack
    finally:
        stack.compose("--profile", "*", "down", "--volumes", "--timeout", "5")
        stack.http.close()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print the measurements, or the reason why there was no engine, also on standard error."""
    reason = config.stash.get(REASON, None)
    if reason is not None:
        text = f"NO DOCKER ENGINE HERE, only static checks ran: {reason}"
        terminalreporter.write_line(text, red=True)
        terminalreporter.flush()
        print(text, file=sys.stderr, flush=True)
    for line in config.stash.get(FIGURES, []):
        terminalreporter.write_line(line)


def _plugins(cache: Path) -> Path:
    folder = cache / "client"
    folder.mkdir(exist_ok=True)
    return folder


def _give_up(config: pytest.Config, reason: str) -> NoReturn:
    config.stash[REASON] = reason
    if os.environ.get("ENGINE") == "required":
        pytest.fail(f"no Docker engine: {reason}", pytrace=False)
    pytest.skip("no Docker engine")
