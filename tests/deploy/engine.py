"""A Docker engine for the tests, in private namespaces and without an outside network."""

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

from tests.deploy.machine import PRIVATE, CommandError, NoEngineError, run

TINY = "tiercel-deploy/busybox"
"""An image that every engine of ours has; its one program is /busybox."""

GROUP = "tiercel-deploy"
START_S = 30.0
STOP_S = 20.0
# A /run of its own hides the machine's containerd; without iptables the published ports go through Docker's proxy.
INIT = """
mount -t tmpfs tmpfs /run
ip link set lo up
exec tini -g -- dockerd --config-file "$1/daemon.json" --host "unix://$1/docker.sock" --data-root "$2" \
    --exec-root /run/docker --pidfile /run/docker.pid --cgroup-parent "$3" --iptables=false
"""


class Engine:
    """One running dockerd. Published ports are reached inside `network()`."""

    def __init__(self, process: "subprocess.Popen[bytes]", folder: Path, plugins: Path) -> None:
        self._process = process
        self.log = folder / "dockerd.log"
        self._environment = {**os.environ, "DOCKER_HOST": f"unix://{folder}/docker.sock", "DOCKER_CONFIG": str(plugins)}

    def docker(
        self, *words: str | Path, variables: Mapping[str, str] = MappingProxyType({}), patience_s: float = 600.0
    ) -> str:
        """Run the Docker client with additional variables and return its output. Errors: CommandError."""
        return run(["docker", *words], environment={**self._environment, **variables}, patience_s=patience_s)

    def pid(self) -> int:
        """Pid of the first process of the engine's namespaces, outside of them."""
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text().split()
        return int(children[0])

    @contextlib.contextmanager
    def network(self) -> Iterator[None]:
        """Put the calling thread and its children into the engine's network until the block ends."""
        with open("/proc/thread-self/ns/net") as outside, open(f"/proc/{self.pid()}/ns/net") as inside:
            _enter(inside.fileno())
            try:
                yield
            finally:
                _enter(outside.fileno())

    def wait_ready(self) -> None:
        """Wait until the engine answers. Errors: NoEngineError with the last lines of its log."""
        end_s = time.monotonic() + START_S
        while time.monotonic() < end_s and self._process.poll() is None:
            with contextlib.suppress(CommandError):
                self.docker("version", patience_s=10)
                return
            time.sleep(0.1)
        last = " | ".join(self.log.read_text(errors="replace").splitlines()[-3:])
        raise NoEngineError(f"dockerd does not start: {last}")

    def try_container(self) -> None:
        """Run a minimal container with the limits of ours. Errors: CommandError."""
        with tempfile.TemporaryDirectory() as folder:
            shutil.copy2(shutil.which("busybox") or "busybox", Path(folder) / "busybox")
            archive = Path(folder) / "image.tar"
            run(["tar", "-C", folder, "-cf", archive, "busybox"])
            self.docker("import", archive, TINY)
        limits = ("--memory=64m", "--pids-limit=64", "--cap-drop=ALL", "--read-only")
        self.docker("run", "--rm", "--init=false", *limits, TINY, "/busybox", "true", patience_s=60)

    def stop(self) -> None:
        """End the containers, then the engine; everything in its namespaces goes with it."""
        with contextlib.suppress(ProcessLookupError, FileNotFoundError, IndexError):
            os.kill(self.pid(), signal.SIGTERM)
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()  # unshare ends its child, too
            self._process.wait()


@contextlib.contextmanager
def docker_engine(data: Path, plugins: Path) -> Iterator[Engine]:
    """Run an engine with its images in `data` until the block ends. Errors: NoEngineError, CommandError."""
    with tempfile.TemporaryDirectory(prefix="tiercel-deploy-") as name:
        folder = Path(name)
        (folder / "daemon.json").write_text("{}")  # not that of the machine
        init = ["sh", "-euc", INIT, "init", str(folder), str(data), f"/{GROUP}-{os.getpid()}"]
        with (folder / "dockerd.log").open("wb") as log:
            process = subprocess.Popen(
                ["setpriv", "--pdeathsig=KILL", "unshare", *PRIVATE, "--kill-child", *init],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        engine = Engine(process, folder, plugins)
        try:
            engine.wait_ready()
            engine.try_container()
            yield engine
        finally:
            engine.stop()
            _remove_groups()


def _enter(namespace: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)  # os.setns exists from Python 3.12 on
    if libc.setns(namespace, 0):
        raise NoEngineError(f"the engine's network cannot be entered: {os.strerror(ctypes.get_errno())}")


def _remove_groups() -> None:
    """Remove the empty control groups of this engine or of a killed one."""
    root = Path("/sys/fs/cgroup")
    for top in (*root.glob(f"{GROUP}-*"), *root.glob(f"*/{GROUP}-*")):
        for folder in sorted((path for path in (top, *top.rglob("*")) if path.is_dir()), reverse=True):
            with contextlib.suppress(OSError):
                folder.rmdir()
